"""Tests what only muladd has: the argument out=, its functionalization in compiled graphs, and the fused rounding."""

import os
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import extension_cpp
from extension_cpp.registration.calls import overload_of
from tests.checks import Calls, last_level_cache
from tests.forked import python
from tests.opspec import all_specs


def inputs(shape: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return a, b, extension_cpp.muladd(a, b, 0.5)


def test_out_is_written_and_returned(device: str) -> None:
    a, b, expected = inputs((33, 65), device)
    out = torch.full_like(a, float("nan"))
    assert extension_cpp.muladd(a, b, 0.5, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
def test_out_of_any_strides(layout: str, device: str) -> None:
    """out keeps its strides, and memory between its elements is not written."""
    a, b, expected = inputs((33, 65), device)
    if layout == "transposed":
        out = torch.zeros(65, 33, device=device).t()
    elif layout == "sliced":
        buffer = torch.full((33, 131), 7.0, device=device)
        out = buffer[:, 1::2]
    else:
        out = torch.zeros(33 * 65 + 1, device=device)[1:].view(33, 65)
    strides = out.stride()
    extension_cpp.muladd(a, b, 0.5, out=out)
    assert torch.equal(out, expected)
    assert out.stride() == strides
    if layout == "sliced":
        assert torch.equal(buffer[:, ::2], torch.full((33, 66), 7.0, device=device))


def test_out_may_be_an_input(device: str) -> None:
    a, b, expected = inputs((4099,), device)
    extension_cpp.muladd(a, b, 0.5, out=b)
    assert torch.equal(b, expected)


def test_out_may_interleave_with_an_input(device: str) -> None:
    """out may be the odd columns of a buffer whose even columns are an input: they share no element."""
    a, b, expected = inputs((33, 65), device)
    buffer = torch.zeros(33, 130, device=device)
    buffer[:, ::2] = a
    extension_cpp.muladd(buffer[:, ::2], b, 0.5, out=buffer[:, 1::2])
    assert torch.equal(buffer[:, 1::2], expected)
    assert torch.equal(buffer[:, ::2], a)


def test_out_may_overlap_what_is_read_first(device: str) -> None:
    """out may share elements with an input if out has gaps, because then all inputs are read before out is written. The
    tensors are large enough for many blocks and threads."""
    rows, cols = 4099, 130
    buffer = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(device)
    b = buffer[1:, ::2].cos()
    expected = extension_cpp.muladd(buffer[1:, ::2].clone(), b, 0.5)
    out = extension_cpp.muladd(buffer[1:, ::2], b, 0.5, out=buffer[:-1, ::2])
    assert torch.equal(out, expected)


def test_out_may_not_be_a_transposed_input(device: str) -> None:
    """If out is an input's transpose, an error is raised: elements would be overwritten before they are read."""
    for rows in (3, 64, 1024):
        a = torch.randn(rows, rows, device=device)
        for first, second in ((a, torch.ones_like(a)), (torch.ones_like(a), a)):
            with pytest.raises(RuntimeError, match="to share no memory with it, but they overlap in part"):
                extension_cpp.muladd(first, second, 1.0, out=a.t())


def test_dense_tensors_of_any_size_may_not_overlap_in_part(device: str) -> None:
    buffer = torch.zeros(1 << 20, device=device)
    for shift in (1, 7, 4096, (1 << 19) - 1):
        a, out = buffer[: 1 << 19], buffer[shift : shift + (1 << 19)]
        for first, second in ((a, torch.ones_like(a)), (torch.ones_like(a), a)):
            with pytest.raises(RuntimeError, match="to share no memory with it, but they overlap in part"):
                extension_cpp.muladd(first, second, 1.0, out=out)
    a, b = buffer[: 1 << 19], buffer[1 << 19 :]  # b begins where a ends
    assert torch.equal(extension_cpp.muladd(a, a, 1.0, out=b), torch.ones_like(a))
    assert torch.equal(extension_cpp.muladd(b, b, 1.0, out=a), torch.full_like(a, 2))
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(buffer).split(1 << 19)
        for x, out in ((a, b), (b, a)):
            assert extension_cpp.muladd(x, x, 1.0, out=out) is out


def test_results_larger_than_the_cache_begin_anywhere() -> None:
    """The CPU streams results larger than the cache. They are right for every offset of out in a cache line."""
    a = torch.randn(last_level_cache() // 12 + 1, generator=torch.Generator().manual_seed(0))
    b, buffer = a.cos(), a.new_empty(len(a) + 130)
    parts = zip(a.chunk(8), b.chunk(8), strict=True)  # small parts, which are not streamed
    expected = torch.cat([extension_cpp.muladd(*part, 0.5) for part in parts])
    for begin in range(130):
        out = buffer[begin : begin + len(a)]
        assert torch.equal(extension_cpp.muladd(a, b, 0.5, out=out), expected)


@pytest.mark.parametrize("place, name", enumerate(["a", "b", "out"]))
@pytest.mark.parametrize("wrong", ["tensor", "dense"])
def test_what_is_no_dense_tensor_gets_a_sentence_with_out(place: int, name: str, wrong: str) -> None:
    tensors = [torch.ones(2, 3) for _ in range(3)]
    tensors[place] = None if wrong == "tensor" else tensors[place].to_sparse()
    a, b, out = tensors
    if out is None:
        out = 2.5  # omitting out= would call another overload
    with pytest.raises(RuntimeError, match=f"^extension_cpp::muladd: expected {name} to be (a )?{wrong}, but got "):
        extension_cpp.muladd(a, b, 1.0, out=out)


def test_out_with_inputs_that_require_grad(device: str) -> None:
    """Under no_grad, out= works with inputs that require grad, and with an out that requires grad."""
    a, b, expected = inputs((5,), device)
    for out in (torch.empty_like(b), torch.empty_like(b, requires_grad=True)):
        with torch.no_grad():
            extension_cpp.muladd(a.requires_grad_(), b, 0.5, out=out)
        assert torch.equal(out, expected)


def writes(device: str) -> dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]]:
    """Returns, for each operator that writes, a call that writes into its argument, and a tensor for this argument."""
    ops, ones = torch.ops.extension_cpp, torch.ones(3, 3, device=device)
    target, scale = torch.arange(3, device=device), torch.ones(1, device=device)
    return {
        "muladd.out": (lambda x: ops.muladd.out(ones, ones, 1.0, out=x), ones * 2),
        "cross_entropy_chunk": (
            lambda x: ops.cross_entropy_chunk(x, target, None, -100, 0.0, 0.0, None, scale),
            ones * 2,
        ),
    }


def test_what_is_written_counts_a_version(device: str) -> None:
    """Operators that write into an argument increase its version counter where PyTorch's own do, so that a backward
    that needs the old values raises an error. Writes into a view are right, too."""
    every = writes(device)
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("extension_cpp::")]
    written = {name.split("::")[1] for name in ours if "!" in str(overload_of(name)._schema)}
    tested = {spec.name for spec in all_specs() if spec.mutates}  # the battery tests their version counters
    assert set(every) == {name for name in written if name.split(".")[0] not in tested}
    for name, (write, x) in every.items():
        first = torch.ones_like(x, requires_grad=True)
        y, view, expected = first * x, x[:], x.clone()
        write(expected)
        for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            before = x._version
            with mode:
                write(view)
            assert x._version == view._version == before + 1, name
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.sum().backward()
        write(again := torch.full_like(x, 2))
        assert torch.equal(again, expected)
        with torch.inference_mode():
            write(inference := torch.full_like(x, 2))
            assert torch.equal(inference, expected)
        with pytest.raises(RuntimeError, match=r"requires? grad"):
            write(torch.full_like(x, 2).requires_grad_())
        mapped = torch.compile(lambda x, write=write: (write(x), x * 1)[1], fullgraph=True, backend="aot_eager")
        assert torch.equal(mapped(z := torch.full_like(x, 2)), expected) and torch.equal(z, expected)


