"""Tests the fused norms: add_layer_norm, add_rms_norm and layer_norm_dropout. Each must equal the separate calls of
dropout, addition and norm. Also tests gradients of a single result, p = 0 and 1, random masks and the modules."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import extension_cpp
from extension_cpp.nn import AddLayerNorm, AddRMSNorm
from tests.checks import NORM_WIDTHS, as_tuple, rows_for
from tests.opspec import DTYPES
from tests.specs.dropout import seed_of

ops = torch.ops.extension_cpp
ADD = ["add_layer_norm", "add_rms_norm"]
FUSED = [*ADD, "layer_norm_dropout"]
every_add = pytest.mark.parametrize("name", ADD)
every_fused = pytest.mark.parametrize("name", FUSED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def norm_of(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = x.shape[-1:]
    if name == "add_rms_norm":
        return extension_cpp.rms_norm(x, shape, weight, 1e-5)
    return extension_cpp.layer_norm(x, shape, weight, bias)


def fused(
    name: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, seed: int | Tensor
):
    """Calls the operator as its public function does, but with the given dropout seed instead of a drawn one."""
    drawn, shape = None, x.shape[-1:]
    if p:
        drawn = seed if isinstance(seed, Tensor) else seed_of(x.device, seed)
    if name == "add_layer_norm":
        return ops.add_layer_norm(x, residual, shape, weight, bias, 1e-5, p, drawn)[:2]
    if name == "add_rms_norm":
        return ops.add_rms_norm(x, residual, shape, weight, 1e-5, p, drawn)[:2]
    return ops.layer_norm_dropout(x, shape, weight, bias, 1e-5, p, drawn)[:1]


def public(name: str, leaves: list[Tensor], p: float) -> tuple[Tensor, ...]:
    """Calls the public function, which draws the seed itself."""
    x, residual, weight, bias = leaves
    arguments = (x,) if name == "layer_norm_dropout" else (x, residual)
    weights = (weight,) if name == "add_rms_norm" else (weight, bias)
    return as_tuple(getattr(extension_cpp, name)(*arguments, x.shape[-1:], *weights, p=p))


def composed(name: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, seed: int):
    drop = (lambda z: ops.dropout(z, p, seed_of(z.device, seed))) if p else (lambda z: z)
    if name == "layer_norm_dropout":
        return (drop(norm_of(name, x, weight, bias)),)
    s = residual + drop(x)
    return norm_of(name, s, weight, bias), s


def inputs(cols: int, dtype: torch.dtype, device: str, rows: int = 37, weight_dtype: torch.dtype | None = None):
    generator = torch.Generator().manual_seed(cols)
    made = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(rows, cols)] * 2 + [(cols,)] * 2
    ]
    return [t.to(dtype if i < 2 else weight_dtype or dtype).to(device).requires_grad_() for i, t in enumerate(made)]


def used(name: str, leaves: list[Tensor]) -> list[Tensor]:
    """Returns those of x, residual, weight and bias that the op takes."""
    x, residual, weight, bias = leaves
    return {"add_rms_norm": [x, residual, weight], "layer_norm_dropout": [x, weight, bias]}.get(name, leaves)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Asserts that the sum s and, on the CPU, the norm y have the same bits. On a GPU, a fused kernel may sum a row in
    another order. y then differs by log2(cols) roundings of mean and rstd, and by one of its own."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if i > 0 or not a.is_cuda:
            assert torch.equal(a, b)
        else:
            bound = 16 * torch.finfo(torch.float32).eps + torch.finfo(a.dtype).eps
            assert (a - b).abs().max() <= bound * b.abs().max().clamp(min=1)


@every_fused
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("cols", [1, 31, 64, 1023, 1024, 1026, 4100])
def test_equals_its_composition(name: str, p: float, cols: int, device: str) -> None:
    """In float32, an op equals the separate calls of dropout, addition and norm, because it rounds after dropout and
    after the addition as they do. The widths test every alignment of rows. Gradients may differ by a few roundings."""
    leaves = inputs(cols, torch.float32, device)
    ours, theirs = fused(name, *leaves, p, 7), composed(name, *leaves, p, 7)
    assert_same(ours, theirs)
    grads = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)).to(device) for i, o in enumerate(ours)]
    pairs = [torch.autograd.grad(outputs, used(name, leaves), grads) for outputs in (ours, theirs)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(b.abs().max().item(), 1))


@every_add
@pytest.mark.parametrize("cols, gap", [(1025, 0), (4096, 8), (12288, 0), (16384, 8), (65536, 0)])
def test_a_row_does_not_depend_on_how_many_there_are(cols: int, gap: int, name: str, device: str) -> None:
    """A row has the same results in a tensor and in a part of it. On a GPU, forward uses L2 hints only for the whole
    tensor."""
    parts, size = (9, 18 << 20) if device == "cuda" else (3, 1 << 20)  # a smaller part has another backward kernel
    step = max(1, size // (cols * 4) // 8) * 8  # each part's first row is aligned to 16 bytes
    rows = [torch.randn(parts * step, cols + gap, device=device)[:, :cols] for _ in range(4)]
    weight, bias = (torch.randn(cols, device=device) for _ in range(2))

    def results(begin: int, end: int) -> tuple[Tensor, ...]:
        x, residual, *grads = (t[begin:end] for t in rows)
        leaves = [x.requires_grad_(), residual.requires_grad_()]
        outputs = fused(name, *leaves, weight, bias, 0.0, 0)
        return *outputs, *torch.autograd.grad(outputs, leaves, grads)

    for _ in range(3 if device == "cuda" else 1):
        whole = results(0, parts * step)
        for i in range(0, parts * step, step):
            for some, of_whole in zip(results(i, i + step), whole, strict=True):
                assert torch.equal(some, of_whole[i : i + step])


@every_add
@every_dtype
def test_without_dropout_equals_its_composition(name: str, dtype: torch.dtype, device: str) -> None:
    """Without dropout, an op equals separate addition and norm in every dtype, as its norm reads the rounded sum."""
    leaves = inputs(1025, dtype, device)
    assert_same(fused(name, *leaves, 0.0, 0), composed(name, *leaves, 0.0, 0))


@every_fused
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, cols, weights, p",
    [(37, 512, torch.float32, 0.25), (37, 514, torch.float32, 0.25), (2100, 1024, None, 0.0), (2100, 1000, None, 0.0)],
)
def test_half_inputs_against_float64(
    name: str, rows: int, cols: int, weights: torch.dtype | None, p: float, dtype: torch.dtype, device: str
) -> None:
    """For half-type inputs, results and gradients are near those computed in float64. A gradient has the dtype of its
    leaf, also for float32 weights. The CPU gets fewer rows, because it sums 64 rows at a time."""
    rows = min(rows, 210) if device == "cpu" else rows
    leaves = inputs(cols, dtype, device, rows, weights)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    ours, exact = fused(name, *leaves, p, 3), composed(name, *doubles, p, 3)
    grads = [torch.randn_like(o) for o in ours]
    got = torch.autograd.grad(ours, used(name, leaves), grads)
    want = torch.autograd.grad(exact, used(name, doubles), [g.double() for g in grads])
    eps = torch.finfo(dtype).eps
    for a, b in zip(ours, exact, strict=True):
        # y has a rounding error of its own and one from s, whose rounding error the norm multiplies by at most about 1.
        assert a.dtype == dtype and (a.double() - b).abs().max() <= 2 * eps * b.abs().max()
    for a, b, leaf in zip(got, want, used(name, leaves), strict=True):
        assert a.dtype == leaf.dtype
        # A weight gradient sums products with the normalized s. Each product has the rounding error of s.
        assert (a.double() - b).abs().max() <= 2 * eps * b.abs().max()


@every_fused
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize(
    "dtype, weights", [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)], ids=str
)
def test_forward_at_many_widths(
    dtype: torch.dtype, weights: torch.dtype | None, p: float, name: str, device: str
) -> None:
    """Forward is right for rows of 64 to 16384 columns, for which a GPU uses kernels of several shapes."""
    for cols in NORM_WIDTHS:
        rows = (5 << 19) // (cols * dtype.itemsize) // (1 if device == "cuda" else 16) + 1
        leaves = inputs(cols, dtype, device, rows, weights)
        exact = composed(name, *(t.detach().double() for t in leaves), p, 3)
        for a, b in zip(fused(name, *leaves, p, 3), exact, strict=True):
            # The bound of test_half_inputs_against_float64, plus log2(cols) float32 roundings in the sums over a row.
            bound = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
            assert (a.double() - b).abs().max() <= bound * b.abs().max(), cols


@every_fused
@pytest.mark.parametrize("cols", [20480, 20483, 65544])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_rows_do_not_depend_on_those_behind_them(dtype: torch.dtype, cols: int, name: str, device: str) -> None:
    """The results of a row do not depend on the rows after it. On a GPU, a cluster processes several rows, and the last
    cluster may have fewer rows than the others. compute-sanitizer would detect its writes beyond the last row."""
    x, residual, weight, bias = inputs(cols, dtype, device, 33)
    whole = fused(name, x, residual, weight, bias, 0.25, 3)
    for rows in (1, 2, 3, 5, 9, 17, 31):
        for a, b in zip(fused(name, x[:rows], residual[:rows], weight, bias, 0.25, 3), whole, strict=True):
            assert torch.equal(a, b[:rows]), rows


@every_fused
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_at_many_widths(dtype: torch.dtype, p: float, name: str, device: str) -> None:
    """Gradients are right for rows of 64 to 16384 columns in large tensors. On a GPU, small tensors use other
    kernels."""
    drop = (lambda t: ops.dropout(t, p, seed_of(t.device, 3))) if p else (lambda t: t)
    eps = torch.finfo(dtype).eps
    for cols in NORM_WIDTHS:
        rows = (17 << 20) // (dtype.itemsize * cols) // (1 if device == "cuda" else 128) + 1
        x, residual, *grads = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(4))
        weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))
        leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
        outputs = fused(name, *leaves, p, 3)
        got = torch.autograd.grad(outputs, used(name, leaves), grads[: len(outputs)])
        # The exact gradients are those for the rounded s, because the op's backward reads the rounded s.
        doubles = [t.detach().double().requires_grad_() for t in (x if len(outputs) == 1 else outputs[1], weight, bias)]
        grad_y, grad_s = (g.double() for g in grads)
        grad_y = drop(grad_y) if name == "layer_norm_dropout" else grad_y
        exact = norm_of(name, *doubles)
        of_s, *of_weights = torch.autograd.grad(exact, doubles[:2] if name == "add_rms_norm" else doubles, grad_y)
        of_rows = [of_s] if name == "layer_norm_dropout" else [drop(of_s + grad_s), of_s + grad_s]
        for a, b in zip(got, [*of_rows, *of_weights], strict=True):
            # Weight gradients are float32 sums of `rows` products, whose errors grow as sqrt(rows). The other gradients
            # contain sums over a row, which a tree reduction computes with log2(cols) roundings.
            sums = torch.finfo(torch.float32).eps * (4 * rows**0.5 if b.dim() == 1 else 16)
            assert ((a.double() - b).abs() <= eps * b.abs() + sums * b.abs().max()).all(), cols


@every_fused
def test_strided_rows_are_read_where_they_lie(name: str, device: str) -> None:
    packed = torch.randn(5, 7, 3 * 64, device=device)
    x, residual, _ = packed.split(64, dim=-1)
    seed = seed_of(x.device, 5)
    with torch.profiler.profile() as profiler:
        ours = fused(name, x, residual, None, None, 0.25, seed)
    assert not {event.name for event in profiler.events()} & {"aten::contiguous", "aten::clone", "aten::copy_"}
    for a, b in zip(ours, fused(name, x.contiguous(), residual.contiguous(), None, None, 0.25, 5), strict=True):
        assert torch.equal(a, b)


@every_add
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_each_result_alone(name: str, p: float, device: str) -> None:
    """Gradients are right if only y is used, if only the sum s is used, and if both are used. If only s is used, the
    weights get no gradient, because the norm has no backward then."""
    leaves = inputs(130, torch.float64, device)
    for keep in ([0], [1], [0, 1]):
        needed = used(name, leaves) if 0 in keep else leaves[:2]
        pairs = []
        for function in (fused, composed):
            outputs = function(name, *leaves, p, 9)
            grads = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=device).view_as(o) for o in outputs]
            pairs.append(torch.autograd.grad([outputs[k] for k in keep], needed, [grads[k] for k in keep]))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)
    total = fused(name, *leaves, p, 9)[1]
    assert torch.autograd.grad(total.sum(), used(name, leaves)[2:], allow_unused=True) == (None,) * len(needed[2:])


@every_add
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_y_alone_of_large_tensors(name: str, p: float, device: str) -> None:
    """If only y is used, backward gives the same gradients as if the sum s had a gradient of zeros. On a GPU, x is
    larger than the L2 cache, because backward uses an L2 cache policy for such tensors."""
    size = 2 * torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1 << 20
    x, residual, grad_y = (torch.randn(size // 2048 + 8, 1024, device=device).bfloat16() for _ in range(3))
    leaves = [x, residual, *(torch.randn(1024, device=device).bfloat16() for _ in range(2))]
    for t in leaves:
        t.requires_grad_()
    y, total = fused(name, *leaves, p, 9)
    alone = torch.autograd.grad(y, used(name, leaves), grad_y, retain_graph=True)
    with_zeros = torch.autograd.grad((y, total), used(name, leaves), (grad_y, torch.zeros_like(total)))
    for a, b in zip(alone, with_zeros, strict=True):
        assert torch.equal(a, b)


@every_fused
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("rows, cols", [(37, 64), (37, 66), (2100, 1024), (2100, 1040), (700, 6144)])
def test_only_what_needs_a_gradient_gets_one(name: str, rows: int, cols: int, p: float, device: str) -> None:
    rows = rows_for(device, rows, cols)
    leaves = [t.detach() for t in inputs(cols, torch.float32, device, rows)]
    count = len(used(name, leaves))

    def gradients(needed: tuple[bool, ...]) -> list[Tensor | None]:
        fresh = [t.clone() for t in leaves]
        for t, need in zip(used(name, fresh), needed, strict=True):
            t.requires_grad_(need)
        sum(o.square().sum() for o in fused(name, *fresh, p, 4)).backward()
        return [t.grad for t in used(name, fresh)]

    everything = gradients((True,) * count)
    for bits in range(1, 2**count):
        needed = tuple(bool(bits >> i & 1) for i in range(count))
        for got, want, need in zip(gradients(needed), everything, needed, strict=True):
            assert (got is not None) == need
            if got is not None:  # if fewer gradients are needed, another kernel may sum in another order
                roundings = rows if want.dim() == 1 else 32
                assert (got - want).abs().max() <= roundings * torch.finfo(want.dtype).eps * want.abs().max()


@every_add
def test_public_functions_draw_and_obey_training(name: str, device: str) -> None:
    x, residual, weight, bias = inputs(64, torch.float32, device)
    function = getattr(extension_cpp, name)
    weights = (weight, bias) if name == "add_layer_norm" else (weight,)

    def call(**kwargs) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return function(x, residual, (64,), *weights, eps=1e-5, **kwargs)

    plain = composed(name, x, residual, weight, bias, 0.0, 0)
    for kwargs in ({}, {"p": 0.7, "training": False}):
        assert_same(call(**kwargs), plain)
    ours = call(p=0.3)
    torch.manual_seed(3)
    theirs = getattr(extension_cpp.reference, name)(x, residual, (64,), *weights, eps=1e-5, p=0.3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    y, s = call(p=1.0)
    assert torch.equal(s, residual)
    grad_x, grad_residual = torch.autograd.grad(y.sum() + s.sum(), (x, residual))
    assert not grad_x.any() and grad_residual.any()


def test_layer_norm_dropout_draws_and_obeys_training(device: str) -> None:
    x, _, weight, bias = inputs(64, torch.float32, device)
    plain = extension_cpp.layer_norm(x, (64,), weight, bias)
    assert torch.equal(extension_cpp.layer_norm_dropout(x, (64,), weight, bias, p=0.0), plain)
    assert torch.equal(extension_cpp.layer_norm_dropout(x, (64,), weight, bias, training=False), plain)
    torch.manual_seed(3)
    y = extension_cpp.layer_norm_dropout(x, (64,), weight, bias, p=0.3)
    torch.manual_seed(3)
    assert_same((y,), (extension_cpp.dropout(plain, 0.3),))
    assert not extension_cpp.layer_norm_dropout(x, (64,), weight, bias, p=1.0).any()


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
@every_fused
def test_probability_out_of_range(name: str, p: float, device: str) -> None:
    x = torch.ones(2, 3, device=device)
    arguments = (x, (3,)) if name == "layer_norm_dropout" else (x, x, (3,))
    for training in (True, False):
        with pytest.raises(RuntimeError) as error:
            getattr(extension_cpp, name)(*arguments, p=p, training=training)
        assert str(error.value) == f"extension_cpp::{name}: expected p to be between 0 and 1, but got {p}"


@every_fused
def test_backward_saves_one_tensor_of_the_rows_size_and_no_mask(name: str, device: str) -> None:
    leaves = inputs(64, torch.float32, device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(name, *leaves, 0.25, 5)
    assert sum(t.numel() == leaves[0].numel() for t in saved) == 1


@every_fused
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_makes_the_same_mask(name: str, use_reentrant: bool, device: str) -> None:
    """Under torch.utils.checkpoint, which runs forward again in backward, both runs of forward draw the same mask."""
    leaves = inputs(64, torch.float32, device)
    outputs = checkpoint(lambda *leaves: public(name, list(leaves), 0.4), *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    gradients = [t.grad for t in used(name, leaves)]
    assert_one_draw(name, leaves, tuple(o.detach() for o in outputs), gradients)


def random_state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


@every_fused
def test_nothing_is_drawn_without_dropout(name: str, device: str) -> None:
    x, residual, *_ = inputs(64, torch.float32, device)
    arguments = (x, (64,)) if name == "layer_norm_dropout" else (x, residual, (64,))
    function, state = getattr(extension_cpp, name), random_state(device)
    for kwargs in ({"p": 0.0}, {"p": 1.0}, {"p": 0.5, "training": False}):
        function(*arguments, **kwargs)
        assert torch.equal(random_state(device), state), kwargs
    function(*arguments, p=0.5)
    assert not torch.equal(random_state(device), state)


@every_fused
def test_everything_dropped_of_what_is_not_finite(name: str, device: str) -> None:
    """With p = 1, an add norm replaces x by zeros even if x is NaN, and layer_norm_dropout returns zeros."""
    leaves = inputs(64, torch.float32, device)
    with torch.no_grad():
        leaves[0].fill_(float("nan"))
    outputs = public(name, leaves, 1.0)
    if name in ADD:
        assert torch.equal(outputs[1], leaves[1]) and outputs[0].isfinite().all()
    else:
        assert torch.equal(outputs[0], torch.zeros_like(leaves[0]))


@every_fused
def test_compiled_equals_eager_with_fallback_random(name: str, device: str) -> None:
    torch._dynamo.reset()
    leaves = inputs(96, torch.float32, device)

    def model(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return public(name, leaves, 0.4)

    results = []
    with torch._inductor.config.patch(fallback_random=True):
        for function in (model, torch.compile(model, fullgraph=True)):
            torch.manual_seed(11)
            outputs = function(leaves)
            gradients = torch.autograd.grad(outputs, used(name, leaves), [torch.ones_like(o) for o in outputs])
            results.append([*outputs, *gradients])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def kept(name: str, leaves: list[Tensor], outputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the dropout mask that forward used, derived from its outputs: True where an element was kept."""
    return outputs[1] != leaves[1] if name in ADD else outputs[0] != 0


