"""Defines every op in plain PyTorch, with the op's signature. The tests compare the ops with these in float64. Some of
them are also the plain forms of functional/, which forward-mode differentiation runs.

A function that draws random numbers also takes a seed; if it is None, the function draws one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a * b + c


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.relu(x * scale + bias)


def relu(input: Tensor) -> Tensor:
    return torch.relu(input)


def mish(input: Tensor) -> Tensor:
    return input * torch.tanh(torch.nn.functional.softplus(input))


def silu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    # Avoids 1 + erf and 1 + tanh, whose terms cancel for negative inputs.
    if approximate == "none":
        return 0.5 * input * torch.special.erfc(input * -math.sqrt(0.5))
    return input * torch.sigmoid(math.sqrt(8 / math.pi) * (input + 0.044715 * input**3))


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return gelu(x + bias, approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return gelu(gate, approximate) * up


def reduce_sum(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(input, dim if dim is None or isinstance(dim, int) else tuple(dim), keepdim)


def philox(seed: Tensor, numel: int) -> Tensor:
    """Returns 32 random bits for each of the elements 0 to numel - 1, as int64. Each word of Philox 4x32-7 (Salmon et
    al. 2011) serves two elements: the second gets the word with its 16-bit halves exchanged."""
    group, zero, low = torch.arange((numel + 7) // 8, device=seed.device), seed.new_zeros(()), 0xFFFFFFFF
    word = [group & low, group >> 32, zero, zero]
    key = [seed & low, seed >> 32 & low]
    for _ in range(7):
        product = [word[0] * 0xD2511F53, word[2] * 0xCD9E8D57]  # below 2^64, so that all bits are kept in int64
        word = [
            product[1] >> 32 & low ^ word[1] ^ key[0],
            product[1] & low,
            product[0] >> 32 & low ^ word[3] ^ key[1],
            product[0] & low,
        ]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    words = torch.stack(word, -1).flatten()
    return torch.stack([words, words << 16 & low | words >> 16], -1).flatten()[:numel]


def dropout(input: Tensor, p: float = 0.5, training: bool = True, seed: Tensor | None = None) -> Tensor:
    if p == 0 or not training:
        return input
    if seed is None:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=input.device)
    dropped = max(int(p * 2**32 + 0.5), 1)  # an element is dropped if its 32 random bits are below this number
    kept = (philox(seed, input.numel()) >= dropped).view(input.shape)
    return torch.where(kept, input / (1 - p), 0) if p < 1 else torch.where(kept, input, 0)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    s = residual + dropout(x, p, training, seed)
    return layer_norm(s, normalized_shape, weight, bias, eps), s


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    s = residual + dropout(x, p, training, seed)
    return rms_norm(s, normalized_shape, weight, eps), s


def layer_norm_dropout(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.5,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    return dropout(layer_norm(x, normalized_shape, weight, bias, eps), p, training, seed)


def cumsum(input: Tensor, dim: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    x = input.reshape(input.shape or (1,))
    x = x.flip(dim) if reverse else x
    y = torch.cumsum(x, dim)
    if exclusive and x.shape[dim] > 0:
        y = torch.cat([torch.zeros_like(y.narrow(dim, 0, 1)), y.narrow(dim, 0, x.shape[dim] - 1)], dim)
    return (y.flip(dim) if reverse else y).reshape(input.shape)


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    return torch.logcumsumexp(input, dim)


def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = None, *, dim: int = -2, reverse: bool = False
) -> Tensor:
    if b.dim() == 0:
        return a * (torch.zeros_like(b) if h0 is None else h0) + b
    steps = list(zip(a.expand(b.shape).unbind(dim), b.unbind(dim), strict=True))
    h = b.new_zeros(b.shape[:dim] + b.shape[dim:][1:]) if h0 is None else h0
    states = []
    for factor, term in reversed(steps) if reverse else steps:
        h = factor * h + term
        states.append(h)
    if not states:
        return a + b if h0 is None else a + b + h0.unsqueeze(dim)  # an empty result of all inputs, for autograd
    return torch.stack(states[::-1] if reverse else states, dim)


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(input, dim)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(input, dim)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    z = input if softcap is None else softcap * torch.tanh(input / softcap)
    loss = torch.nn.functional.cross_entropy(
        z, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    classes = min(1, z.dim() - 1)
    is_counted = target != ignore_index
    w = z.new_ones(z.shape[classes]) if weight is None else weight
    w = torch.where(is_counted, w[torch.where(is_counted, target, 0)], 0)
    if z_loss != 0:
        # The maximum is subtracted, because torch computes logsumexp's gradient as exp(z - lse), and beside a huge
        # maximum lse has lost the logarithm of the sum.
        most = z.detach().amax(classes, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        lse = torch.logsumexp(z - most, classes) + most.squeeze(classes)
        loss = loss + torch.where(is_counted, z_loss * w * lse.square(), 0)
    if reduction == "none":
        return loss
    return loss.sum() / w.sum() if reduction == "mean" else loss.sum()


def token_log_probs(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits / temperature, -1)
    terms = torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p)
    return log_p.gather(-1, target[..., None])[..., 0], -terms.sum(-1)


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = cross_entropy(
        logits, target, weight, ignore_index, reduction, label_smoothing, z_loss=z_loss, softcap=softcap
    )
    return loss.reshape(x.shape[:-1]) if reduction == "none" else loss


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotated = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return torch.cat([-x[..., rotated // 2 :], x[..., : rotated // 2]], -1)

    def rotate(x: Tensor) -> Tensor:
        # If x has a batch dimension, cos and sin get one for the heads. Otherwise they lose their batch dimension.
        c, s = (f[..., None, :, :] if x.dim() == 4 else f.reshape(f.shape[-2:]) for f in (cos, sin))
        y = x[..., :rotated] * c + turned(x[..., :rotated]) * s
        return torch.cat([y.to(x.dtype), x[..., rotated:]], -1)

    return rotate(q), rotate(k)
