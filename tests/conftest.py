"""Defines options, devices and poisoned memory, in which an element that a kernel does not write is never right."""

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from typing import Any

# Waiting OpenMP threads must sleep, because spinning would take cores from other work on the machine. OpenMP reads this
# variable when torch is loaded, here and in subprocesses of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Workers share the machine, so that each worker and each of its subprocesses has one thread. With two threads, which
# wait for each other while another worker has a core, a test takes three times as long. battery/test_runtime.py tests
# that results do not depend on the number of threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# Disables Hugging Face's `kernels`, whose hooks make transformers' models impossible to pickle. test_hub.py has them.
os.environ.setdefault("USE_HUB_KERNELS", "0")

# This run and its subprocesses share a new Inductor cache: an old cache would hide that a fake has changed.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest

# Fills fresh blocks of the C allocator with 0x7f bytes (3.4e38 in float32 and bfloat16, NaN in float16). The ops
# allocate without PyTorch's fill_uninitialized_memory. M_PERTURB takes the complement of the byte.
M_PERTURB, M_MMAP_MAX, M_TRIM_THRESHOLD = -6, -4, -1
ctypes.CDLL(None).mallopt(M_PERTURB, 0x80)
# Keeps large blocks in the heap, because the operating system would zero every page of a new mapping.
ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tier")
    parser.addoption(
        "--device", choices=["cpu", "cuda", "all"], default="all", help="devices to test (all: those there are)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """In the quick tier Inductor generates kernels without vector instructions, which compile in half of the time. It
    also skips a subprocess that imports torch to find out which instructions the machine has. Our kernels are the same.
    """
    if not config.getoption("--slow"):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    if config.getoption("dist", "no") == "no":  # otherwise this process only starts workers, and needs no torch
        gc.disable()  # pytest_collection_finish enables it again, when all modules are imported
        import torch

        torch.set_num_threads(1 if os.environ.get("OMP_NUM_THREADS") == "1" else 2)


def _devices(config: pytest.Config) -> list[str]:
    import torch

    asked = config.getoption("--device")
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if asked == "all":
        return there
    if asked not in there:
        raise pytest.UsageError(f"--device {asked}: this machine has no such device")
    return [asked]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices(metafunc.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failed test of an op whose kernels still lack the formula reports where to write it."""
    report = yield
    values = item.callspec.params if hasattr(item, "callspec") else {}
    spec = values.get("spec")
    if report.failed and spec is not None:
        from tests.judge import unwritten

        place = unwritten(spec.name, values.get("device"))
        if place:
            report.longrepr.addsection("kernels", place)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: item.path.parent.name == "battery"
    )  # the battery runs last: its parts are small, so that all workers end together
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow tier: run with --slow"))


def pytest_collection_finish() -> None:
    """Excludes the objects that exist after collection from garbage collection. There are millions of them, all of them
    stay, and tracing by PyTorch triggers many collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(trylast=True)  # runs after monkeypatch has restored a test's torch.cuda
def pytest_runtest_teardown() -> None:
    """Frees cached GPU memory after a large test, because workers share a GPU."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


def pytest_unconfigure() -> None:
    """Unfreezes the objects: otherwise the last collection misses modules, and Triton's binding reports "leaks"."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sets what a worker takes at a time with --dist loadfile. From the battery, which comes last, it is one op, so
    that workers end together. From test_scaffold.py it is one function. Other tests share compiled code and go by file.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/battery/" in file:
                return f"battery {test.rpartition('-')[2]}"
            return nodeid.partition("[")[0] if file.endswith("test_scaffold.py") else file

    config.option.loadscopereorder = False  # do not reorder by the number of tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def poisoned_gpu_memory(request: pytest.FixtureRequest) -> None:
    """Leaves NaN in the blocks that PyTorch's CUDA allocator will hand out next."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("device") == "cuda":
        import torch

        blocks = [torch.full((elements,), float("nan"), device="cuda") for elements in [256] * 512 + [1 << 19] * 32]
        del blocks