def assert_one_draw(name: str, leaves: list[Tensor], outputs: tuple[Tensor, ...], gradients: list[Tensor]) -> None:
    """Asserts that a backward with grad_out of ones used forward's mask. An add norm's x has a nonzero gradient where
    it was kept. layer_norm_dropout's bias gradient is the number of kept elements in a column, divided by 1 - p =
    0.6."""
    mask = kept(name, leaves, outputs)
    if name in ADD:
        assert torch.equal(gradients[0] != 0, mask)
    else:
        torch.testing.assert_close(gradients[-1], mask.sum(0) / 0.6)


@every_fused
def test_compiled_masks_without_fallback_random(name: str, device: str) -> None:
    """Code compiled by torch.compile draws other masks than eager mode does, but drops elements with the same
    probability. Each call draws a new mask, and its forward and backward use the same mask."""
    torch._dynamo.reset()
    leaves = inputs(1000, torch.float32, device, rows=100)
    compiled = torch.compile(lambda leaves: public(name, leaves, 0.4), fullgraph=True)
    runs = [compiled(leaves) for _ in range(2)]
    masks = [kept(name, leaves, outputs) for outputs in runs]
    assert not torch.equal(*masks)
    for outputs, mask in zip(runs, masks, strict=True):
        # Each of 1e5 elements is kept with probability 0.6. The count is within 6 standard deviations of its mean.
        assert abs(mask.sum().item() - 60_000) < 6 * math.sqrt(100_000 * 0.6 * 0.4)
        gradients = torch.autograd.grad(outputs, used(name, leaves), [torch.ones_like(o) for o in outputs])
        assert_one_draw(name, leaves, outputs, list(gradients))