def test_operators_that_write_refuse_every_argument_that_requires_grad(device: str) -> None:
    """Operators that write raise an error if any argument requires grad, because they have no derivative."""
    for write, x in writes(device).values():
        with Calls() as calls:
            write(x.clone())
        ((op, args, kwargs),) = calls.made
        given = dict(enumerate(args)) | kwargs
        tensors = [place for place, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        assert len(tensors) >= 2
        for place in tensors:
            one = given | {place: given[place].clone().requires_grad_()}
            with pytest.raises(RuntimeError, match=r"requires? grad"):
                op(*(one[i] for i in range(len(args))), **{key: one[key] for key in kwargs})


def test_negative_views(device: str) -> None:
    """out and inputs may be negative views: z.conj().imag stands for the negative of the values in memory."""
    a, b, expected = inputs((5, 3), device)
    for mode in (torch.enable_grad(), torch.inference_mode()):
        with mode:
            z = torch.zeros(5, 3, dtype=torch.complex64, device=device)
            out = z.conj().imag
            assert extension_cpp.muladd(a, b, 0.5, out=out) is out and out.is_neg()
            assert torch.equal(out, expected) and torch.equal(z.imag, -expected) and not z.real.any()
            assert torch.equal(
                extension_cpp.muladd(out, out, 0.5, out=out), extension_cpp.muladd(expected, expected, 0.5)
            )


def test_a_graph_counts_versions_and_writes_again(device: str) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs")
    for name, (write, x) in writes(device).items():
        start, expected = x.clone(), x.clone()
        write(expected)
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), x._version
        with torch.cuda.graph(graph):
            write(x)
        assert x._version == before + 1, name
        for _ in range(2):
            x.copy_(start)
            graph.replay()
            assert torch.equal(x, expected), name


