"""Options, devices, and poisoned memory: an element that a kernel forgets to write is never right by luck."""

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from typing import Any

# Threads that wait by spinning take the cores from those that work, on a machine that does something else as well.
# OpenMP reads this when torch is loaded, here and in what the tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Workers share the machine: each has one thread, and so has what its tests start. Two threads that wait for each other
# while another worker has a core take three times as long as one. That results do not depend on the number of threads
# is in battery/test_runtime.py.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# transformers as it is without Hugging Face's `kernels`, whose hooks make its models impossible to pickle (test_hub.py
# runs it with them).
os.environ.setdefault("USE_HUB_KERNELS", "0")

# Inductor's cache of an earlier run would hide that a fake has changed. One for this run and what it starts.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest

# Fresh blocks of the C allocator are filled with 0x7f bytes (3.4e38 in float32 and bfloat16, NaN in float16); the
# compiled ops allocate without PyTorch's own fill_uninitialized_memory. M_PERTURB takes the complement of the fill.
M_PERTURB, M_MMAP_MAX, M_TRIM_THRESHOLD = -6, -4, -1
ctypes.CDLL(None).mallopt(M_PERTURB, 0x80)
# Large blocks come from the heap and stay there: the kernel zeroes every page that it hands out anew.
ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tier")
    parser.addoption(
        "--device", choices=["cpu", "cuda", "all"], default="all", help="devices to test (all: those there are)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The quick tier has Inductor make its own kernels without vector instructions. They compile in half of the time,
    and no process tries first, in a Python that imports torch, whether this machine has them. Our kernels are the same.
    """
    if not config.getoption("--slow"):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    if config.getoption("dist", "no") == "no":  # else this process has the tests run, and needs no torch
        gc.disable()  # until all is imported and collected, which stays for good
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
    """A test of an op whose kernels lack the formula says where it is to be written."""
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
    )  # last: in small parts, so that workers end together
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow tier: run with --slow"))


def pytest_collection_finish() -> None:
    """Millions of objects of torch and of the tests stay for good: garbage collections need not look at them, and where
    PyTorch traces graphs there are many collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.hookimpl(trylast=True)  # a test's own torch.cuda is gone by then
def pytest_runtest_teardown() -> None:
    """Workers share a GPU: what a large test leaves in this one's cache goes back."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


def pytest_unconfigure() -> None:
    """Else the last collection finds no module, and Triton's binding prints a page of what "leaked"."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What a worker takes at a time with --dist loadfile: one op of the battery, which comes last, so that the
    workers end together; one function of test_scaffold.py; of others a file, as its tests share what they compiled."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/battery/" in file:
                return f"battery {test.rpartition('-')[2]}"
            return nodeid.partition("[")[0] if file.endswith("test_scaffold.py") else file

    config.option.loadscopereorder = False  # by the number of tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def poisoned_gpu_memory(request: pytest.FixtureRequest) -> None:
    """Leaves NaN in the blocks that PyTorch's CUDA allocator will hand out next."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("device") == "cuda":
        import torch

        blocks = [torch.full((elements,), float("nan"), device="cuda") for elements in [256] * 512 + [1 << 19] * 32]
        del blocks
