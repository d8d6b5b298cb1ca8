"""Tests memory leaks, threads, CUDA streams and instruction sets, equal bits in every run, and which kernels run."""

import ctypes
import functools
import gc
import hashlib
import os
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.battery import ROOT, SPECS, calls_of_every_order, every_dtype, every_op, profiled
from tests.checks import (
    as_tuple,
    check,
    convert,
    leaves,
    maker,
    random_grad,
    run,
)
from tests.forked import python
from tests.opspec import OpSpec, Sample, timed_specs

VIEWS_AND_COPIES = {
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "contiguous",
        "clone",
        "copy_",
        "detach",
        "expand",
        "as_strided",
        "unsqueeze",
        "permute",
        "view",
    ]
}


@pytest.mark.parametrize("spec", timed_specs(), ids=str)
def test_ours_all_the_way(spec: OpSpec, device: str) -> None:
    """An op calls none of PyTorch's operators but allocations, views and copies. On a GPU, the op launches as many
    kernels as its spec says, both for rows that one CTA processes and for rows that a cluster processes."""
    for shape in [(4096, 1024), (2100, 16384), (1100, 50304)] if device == "cuda" else [(300, 1024)]:
        sample = spec.bench.sample(maker(device, torch.float32), shape)
        outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        trained = [output for output in outputs if output.requires_grad]
        grads_out, inputs = [random_grad()(output) for output in trained], leaves(sample)
        forward = functools.partial(spec.function, *sample.args, **sample.kwargs)
        backward = functools.partial(torch.autograd.grad, trained, inputs, grads_out, retain_graph=True)
        for call, launches in zip((forward, backward), spec.launches, strict=True):
            if call is backward and not spec.differentiable:
                continue
            names, kernels = profiled(call, device)
            reads = {"aten::item", "aten::_local_scalar_dense"} if spec.unknown_sizes else set()
            foreign = {name for name in names if name.startswith("aten::")} - VIEWS_AND_COPIES - reads
            assert not foreign, f"{spec.name} calls {sorted(foreign)}"
            assert launches == 0 or any(name.startswith("extension_cpp::") for name in names)
            assert device == "cpu" or len(kernels) == launches, (shape, kernels)


