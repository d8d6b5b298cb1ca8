"""Defines pytest's options and devices, and poisons new memory, so that a test sees elements that no kernel wrote."""

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

# The workers of pytest-xdist share the machine's cores. Each worker and each of its subprocesses therefore has one
# thread. With two threads a test takes three times as long, because one thread waits for the other while another worker
# has that one's core. battery/test_runtime.py tests that results do not depend on the number of threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# Disables Hugging Face's package `kernels`, whose hooks make models impossible to pickle. test_hub.py enables it.
os.environ.setdefault("USE_HUB_KERNELS", "0")

# Makes an empty Inductor cache for this run and its subprocesses. From the cache of an earlier run, Inductor would take
# code that was compiled with the earlier fakes, and so hide that a fake has changed.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest

# Makes malloc fill new blocks with 0x7f bytes (3.4e38 in float32 and bfloat16, NaN in float16). PyTorch's option
# fill_uninitialized_memory does not apply to the memory that the ops allocate. M_PERTURB takes the byte's complement.
M_PERTURB, M_MMAP_MAX, M_TRIM_THRESHOLD = -6, -4, -1
ctypes.CDLL(None).mallopt(M_PERTURB, 0x80)
# Makes malloc take large blocks from the heap. By default it maps them, and the operating system fills them with zeros.
ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tier")
    parser.addoption(
        "--device", choices=["cpu", "cuda", "all"], default="all", help="devices to test (all: those there are)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Without --slow, makes Inductor generate kernels without vector instructions, which compile in half of the time.
    Inductor then also needs no subprocess that finds out which vector instructions the machine has. The kernels of this
    package do not change."""
    if not config.getoption("--slow"):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    if config.getoption("dist", "no") == "no":  # with pytest-xdist, this process only starts workers and needs no torch
        gc.disable()  # pytest_collection_finish enables it again, when all modules are imported
        import torch

        torch.set_num_threads(1 if os.environ.get("OMP_NUM_THREADS") == "1" else 2)
    if config.getoption("--device") != "all" and not hasattr(config, "workerinput"):
        _devices(config)  # raises one error for the whole run, and not one for each file


def _devices(config: pytest.Config) -> list[str]:
    import torch

    asked = config.getoption("--device")
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if asked == "all":
        return there
    if asked not in there:
        raise pytest.UsageError(f"--device {asked}: torch {torch.__version__} finds no GPU that it can use here")
    return [asked]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices(metafunc.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """If a test of an op fails whose kernels still lack the formula, adds to the report where to write the formula."""
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
    # The tests in tests/battery run last. Workers get them in small groups, and so end at almost the same time.
    items.sort(key=lambda item: item.path.parent.name == "battery")
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow tier: run with --slow"))


def pytest_collection_finish() -> None:
    """Excludes all objects that exist now, after the tests are collected, from garbage collection. PyTorch's tracing
    triggers many garbage collections, each of which would visit these millions of objects and free none."""
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
    """Undoes gc.freeze. Otherwise torch's modules are not freed at exit, and Triton's binding reports "leaks"."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, sets which tests a worker gets together. From tests/battery, which runs last, a worker gets
    the tests of one op, so that all workers end at almost the same time. From test_scaffold.py it gets the cases of one
    function. Of any other file it gets all tests, because they share compiled code."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/battery/" in file:
                return f"battery {test.rpartition('-')[2]}"
            return nodeid.partition("[")[0] if file.endswith("test_scaffold.py") else file

    config.option.loadscopereorder = False  # keeps the order of groups, which xdist sorts by their size
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def poisoned_gpu_memory(request: pytest.FixtureRequest) -> None:
    """Leaves NaN in the blocks that PyTorch's CUDA allocator will hand out next."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("device") == "cuda":
        import torch

        blocks = [torch.full((elements,), float("nan"), device="cuda") for elements in [256] * 512 + [1 << 19] * 32]
        del blocks
