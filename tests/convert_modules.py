"""Modules that the tests of convert rewrite. Some tests execute this file anew, to get classes new to convert."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class MLP(nn.Module):
    """An MLP of three linear layers and an activation, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.SiLU()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class UpFirst(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.act(self.gate(x)))


class Packed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        chunks = torch.cat([self.gate(x), self.up(x)], -1).chunk(2, dim=-1)
        return self.down(self.drop(self.act(chunks[0]) * chunks[1]))


class Named(MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        up = self.up(x)
        hidden = gate * up
        return self.down(self.drop(hidden))


class NamedTwice(MLP):
    """Uses the result of the activation a second time, so that convert must keep the activation."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        hidden = gate * self.up(x)
        return self.down(hidden + gate)


class InPlaceBeforeProduct(MLP):
    """Changes the activation's input in place before the product, so that convert must not fuse the two."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(x)
        gate = self.act(h)
        F.relu_(h)
        return self.down(gate * self.up(x))


class Functional(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FunctionalTanh(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


class FunctionalOther(MLP):
    """Calls a local variable named `silu`, which is not PyTorch's function of this name."""

    def forward(self, x: Tensor) -> Tensor:
        silu = torch.sigmoid
        return self.down(silu(self.gate(x)) * self.up(x))


class Broadcast(MLP):
    """Multiplies by a gate that broadcasts, with one number for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)[..., :1]) * self.up(x))


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return function(self, *args, **kwargs)

    return wrapper


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that convert does not recognize."""
    functions = [function]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return functions[0](*args, **kwargs)

    return wrapper


class Decorated(MLP):
    @noted
    @noted
    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        """Scales the result. The converted forward must have this docstring, too."""
        return self.down(self.act(self.gate(x)) * self.up(x)) * scale


class OddlyDecorated(MLP):
    @held
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class FinalMLP(MLP):
    def __init_subclass__(cls) -> None:
        raise TypeError("FinalMLP is final")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A transformer block with two residual branches, each of which begins with a norm."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mix(self.norm1(x))
        x = residual + x
        residual = x
        x = self.norm2(x)
        return residual + self.mlp(x)


class DropoutFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mix(self.norm1(x))
        x = self.drop(x)
        x = x + residual
        residual = x
        x = self.norm2(x)
        return residual + self.mlp(x)


class DropoutWithKeyword(Block):
    """Passes a keyword argument to dropout that torch.nn.Dropout does not take, but that a user's module may take."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm1(x)), scale=3.0)
        return x + self.mlp(self.norm2(x))


class DropoutInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class DropoutFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.norm1(x))
        h = F.dropout(h, p=self.p, training=self.training)
        h = x + h
        y = self.norm2(h)
        return h + self.mlp(y)


class DropoutKept(Block):
    """Uses the result of dropout a second time, so that convert must keep the dropout."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.mix(self.norm1(x)))
        s = x + h
        return self.norm2(s) + h


class DropoutTwice(Block):
    """Adds two terms that both contain the result of dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.mix(self.norm1(x)))
        x = x + self.mlp(x)
        return self.norm2(x)


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        h = self.drop(h)
        h = self.norm2(h + x)
        return h


class Branched(Block):
    """Has an optional residual branch between the two branches of Block, like GPT-2's cross attention."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        residual = x
        x = self.mix(self.norm1(x))
        x = self.drop(x)
        x = x + residual

        if other is not None:
            residual = x
            x = self.norm1(x)
            x = residual + self.mix(x * other)

        residual = x
        x = self.norm2(x)
        return residual + self.mlp(x)


class InPlaceBetween(Block):
    """Calls a function that changes the norm's input in place before the norm reads it."""

    def forward(self, x: Tensor) -> Tensor:
        s = x + self.mix(x)
        return F.relu_(s) + self.norm2(s)


class DropoutElsewhere(Block):
    """Applies dropout before the sum, but to a tensor that is not in the sum."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.norm1(x))
        kept = self.drop(x)
        h = h + x
        return self.norm2(h) + kept


class BranchedOnSum(Block):
    """Tests in a condition whether the sum `s` is None. `s` is None before the sum is assigned to it."""

    def forward(self, x: Tensor) -> Tensor:
        s = None
        h = self.mix(self.norm1(x))
        s = x + h
        if s is not None:
            s = s * 2
        y = self.norm2(s)
        return s + self.mlp(y)


class SumsInOneStatement(Block):
    """Has two sums in one statement, and a third sum inside one of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(x + self.drop(self.mix(x))) * self.norm2(x + self.norm2(self.mlp(x) + x))


class BroadcastSum(Block):
    """Adds tensors that broadcast, as BERT's position embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.mix(x)) + self.mlp(x[:1])
        return self.norm1(x)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    cos, sin = cos[:, None], sin[:, None]
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def half_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q correctly, and detaches k, so that k gets no gradient."""
    return apply_rotary_pos_emb(q, k.detach(), cos, sin)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return torch.cat([q, k], 1)


class DetachedAttention(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        q, k = half_rotary(q, k, cos, sin)
        return torch.cat([q, k], 1)


def rotary_of_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotates one tensor, as in Gemma3n."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotary_of_sin_and_cos(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Takes `sin` before `cos` and reads half of the columns of each, as in GPT-J."""
    sin, cos = (table[:, :, None, ::2].repeat_interleave(2, -1) for table in (sin, cos))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def rotary_of_complex(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates by complex multiplication, as in Llama4."""
    turned = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) * frequencies[:, :, None] for x in (q, k)]
    q, k = (torch.view_as_real(x).flatten(-2) for x in turned)
    return q, k


class OneByOne(Attention):
    """Rotates queries whose heads are the dimension before the tokens, and keys whose heads are the one after them."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, WIDTH)) for y in (self.q(x), self.k(x)))
        q = rotary_of_one(q.transpose(1, 2), cos, sin)
        k = rotary_of_one(k, cos, sin, unsqueeze_dim=2)
        return torch.cat([q, k.transpose(1, 2)], 1)


class SinAndCos(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary_of_sin_and_cos(self.q(x).unflatten(-1, (-1, WIDTH)), sin, cos)


class Frequencies(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, WIDTH)) for y in (self.q(x), self.k(x)))
        return torch.cat(rotary_of_complex(q, k, torch.complex(cos, sin)[..., ::2]), 2)


class ByKeyword(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary_of_one(self.q(x).unflatten(-1, (-1, WIDTH)), cos=cos, sin=sin, unsqueeze_dim=2)


class Unpacked(Attention):
    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return rotary_of_one(self.q(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2), *tables)


class Rope:
    """A class with a function for rotary embedding as its attribute."""

    apply_rope = staticmethod(rotary_of_one)


class ByAttribute(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Rope.apply_rope(self.q(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2), cos, sin)


def get_property(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * y + z


def rope_length(x: Tensor) -> int:
    return x.shape[1]


class NoRope(Attention):
    """Calls functions whose names contain "rope" but which rotate nothing."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return get_property(x, cos, sin)[:, : rope_length(x)]
