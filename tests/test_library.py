"""What the library requires of its host. One file must work with every Python and every torch from the minimum on."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import build_library
from tests.checks import maker
from tests.opspec import all_specs

ROOT = Path(build_library.__file__).parent


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def library() -> Path:
    path = ROOT / "extension_cpp" / build_library.LIBRARY
    assert path.exists(), "the library is not built: make build"
    return path


def symbols(library: Path, which: str) -> list[str]:
    table = run("nm", "-D", "--extern-only", which, library)
    assert table.returncode == 0, table.stderr
    return [line.split()[-1] for line in table.stdout.splitlines()]


def test_library_asks_torch_for_c_functions_and_exports_its_own_names_only(library):
    """It is no Python module."""
    undefined = symbols(library, "--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in undefined)  # else the next two lines prove nothing
    assert [name for name in undefined if re.match(r"_Z\w*?(2at|3c10|5torch)", name)] == []
    assert [name for name in undefined if re.match(r"_*(cuda|cu|nv)[A-Z]|Py|_Py", name)] == []
    exported = symbols(library, "--defined-only")
    assert exported != [] and [name for name in exported if not name.startswith("extension_cpp_")] == []


def test_library_is_hardened(library):
    """Full RELRO, no executable stack or data, no text relocations, stack guards, no RPATH."""
    segments = re.findall(r"^  (\w+) .* 0x\w+ ([R ][W ][E ]) \w+$", run("readelf", "-lW", library).stdout, re.MULTILINE)
    assert {"LOAD", "GNU_STACK", "GNU_RELRO"} <= {kind for kind, _ in segments}
    assert [segment for segment in segments if segment[1].endswith("WE")] == []
    dynamic = run("readelf", "-dW", library).stdout
    assert "BIND_NOW" in dynamic
    assert re.findall(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic) == []
    assert any(name.startswith("__stack_chk_fail") for name in symbols(library, "--undefined-only"))


def test_library_needs_torch_alone_to_load(library):
    needed = re.findall(r"NEEDED +(\S+)", run("objdump", "-p", library).stdout)
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if re.search(r"cuda|cudart|c10|python", name)] == []


def test_wheel_tag_names_the_newest_glibc_used(library):
    """Or, where it is newer, the manylinux that has the C++ library."""
    used = re.findall(r"@GLIBC_(\d+)\.(\d+)", run("nm", "-D", library).stdout)
    newest = max((int(major), int(minor)) for major, minor in used)
    found = build_library.glibc_required(library)
    assert found == newest or (found > newest and "@GLIBCXX_3.4." in run("nm", "-D", library).stdout)


def test_versions_agree():
    import extension_cpp

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{extension_cpp.__version__.split("+")[0]}"' in text.splitlines()
    asked = re.findall(r'"torch>=(\d+)\.(\d+)"', text)
    assert [(int(major), int(minor)) for major, minor in asked] == [build_library.TORCH_MINIMUM]


@pytest.mark.parametrize("spec", all_specs(), ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_no_tensor_gets_a_sentence(spec, gradients):
    """A non-tensor in place of each tensor argument gives our sentence. PyTorch's own message has many lines or shows a
    build path."""
    others = {
        "None": None,
        "numpy.ndarray; torch.from_numpy makes a tensor of it": np.ones((4, 6), np.float32),
        "float": 2.5,
        "list": [1.0, 2.0],
    }
    arguments = getattr(torch.ops.extension_cpp, spec.name).default._schema.arguments
    sample = next(spec.sample_inputs(maker("cpu", torch.float32), (4, 6)))
    for place, (x, argument) in enumerate(zip(sample.args, arguments, strict=False)):
        for got, other in others.items() if isinstance(x, torch.Tensor) else ():
            if other is None and "Optional" in str(argument.type):
                continue
            args = [*sample.args[:place], other, *sample.args[place + 1 :]]
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                spec.function(*args, **sample.kwargs)
            sentence = f"expected {argument.name} to be a tensor, but got {got}"
            assert str(error.value) == f"extension_cpp::{spec.name}: {sentence}"


OTHER_LAYOUTS = {
    "layout torch.sparse_coo; x.to_dense() gives a dense tensor": torch.Tensor.to_sparse,
    "layout torch.sparse_csr; x.to_dense() gives a dense tensor": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "layout torch._mkldnn; x.to_dense() gives a dense tensor": torch.Tensor.to_mkldnn,
    "a quantized tensor; x.dequantize() gives a dense one": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "a nested tensor with layout=torch.strided": lambda x: torch.nested.nested_tensor([x, x]),
}


@pytest.mark.parametrize("spec", all_specs(), ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_tensors_of_layouts_without_kernels_get_a_sentence(spec, gradients):
    """In place of each tensor argument. PyTorch's own message lists all backends, and names no argument."""
    arguments = getattr(torch.ops.extension_cpp, spec.name).default._schema.arguments
    sample = next(spec.sample_inputs(maker("cpu", torch.float32), (4, 6)))
    for place, (x, argument) in enumerate(zip(sample.args, arguments, strict=False)):
        for got, change in OTHER_LAYOUTS.items() if isinstance(x, torch.Tensor) else ():
            if not x.is_floating_point() and re.search("mkldnn|quantized", got):
                continue  # torch has no such integers
            other = change(x.detach())
            if gradients and other.is_floating_point() and x.requires_grad and "mkldnn" not in got:
                other.requires_grad_()
            args = [*sample.args[:place], other, *sample.args[place + 1 :]]
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                spec.function(*args, **sample.kwargs)
            to_be = "dense or jagged" if "nested" in got else "dense"
            sentence = f"expected {argument.name} to be {to_be}, but got {got}"
            assert str(error.value) == f"extension_cpp::{spec.name}: {sentence}"


def test_nothing_is_written_outside_of_tensors(device: str) -> None:
    """Of all ops, on the GPU: also behind scratch, such as partial sums of one row less than there are."""
    if device != "cuda":
        pytest.skip("on the CPU the C tests look for it, under the address sanitizer")
    assert (result := run(sys.executable, "-m", "tests.guarded")).returncode == 0, result.stdout + result.stderr