@every_fused
def test_cuda_graph_replays_fresh_masks(name: str, device: str) -> None:
    """Each replay of a CUDA graph draws a new mask, which the forward and the backward in the graph share."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    leaves = inputs(1000, torch.float32, device, rows=100)

    def step() -> tuple[tuple[Tensor, ...], list[Tensor]]:
        outputs = public(name, leaves, 0.4)
        gradients = torch.autograd.grad(outputs, used(name, leaves), [torch.ones_like(o) for o in outputs])
        return tuple(o.detach() for o in outputs), list(gradients)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs, gradients = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(kept(name, leaves, outputs).clone())
        assert_one_draw(name, leaves, outputs, gradients)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


@every_fused
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty(name: str, shape: tuple[int, int], device: str) -> None:
    leaves = [torch.ones(s, device=device, requires_grad=True) for s in (shape, shape, shape[1:], shape[1:])]
    outputs = fused(name, *leaves, 0.25, 1)
    assert all(o.shape == shape for o in outputs)
    gradients = torch.autograd.grad(sum(o.sum() for o in outputs), used(name, leaves))
    for grad, leaf in zip(gradients, used(name, leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (AddLayerNorm((4, 8), eps=1e-3, p=0.2), torch.nn.LayerNorm((4, 8), eps=1e-3)),
        (AddLayerNorm(8, bias=False), torch.nn.LayerNorm(8, bias=False)),
        (AddRMSNorm((4, 8), eps=1e-3, p=0.2), torch.nn.RMSNorm((4, 8), eps=1e-3)),
        (AddRMSNorm(8, elementwise_affine=False), torch.nn.RMSNorm(8, elementwise_affine=False)),
    ],
    ids=lambda module: repr(module),
)
def test_modules(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """nn.AddLayerNorm and nn.AddRMSNorm have torch.nn's parameters and state_dict, and dropout only in training."""
    assert isinstance(ours, type(theirs))
    assert repr(ours) == f"Add{repr(theirs)[:-1]}, p={ours.p})"
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(2, 300, 4, 8)
    y, s = ours.eval()(x, residual)
    assert torch.equal(s, x + residual)
    torch.testing.assert_close(y, theirs(s))
    _, s = ours.train()(x, residual)
    dropped = (s == residual).float().mean().item()
    # x.numel() elements are dropped with probability p each. Their fraction is within 6 standard errors of p.
    assert abs(dropped - ours.p) <= 6 * (ours.p * (1 - ours.p) / x.numel()) ** 0.5


