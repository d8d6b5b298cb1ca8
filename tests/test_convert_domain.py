"""Tests that a converted module accepts the same inputs as the original, and rejects the same inputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import NewGELUActivation

import extension_cpp
from extension_cpp.nn import convert
from tests import convert_modules
from tests.convert_modules import apply_rotary_pos_emb

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64]
DTYPES += [torch.complex32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
WIDTH = convert_modules.WIDTH


class OwnNorm(torch.nn.RMSNorm):
    pass


class Gate(convert_modules.MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * x


class Residual(convert_modules.Block):
    def forward(self, x: Tensor) -> Tensor:
        s = x + self.drop(x)
        return self.norm2(s)


class Rotated(convert_modules.Attention):
    def forward(self, x: Tensor) -> Any:
        q, table = torch.stack([x, x])[None], x[None]
        return apply_rotary_pos_emb(q, q, table, table)[1]


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: torch.nn.LayerNorm(WIDTH),
    "LayerNorm without weight": lambda: torch.nn.LayerNorm(WIDTH, elementwise_affine=False),
    "RMSNorm": lambda: torch.nn.RMSNorm(WIDTH),
    "RMSNorm without weight": lambda: torch.nn.RMSNorm(WIDTH, elementwise_affine=False),
    "RMSNorm of complex": lambda: torch.nn.RMSNorm(WIDTH),
    "SiLU": torch.nn.SiLU,
    "GELU": torch.nn.GELU,
    "GELU tanh": lambda: torch.nn.GELU("tanh"),
    "Dropout": lambda: torch.nn.Dropout(0.5),
    "Dropout of nothing": lambda: torch.nn.Dropout(0.0),
    "Dropout of all": lambda: torch.nn.Dropout(1.0),
    "Dropout in evaluation": lambda: torch.nn.Dropout(0.5).eval(),
    "Softmax": lambda: torch.nn.Softmax(-1),
    "Softmax over the first": lambda: torch.nn.Softmax(0),
    "LogSoftmax": lambda: torch.nn.LogSoftmax(-1),
    "an activation": NewGELUActivation,
    "a norm": lambda: OwnNorm(WIDTH, eps=1e-6),
    "a gated product": Gate,
    "a residual sum": Residual,
    "a residual sum with dropout": lambda: Residual(1.0),
    "rotary": Rotated,
}


def inputs() -> dict[str, Any]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {str(dtype): x.to(dtype) for dtype in DTYPES}
    found |= {"0-dim": x[0, 0], "0-dim int64": torch.tensor(1), "0-dim complex": torch.tensor(1j), "one row": x[0]}
    found |= {"no rows": x[:0], "no columns": x[:, :0], "no int64": torch.empty(0, WIDTH, dtype=torch.int64)}
    found |= {
        "transposed": x.reshape(WIDTH, 4).t(),
        "expanded": x[:1].expand(4, WIDTH),
        "sliced": x.repeat(1, 2)[:, ::2],
    }
    found |= {"conjugated": torch.complex(x, x).conj(), "negated": torch.complex(x, x).conj().imag}
    found |= {"COO": x.to_sparse(), "CSR": x.to_sparse_csr(), "BSR": x.to_sparse_bsr((2, 2)), "mkldnn": x.to_mkldnn()}
    found |= {"quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "meta": x.to("meta")}
    found |= {"complex on meta": torch.complex(x, x).to("meta"), "zero tensor": torch._efficientzerotensor((4, WIDTH))}
    found |= {"nested": torch.nested.nested_tensor([x[:1], x[1:]]), "None": None, "float": 1.0, "list": [1.0, 2.0]}
    return found | {"jagged": torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)}


def outcome(module: torch.nn.Module, *args: Any) -> Any:
    torch.manual_seed(0)
    try:
        return module(*args)
    except Exception as error:  # the test only compares whether the two modules raise an exception
        return error


def values(y: Tensor) -> list[Tensor]:
    if y.is_nested:
        return [*y.unbind()]
    return [y.dequantize() if y.is_quantized else y.to_dense() if y.layout is not torch.strided else y]


def check_outcome(got: Any, want: Any, is_random: bool = False) -> None:
    """Asserts that both modules raised an exception, or gave results within 4 eps of the largest element."""
    if isinstance(want, Exception):
        assert isinstance(got, Exception), f"it computes, but the original raised {want}"
        return
    assert not isinstance(got, Exception), f"it raised {got}"
    assert (got.dtype, got.layout, got.device, got.is_nested) == (want.dtype, want.layout, want.device, want.is_nested)
    for a, b in zip(values(got), values(want), strict=True):
        assert a.shape == b.shape
        if b.numel() and not b.is_meta and not (is_random and extension_cpp.modules.takes(got)):
            eps = torch.finfo(b.dtype).eps if b.is_floating_point() or b.is_complex() else 0
            wide = torch.complex128 if b.is_complex() else torch.float64
            largest = torch.nan_to_num(b.to(wide).abs()).max().item()
            torch.testing.assert_close(a.to(wide), b.to(wide), rtol=0, atol=4 * eps * largest, equal_nan=True)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about prototype features and casts
@pytest.mark.parametrize("name", MODULES)
def test_no_domain_shrinks(name: str) -> None:
    stock = MODULES[name]()
    module = copy.deepcopy(stock)
    assert convert(module).changed and type(module) is not type(stock)
    if "of complex" in name:
        stock, module = stock.to(torch.complex64), module.to(torch.complex64)
    computed = 0
    for kind, x in inputs().items():
        if (name, kind) == ("Dropout of all", "COO"):
            continue  # PyTorch 2.11 leaves this result uninitialized
        want = outcome(stock, x)
        try:
            check_outcome(outcome(module, x), want, is_random=name == "Dropout")
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error
        computed += not isinstance(want, Exception)
    assert computed >= 10


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": torch.linspace(0.5, 1, WIDTH)},
    "weight of float64": {"weight": torch.linspace(0.5, 1, WIDTH, dtype=torch.float64)},
    "short weight": {"weight": torch.ones(WIDTH - 1)},
    "none": {"reduction": "none", "ignore_index": 3},
    "smoothing": {"label_smoothing": 0.1, "reduction": "sum"},
    "negative smoothing": {"label_smoothing": -1.0},
    "too much smoothing": {"label_smoothing": 2.0},
}


def loss_inputs() -> dict[str, tuple[Any, Any]]:
    """Returns logits and targets of all dtypes and layouts, except for half logits with float32 class weights, which
    only the op accepts."""
    target, kinds = torch.tensor([1, 2, 3, 7]), inputs()
    logits = kinds["torch.float32"]
    found = {kind: (x, target) for kind, x in kinds.items()}
    found |= {f"target of {dtype}": (logits, target.to(dtype)) for dtype in DTYPES}
    found |= {f"probabilities of {kind}": (logits, x) for kind, x in kinds.items() if x is not None}
    found |= {"one row": (logits[0], target[0]), "no rows": (logits[:0], target[:0]), "too few": (logits, target[:2])}
    found |= {"no classes": (logits[:, :0], target), "no rows and no classes": (logits[:0, :0], target[:0])}
    found |= {"pixels": (torch.randn(4, WIDTH, 2, 3), torch.randint(0, WIDTH, (4, 2, 3)))}
    found |= {"not a class": (logits, target + WIDTH), "ignored": (logits, torch.full((4,), -100))}
    return found | {"meta": (kinds["meta"], target.to("meta")), "target on meta": (logits, target.to("meta"))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_no_domain_of_the_loss_shrinks(name: str) -> None:
    stock = torch.nn.CrossEntropyLoss(**LOSSES[name])
    module = copy.deepcopy(stock)
    assert convert(module).changed == {"": "cross_entropy"}
    for kind, (logits, target) in loss_inputs().items():
        if name.startswith("weight") and kind in ("torch.float16", "torch.bfloat16"):
            continue
        try:
            check_outcome(outcome(module, logits, target), outcome(stock, logits, target))
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


@pytest.mark.parametrize("name", ["RMSNorm", "an activation", "a norm", "a residual sum"])
def test_gradients_of_complex_numbers(name: str) -> None:
    """A converted module has the same gradient as the original for a complex input."""
    stock = MODULES[name]()
    module = copy.deepcopy(stock)
    convert(module)
    x = torch.randn(4, WIDTH, dtype=torch.complex64, requires_grad=True)
    got, want = (torch.autograd.grad(each(x).abs().sum(), x)[0] for each in (module, stock))
    torch.testing.assert_close(got, want)
