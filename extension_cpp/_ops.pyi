"""The types of _ops.py. `make docs` writes them from the operators' schemas."""

from collections.abc import Sequence

from torch import Tensor

def muladd(a: Tensor, b: Tensor, c: float, /) -> Tensor: ...
def muladd_backward(grad_out: Tensor, a: Tensor, b: Tensor, /) -> tuple[Tensor, Tensor]: ...
def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = ..., /) -> Tensor: ...
def scale_bias_relu_backward(
    grad_out: Tensor, x: Tensor, bias: Tensor, scale: float, needs_grad_x: bool, needs_grad_bias: bool, /
) -> tuple[Tensor, Tensor]: ...
def relu(x: Tensor, /) -> Tensor: ...
def relu_backward(grad_out: Tensor, y: Tensor, /) -> Tensor: ...
def mish(x: Tensor, /) -> Tensor: ...
def mish_backward(grad_out: Tensor, x: Tensor, /) -> Tensor: ...
def mish_double_backward(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor, /) -> Tensor: ...
def silu(x: Tensor, /) -> Tensor: ...
def silu_backward(grad_out: Tensor, x: Tensor, /) -> Tensor: ...
def silu_double_backward(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor, /) -> Tensor: ...
def gelu(x: Tensor, tanh: bool = ..., /) -> Tensor: ...
def gelu_backward(grad_out: Tensor, x: Tensor, tanh: bool, /) -> Tensor: ...
def gelu_double_backward(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor, tanh: bool, /) -> Tensor: ...
def bias_gelu(x: Tensor, bias: Tensor, tanh: bool = ..., /) -> Tensor: ...
def bias_gelu_backward(
    grad_out: Tensor, x: Tensor, bias: Tensor, tanh: bool, needs_grad_x: bool, needs_grad_bias: bool, /
) -> tuple[Tensor, Tensor]: ...
def swiglu(gate: Tensor, up: Tensor, /) -> Tensor: ...
def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, /) -> tuple[Tensor, Tensor]: ...
def geglu(gate: Tensor, up: Tensor, tanh: bool = ..., /) -> Tensor: ...
def geglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, tanh: bool, /) -> tuple[Tensor, Tensor]: ...
def reduce_sum(x: Tensor, dim: Sequence[int] | None = ..., keepdim: bool = ..., /) -> Tensor: ...
def dropout(x: Tensor, p: float, seed: Tensor, /) -> Tensor: ...
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    /,
) -> Tensor: ...
def layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = ..., eps: float | None = ..., /
) -> Tensor: ...
def rms_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    /,
) -> tuple[Tensor, Tensor]: ...
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]: ...
def add_layer_norm_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_residual: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    p: float,
    seed: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]: ...
def add_rms_norm_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_residual: bool,
    needs_grad_weight: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor]: ...
def layer_norm_dropout(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: Tensor | None,
    /,
) -> Tensor: ...
def layer_norm_dropout_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor]: ...
def softmax(x: Tensor, dim: int = ..., /) -> Tensor: ...
def softmax_backward(grad_out: Tensor, y: Tensor, dim: int, /) -> Tensor: ...
def log_softmax(x: Tensor, dim: int = ..., /) -> Tensor: ...
def log_softmax_backward(grad_out: Tensor, y: Tensor, dim: int, /) -> Tensor: ...
def cumsum(x: Tensor, dim: int, exclusive: bool = ..., reverse: bool = ..., /) -> Tensor: ...
def logcumsumexp(x: Tensor, dim: int, /) -> Tensor: ...
def logcumsumexp_backward(grad_out: Tensor, x: Tensor, y: Tensor, dim: int, /) -> Tensor: ...
def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = ..., dim: int = ..., reverse: bool = ..., /
) -> Tensor: ...
def linear_recurrence_backward(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool, /
) -> tuple[Tensor, Tensor, Tensor]: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    float_loss: bool = ...,
    /,
) -> Tensor: ...
def cross_entropy_backward(
    grad_out: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    total: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    /,
) -> Tensor: ...
def token_log_probs(logits: Tensor, target: Tensor, temperature: float = ..., /) -> tuple[Tensor, Tensor]: ...
def token_log_probs_backward(
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    temperature: float,
    /,
) -> Tensor: ...
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    float_loss: bool,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
    /,
) -> Tensor: ...
def linear_cross_entropy_backward(
    grad_out: Tensor,
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    grad_x: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor]: ...
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = ..., /
) -> tuple[Tensor, Tensor]: ...
def rotary_embedding_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, /
) -> tuple[Tensor, Tensor]: ...