def _bits(x: torch.Tensor) -> memoryview:
    return memoryview(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _calls(spec: OpSpec, dtype: torch.dtype, device: str) -> list[Sample]:
    """Returns samples with enough work for several threads on the CPU, or for several CTAs on a GPU."""
    shapes = [(300, 1025), (3, 100_001), (4099, 31)]
    if device == "cuda":
        shapes += [(300, 1024), (107, 50257)]
    return [sample for shape in shapes for sample in spec.sample_inputs(maker(device, dtype), shape)]


def _digest(spec: OpSpec, calls: list[Sample]) -> str:
    """Runs the samples, and returns a hash of the bits of all their results and gradients."""
    digest = hashlib.sha256()
    for sample in calls:
        for _, x in run(spec.function, sample, random_grad()).tensors():
            digest.update(_bits(x))
    return digest.hexdigest()


@every_op
@every_dtype
def test_deterministic_at_any_number_of_threads(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    before, calls = torch.get_num_threads(), _calls(spec, dtype, device)
    try:
        digests = set()
        # PyTorch's matrix products on the CPU add in an order that depends on the number of threads. Ops with products
        # are therefore run twice with two threads.
        for threads in (2, 2) if spec.has_products else (1, 7, 7):
            torch.set_num_threads(threads)
            digests.add(_digest(spec, calls))
        assert len(digests) == 1
        if spec.has_products:
            for sample in calls:
                check(spec, sample)
    finally:
        torch.set_num_threads(before)


LEVEL_SCRIPT = """
import ctypes, sys, torch, extension_cpp
from tests.battery.test_runtime import SPECS, _calls, _digest
from tests.opspec import DTYPES
from tests.checks import check, maker
level = ctypes.CDLL(extension_cpp.LIBRARY).extension_cpp_cpu_level
level.restype = ctypes.c_char_p
print("level", level().decode())
for spec in SPECS if sys.argv[1] != "level" else ():
    for dtype in DTYPES:
        if sys.argv[1] == "right":
            for sample in spec.sample_inputs(maker("cpu", dtype), (33, 1025)):
                check(spec, sample)
        else:
            print(spec.name, dtype, _digest(spec, _calls(spec, dtype, "cpu")))
"""


def _run_at_level(level: str, what: str) -> list[str]:
    environment = {**os.environ, "EXTENSION_CPP_CPU_LEVEL": level}
    result = python("-c", LEVEL_SCRIPT, what, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_instruction_sets_agree() -> None:
    """The kernels for the baseline instruction set give right results. The kernels for v3 and v4, which both have fused
    multiply-adds, give the same bits as each other. All other tests run the kernels for the machine's own instruction
    set."""
    assert _run_at_level("baseline", "right") == ["level baseline"]
    if _run_at_level("v4", "level") != ["level v4"]:
        pytest.skip("this machine has no AVX-512, so that there is only one level with FMA")
    v3, v4 = _run_at_level("v3", "bits"), _run_at_level("v4", "bits")
    assert (v3[0], v4[0]) == ("level v3", "level v4")
    assert len(v3) > len(SPECS) and v3[1:] == v4[1:]


def _allocated(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        ]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@every_op
def test_no_leak(spec: OpSpec, device: str, request: pytest.FixtureRequest) -> None:
    """Calls with strided inputs and calls that raise an error leak less than 16 bytes per pair of calls on average."""
    count = 1000 if request.config.getoption("--slow") else 400
    good = next(iter(spec.sample_inputs(maker(device, torch.float32, layout="sliced"), (8, 33))))
    bad = next(iter(spec.error_inputs(device)))

    def call() -> None:
        run(spec.function, good, random_grad())
        with pytest.raises(RuntimeError):
            spec.function(*bad.args, **bad.kwargs)

    for _ in range(50):
        call()
    gc.collect()
    gc.freeze()  # later garbage collections skip the objects that exist now
    before = _allocated(device)
    for _ in range(count):
        call()
    gc.collect()
    assert _allocated(device) - before < 16 * count


@every_op
def test_eight_python_threads(spec: OpSpec, device: str) -> None:
    calls = _calls(spec, torch.float32, device)
    if device == "cpu":  # one shape is enough, as the shims run the same code for all shapes
        calls = calls[: max(len(calls) // 3, 1)]
    expected = _digest(spec, calls)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(_digest(spec, calls))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


@every_op
def test_threads_launch_different_sizes(spec: OpSpec, device: str) -> None:
    """Threads that launch a kernel with different sizes at the same time do not fail. Each launch sets limits of the
    kernel, such as its shared memory, and must not lower those that another thread has set."""
    if device != "cuda":
        pytest.skip("kernels on the CPU have no limits that a launch sets")
    shapes = [(200, 1025), (40, 1032), (5, 1040), (30, 24_000), (30, 22_000)]
    calls = []
    for shape in shapes:
        for sample in spec.sample_inputs(maker(device, torch.float32), shape):
            calls += calls_of_every_order(spec, sample, "contiguous").made
    wrong: list[object] = []

    def repeat(first: int) -> None:
        try:
            with torch.no_grad():  # calls the operators themselves, which release the GIL
                for number in range(first, first + 20 * len(calls)):
                    op, args, kwargs = calls[number % len(calls)]
                    op(*args, **kwargs)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=repeat, args=(i * len(calls) // 8,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@every_op
def test_side_stream_and_cuda_graph(spec: OpSpec, device: str) -> None:
    """An op's kernels run on the current stream: results are right on a side stream and in a CUDA graph."""
    if device != "cuda":
        pytest.skip("CUDA streams need a GPU")
    sample = convert(next(iter(spec.sample_inputs(maker(device, torch.float32), (512, 1024)))), torch.float32)
    expected = [output.detach() for output in as_tuple(spec.function(*sample.args, **sample.kwargs))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    x = sample.args[0]
    with torch.no_grad(), torch.cuda.stream(stream):
        keep = x.clone()
        x.zero_()
        torch.cuda._sleep(50_000_000)  # delays this stream, so that a kernel on another stream would read the zeros
        x.copy_(keep)
        results = as_tuple(spec.function(*sample.args, **sample.kwargs))
    stream.synchronize()
    assert all(map(torch.equal, results, expected))
    if spec.unknown_sizes:  # such a call copies a number to the host, which no CUDA graph can capture
        return
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = as_tuple(spec.function(*sample.args, **sample.kwargs))
    with torch.no_grad():
        x.zero_()
        x.copy_(keep)
    for output, value in zip(captured, expected, strict=True):
        output.copy_(torch.full_like(value, float("nan")) if value.is_floating_point() else ~value)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


@every_op
def test_every_launch_is_on_the_current_stream(spec: OpSpec, device: str) -> None:
    """All kernels of forward and backward run on PyTorch's current stream, also in calls with several kernels."""
    if device != "cuda":
        pytest.skip("CUDA streams need a GPU")
    for shape in [(512, 1024), (300, 16384), (9, 50257)]:
        sample = next(iter(spec.sample_inputs(maker(device, torch.bfloat16), shape)))
        with torch.cuda.stream(torch.cuda.Stream()):
            run(spec.function, sample, random_grad())  # in a first run, PyTorch's libraries initialize on other streams
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run(spec.function, sample, random_grad())
                torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()
        on_gpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        streams = {event.device_resource_id(): event.name() for event in on_gpu if not event.name().startswith("Mem")}
        assert len(streams) == 1, f"{spec.name} {shape}: kernels by stream: {streams}"


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current(spec: OpSpec) -> None:
    """An op runs on its tensors' GPU while another GPU is current. The second GPU's current stream is a side stream, on
    which a launch without a device guard fails. A default stream would run it on the first GPU unnoticed."""
    default = torch.cuda.current_stream(1)
    torch.cuda.set_stream(torch.cuda.Stream(1))  # makes the second GPU current
    try:
        torch.cuda.set_device(0)
        for shape in [(33, 1025), (300, 16384)]:
            for sample in spec.sample_inputs(maker("cuda:1", torch.float32), shape):
                result = check(spec, sample)
                assert {x.device.index for _, x in result.tensors()} == {1} and torch.cuda.current_device() == 0
    finally:
        torch.cuda.set_stream(default)
        torch.cuda.set_device(0)