@pytest.mark.slow
@every_add
def test_more_than_two_to_the_31_elements(name: str, device: str) -> None:
    """The last row of more than 2^31 elements has the mask of its 64-bit indices, which dropout also has."""
    cols = 1 << 16
    x = torch.ones((1 << 15) + 1, cols, dtype=torch.bfloat16, device=device)
    residual = torch.zeros_like(x)
    _, s = fused(name, x, residual, None, None, 0.5, 8)
    assert torch.equal(s[-1:], ops.dropout(x, 0.5, seed_of(x.device, 8))[-1:])


@every_add
@pytest.mark.parametrize("half", ["x", "residual"])
def test_autocast_adds_a_half_branch_to_a_float32_residual(name: str, half: str, device: str) -> None:
    """Under autocast, an add norm adds half-type and float32 tensors in float32, as `residual + x` does."""
    leaves = [
        t.detach().to(torch.bfloat16 if of == half else torch.float32).requires_grad_()
        for of, t in zip(("x", "residual"), inputs(33, torch.float32, device)[:2], strict=True)
    ]
    function = getattr(extension_cpp, name)
    want = function(*(t.float() for t in leaves), (33,))
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        with torch.autocast(device, torch.bfloat16):
            results = run(*leaves, (33,))
        assert all(got.dtype == torch.float32 and torch.equal(got, b) for got, b in zip(results, want, strict=True))
        gradients = torch.autograd.grad(sum(y.square().sum() for y in results), leaves)
        assert [g.dtype for g in gradients] == [t.dtype for t in leaves]


def test_layer_norm_dropout_under_autocast_has_layer_norms_dtype(device: str) -> None:
    x = torch.randn(9, 33, device=device).bfloat16()
    for run in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        with torch.autocast(device, torch.bfloat16):
            assert run(extension_cpp.layer_norm_dropout)(x, (33,)).dtype == extension_cpp.layer_norm(x, (33,)).dtype


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_modules_on_meta_ask_no_autocast(name: str) -> None:
    """The modules work on meta tensors, and must not ask for autocast's state, which raises an error on meta."""
    module = getattr(extension_cpp.nn, name)(8, device="meta")
    x = torch.empty(3, 8, device="meta")
    assert [output.shape for output in module(x, x)] == [x.shape, x.shape]
    with pytest.raises(RuntimeError, match="expected residual to be float32 like x, but got float64"):
        module(x, x.double())