def test_out_is_functionalized(device: str) -> None:
    """The schema marks out as written, so that compiled code that reads out after the op gets the new values."""
    a, b, expected = inputs((33, 65), device)

    def step(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros_like(a)
        before = out + 1
        torch.ops.extension_cpp.muladd.out(a, b, 0.5, out=out)
        return before, out * 2

    before, after = torch.compile(step, fullgraph=True)(a, b)
    assert torch.equal(before, torch.ones_like(a))
    assert torch.equal(after, expected * 2)
    torch.library.opcheck(torch.ops.extension_cpp.muladd.out, (a, b, 0.5), {"out": torch.empty_like(a)})


def test_gradients_only_for_what_needs_them(device: str) -> None:
    """If only b requires a gradient, only a is saved for backward."""
    a, b, _ = inputs((33, 65), device)
    b.requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = extension_cpp.muladd(a, b, 0.5)
    (gradient,) = torch.autograd.grad(result.sum(), b)
    assert torch.equal(gradient, a)
    assert len(saved) == 1 and saved[0].data_ptr() == a.data_ptr()


FUSED = """
import ctypes, platform, torch, extension_cpp
from fractions import Fraction
level = ctypes.CDLL(extension_cpp.LIBRARY).extension_cpp_cpu_level
level.restype = ctypes.c_char_p
fused = level() != b"baseline" or platform.machine() != "x86_64"
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    a = torch.rand(4099, generator=generator, dtype=torch.float64).add(1).to(dtype)
    b = (1 / a.double()).to(dtype)
    got = extension_cpp.muladd(a, b, -1.0)
    exact = [float(Fraction(x) * Fraction(y) - 1) for x, y in zip(a.tolist(), b.tolist())]
    once, twice = torch.tensor(exact, dtype=wide).to(dtype), (a.to(wide) * b.to(wide) - 1).to(dtype)
    assert torch.equal(got, once if fused else twice), dtype
    assert dtype not in (torch.float32, torch.float64) or not torch.equal(once, twice)
print(level().decode())
"""


@pytest.mark.parametrize("level", ["baseline", "v3", "v4"])
def test_rounded_once_where_the_instruction_exists(level: str) -> None:
    """muladd rounds a * b - 1 once. b is 1 / a rounded, so that the result is about b's rounding error, which a rounded
    product would lose. The baseline of x86 has no fused multiply-add and does round the product."""
    environment = {**os.environ, "EXTENSION_CPP_CPU_LEVEL": level}
    done = python("-c", FUSED, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() <= level, "a level that was not asked for"
