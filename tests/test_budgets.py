"""Tests scripts/kernel_resources.py, and that the library's size and its number of norm kernels are within budgets."""

import re
import subprocess

import pytest

from extension_cpp.command import info
from scripts import kernel_resources as resources

LOG = """\
# ninja log v7
0\t1500\t17\tnorm/norm_forward.cu.o\ta1
0\t90000\t17\trelu/relu_cuda.cu.o\tb2
10\t2010\t18\trelu/relu_cuda.cu.o\tb3
0\t3250\t17\tv4/norm/norm_cpu.c.o\tc4
0\t99000\t17\tnorm/norm_deleted.cu.o\td5
3250\t99000\t18\tlibextension_cpp.so\te6
"""

PLAN = """\
rule nvcc
build norm/norm_forward.cu.o: nvcc norm/norm_forward.cu
build relu/relu_cuda.cu.o: nvcc relu/relu_cuda.cu
build v4/norm/norm_cpu.c.o: c norm/norm_cpu.c
build libextension_cpp.so: link relu/relu_cuda.cu.o
"""


@pytest.fixture
def architecture() -> str:
    """Returns cuobjdump's name of the library's GPU architecture. Skips the test unless there is exactly one."""
    build = info.read_build()
    assert build is not None
    if build.cuda is None:
        pytest.skip("the library was built without CUDA; the budgets are those of a build for one architecture")
    if len(build.architectures) != 1:
        pytest.skip(
            f"built for {', '.join(build.architectures)}; the budgets are those of a build for one architecture"
        )
    if build.debug:
        pytest.skip("a debug build; the budgets are those of a release build")
    return "sm_" + build.architectures[0].removesuffix("+PTX").replace(".", "")


def test_size_of_the_library(architecture):
    assert resources.LIBRARY.stat().st_size / 1e6 <= resources.LIBRARY_MB


def test_number_of_norm_kernels(architecture):
    if resources.find_cuobjdump() is None:
        pytest.skip("cuobjdump, which lists the kernels, was not found")
    count = resources.families([name for name, *_ in resources.kernels(resources.LIBRARY, architecture)])
    assert 0 < count["norm"] <= resources.NORM_KERNELS


def output(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def test_host_code_names_kernels_that_exist():
    """Every kernel that host code launches exists in GPU code. If host compiler and nvcc derive different types for a
    template argument, for example by decltype, the launch fails with "invalid resource handle"."""
    build, tool = info.read_build(), resources.find_cuobjdump()
    if build is None or build.cuda is None:
        pytest.skip("the library was built without CUDA")
    if tool is None:
        pytest.skip("cuobjdump, which lists the kernels, was not found")
    names = set(re.findall(r"Function (\w+):", output(tool, "-res-usage", resources.LIBRARY)))
    kernels = set(output("c++filt", *names).splitlines())
    templates = {kernel.partition("<")[0] for kernel in kernels if "<" in kernel}
    functions = re.findall(r"^\w+ t (.*)$", output("nm", "-C", resources.LIBRARY), re.MULTILINE)
    ours = {function for function in functions if function.partition("<")[0] in templates}
    assert ours != set() and ours - kernels == set()


def test_families():
    names = [
        "norm_cuda::forward_kernel<float, 2>",
        "norm::row_kernel<float, norm::LayerNorm, 4, 1>",
        "row_norm_kernel",
        "pointwise::kernel<unsigned int, float, 4, 1, 1, pointwise::NoRow, norm::Scale>",
        "dropout_cuda::forward_kernel<float, 1>",
        "(anonymous namespace)::sum_spans<float, 4, false>",
    ]
    assert resources.families(names) == {"norm": 3, "pointwise": 1, "dropout": 1, "sum_spans": 1}


@pytest.mark.parametrize(
    "name, short",
    [
        # void norm::row_kernel<float, 4, true>(norm::Params<float>)
        ("_ZN4norm10row_kernelIfLi4ELb1EEEvNS_6ParamsIT_EE", "norm::row_kernel<float, 4, true>"),
        # void norm::f<(norm::Kind)1>(A<(norm::Kind)1>)
        ("_ZN4norm1fILNS_4KindE1EEEv1AIXT_EE", "norm::f<1>"),
        # void pointwise::kernel<F<__half, float> >(Tensors<__half, 1, 1>, F<__half, A<int> >)
        (
            "_ZN9pointwise6kernelI1FI6__halffEEEv7TensorsIS2_Li1ELi1EES1_IS2_1AIiEE",
            "pointwise::kernel<F<__half, float> >",
        ),
        # void (anonymous namespace)::f<float>(void (*)(int), float)
        ("_ZN12_GLOBAL__N_11fIfEEvPFviET_", "(anonymous namespace)::f<float>"),
        ("_Z4fillPfN12_GLOBAL__N_15ShapeE", "fill"),  # fill(float*, (anonymous namespace)::Shape)
        ("_not_mangled", "_not_mangled"),
    ],
)
def test_short_names(name, short):
    assert resources.short_names([name]) == [short]


def test_seconds_are_those_of_the_last_compilation():
    assert resources.seconds(LOG, PLAN) == [
        (3.25, "v4/norm/norm_cpu.c"),
        (2.0, "relu/relu_cuda.cu"),
        (1.5, "norm/norm_forward.cu"),
    ]


def test_summary_without_cuobjdump(monkeypatch, capsys):
    monkeypatch.setattr(resources, "find_cuobjdump", lambda: None)
    resources.print_summary("sm_90")
    printed = capsys.readouterr().out
    assert printed.startswith(f"library: {resources.LIBRARY.stat().st_size / 1e6:.1f} MB")
    assert "cuobjdump was not found" in printed
