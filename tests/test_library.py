"""Tests what the library needs of its host. One file must work with every Python and every torch >= 2.10."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import build_library
from tests.checks import maker
from tests.forked import python
from tests.guarded import forward_and_backward
from tests.opspec import OpSpec, all_specs

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
    """The library calls only C functions of torch, nothing of Python, and exports only names of its own."""
    undefined = symbols(library, "--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in undefined)  # otherwise the next two lines prove nothing
    assert [name for name in undefined if re.match(r"_Z\w*?(2at|3c10|5torch)", name)] == []
    assert [name for name in undefined if re.match(r"_*(cuda|cu|nv)[A-Z]|Py|_Py", name)] == []
    exported = symbols(library, "--defined-only")
    assert exported != [] and [name for name in exported if not name.startswith("extension_cpp_")] == []


def test_library_is_hardened(library):
    """The library has full RELRO, no executable stack or data, no text relocations, stack guards, and no RPATH."""
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
    """The manylinux tag names the newest glibc that the library uses, or one that its libstdc++ symbols need."""
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


def arguments_of(spec: OpSpec) -> Iterator[tuple[str, str]]:
    """Yields the name and type of each argument of an operator. A list counts as the two tensors that samples have."""
    for argument in getattr(torch.ops.extension_cpp, spec.name).default._schema.arguments:
        is_list = str(argument.type) == "List[Tensor]"
        names = [f"{argument.name}[{i}]" for i in range(2)] if is_list else [argument.name]
        yield from ((name, str(argument.type)) for name in names)


@pytest.mark.parametrize("spec", all_specs(), ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_no_tensor_gets_a_sentence(spec, gradients):
    """A non-tensor in place of a tensor raises our message. PyTorch's message has many lines or shows a build path."""
    others = {
        "None": None,
        "numpy.ndarray; torch.from_numpy makes a tensor of it": np.ones((4, 6), np.float32),
        "float": 2.5,
        "list": [1.0, 2.0],
    }
    sample = next(spec.sample_inputs(maker("cpu", torch.float32), (4, 6)))
    for place, (x, (name, kind)) in enumerate(zip(sample.args, arguments_of(spec), strict=False)):
        for got, other in others.items() if isinstance(x, torch.Tensor) else ():
            if other is None and "Optional" in kind:
                continue
            args = [*sample.args[:place], other, *sample.args[place + 1 :]]
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                (spec.in_place or spec.function)(*args, **sample.kwargs)
            sentence = f"expected {name} to be a tensor, but got {got}"
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
    """A tensor of an unsupported layout raises our message, which names the argument. PyTorch's message does not."""
    sample = next(spec.sample_inputs(maker("cpu", torch.float32), (4, 6)))
    for place, (x, (name, _)) in enumerate(zip(sample.args, arguments_of(spec), strict=False)):
        for got, change in OTHER_LAYOUTS.items() if isinstance(x, torch.Tensor) else ():
            if not x.is_floating_point() and re.search("mkldnn|quantized", got):
                continue  # torch has no such integer tensors
            other = change(x.detach())
            if gradients and other.is_floating_point() and x.requires_grad and "mkldnn" not in got:
                other.requires_grad_()
            args = [*sample.args[:place], other, *sample.args[place + 1 :]]
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                (spec.in_place or spec.function)(*args, **sample.kwargs)
            to_be = "dense or jagged" if "nested" in got else "dense"
            sentence = f"expected {name} to be {to_be}, but got {got}"
            assert str(error.value) == f"extension_cpp::{spec.name}: {sentence}"


def test_nothing_is_written_outside_of_tensors(device: str) -> None:
    """On a GPU no op writes outside its tensors or its scratch memory, around which tests/guarded.py puts guard bytes.
    On a CPU the calls of guarded.py run without guard bytes, because the C tests run under the address sanitizer."""
    if device != "cuda":
        for spec in all_specs():  # the calls of guarded.py, whose guard bytes need a GPU
            for sample in spec.sample_inputs(maker("cpu", torch.float32), (4, 6)):
                forward_and_backward(spec, sample)
        return
    assert (result := run(sys.executable, "-m", "tests.guarded")).returncode == 0, result.stdout + result.stderr


WRONG = """
#include "common/shim/registration.cpp"
namespace extension_cpp {
using Numbers = std::vector<int64_t>;
using Optional = std::optional<Tensor>;
static Tensor all(const Tensor &x, const Optional &w, int64_t i, double f, bool b, const Numbers &n,
                  const std::optional<Numbers> &d, std::optional<double> e, std::string s,
                  const std::vector<Tensor> &t, const Tensor &out) { return x; }
static Tensor number(const Tensor &x, int64_t s) { return x; }
static Tensor required(const Tensor &x, const Tensor &weight) { return x; }
static Tensor optional(const Tensor &x, const Optional &weight) { return x; }
static std::tuple<Tensor, double> two(const Tensor &x) { return {x, 0}; }
static void nothing(const Tensor &x) {}
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "all(Tensor x, Tensor? w, int i=1, float f=1., bool b=False, SymInt[2] n=[1, 2], "
                   "int[1]? d=None, float? e=None, *, str s='', Tensor[] t, Tensor(a!) out) -> Tensor(a!)", &all);
  DEF(m, "nothing(Tensor x) -> ()", &nothing);
  DEF(m, "two(Tensor x) -> (Tensor, float)", &two);
  DEF(m, "number(Tensor x, float s=1.0) -> Tensor", &number);
  DEF(m, "required(Tensor x, Tensor? weight=None) -> Tensor", &required);
  DEF(m, "optional(Tensor x, Tensor weight) -> Tensor", &optional);
  DEF(m, "list(Tensor x, int[] s) -> Tensor", &number);
  DEF(m, "more(Tensor x) -> Tensor", &number);
  DEF(m, "fewer(Tensor x, int s, bool b) -> Tensor", &number);
  DEF(m, "one(Tensor x) -> Tensor", &two);
  DEF(m, "none(Tensor x) -> Tensor", &nothing);
  DEF(m, "order(Tensor x) -> (float, Tensor)", &two);
  DEF_WITH_FEWER_RESULTS(m, "split(Tensor x) -> (Tensor, float)", &two, "Tensor", &two);
}
REGISTER_KERNELS(m) {
  impl(m, "nothing", TORCH_BOX(&nothing));
  impl(m, "number", TORCH_BOX(&number));
  impl(m, "two", TORCH_BOX(&nothing));
  impl(m, "undefined", TORCH_BOX(&nothing));
}
}  // namespace extension_cpp
STABLE_TORCH_LIBRARY(wrong, m) { (void)m; }
"""
SENTENCES = """
number: expected argument s to be float, as in its schema, but got a C++ function with int64_t, which is int
required: expected argument weight to be Tensor?, as in its schema, but got a C++ function with Tensor
optional: expected argument weight to be Tensor, as in its schema, but got a C++ function with std::optional<Tensor>, \
which is Tensor?
list: expected argument s to be int[], as in its schema, but got a C++ function with int64_t, which is int
more: expected 1 argument, as in its schema, but got a C++ function with 2
fewer: expected 3 arguments, as in its schema, but got a C++ function with 2
one: expected 1 result, as in its schema, but got a C++ function with 2
none: expected 1 result, as in its schema, but got a C++ function with 0
order: expected result 0 to be float, as in its schema, but got a C++ function with Tensor
split_no_grad: expected 1 result, as in its schema, but got a C++ function with 2
two: expected a kernel of the function that DEF compared its schema with, but got another function's
undefined: expected a schema in DEF before its kernel, but got none
"""
LOAD = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
errors = ctypes.CDLL(sys.argv[1]).extension_cpp_schema_errors
errors.restype = ctypes.c_char_p
print(errors().decode())
print(sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("wrong::")), file=sys.stderr)
"""


def test_a_schema_that_does_not_fit_its_function_is_named(tmp_path: Path) -> None:
    """A schema that does not fit its C++ function is reported, with the wrong argument, result or number of them.
    Schemas that fit are still defined."""
    source, made = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text(WRONG)
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-w", "-O0", "-fPIC", "-shared"]
    command += [f"-I{build_library.CSRC}", f"-isystem{build_library.torch_folder()}/include"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_EXTENSION_NAME=wrong"]
    libraries = [f"-L{build_library.torch_folder()}/lib", "-ltorch_cpu"]
    compiled = run(*command, source, "-o", made, *libraries)
    assert compiled.returncode == 0, compiled.stderr
    loaded = python("-c", LOAD, made)
    said = SENTENCES.replace("\\\n", "").strip().splitlines()
    expected = [f"extension_cpp::{sentence}" for sentence in said]
    assert loaded.stdout.splitlines() == expected, loaded.stderr
    assert loaded.stderr.splitlines()[-1] == str(
        sorted(f"wrong::{name}" for name in ("all", "all_no_grad", "nothing", "split", "split_all_results", "two"))
    )


def test_import_raises_what_the_library_says_of_its_schemas(tmp_path: Path) -> None:
    package = ROOT / "extension_cpp"
    copy = tmp_path / "extension_cpp"
    copy.mkdir()
    (copy / "__init__.py").write_text((package / "__init__.py").read_text())
    source = Path(f"{tmp_path}/said.c")
    function = "const char *extension_cpp_schema_errors(void)"
    source.write_text(f'{function} {{ return "extension_cpp::f: expected s"; }}')
    run(*build_library.compiler("CC", "cc", "gcc"), "-shared", "-fPIC", source, "-o", copy / build_library.LIBRARY)
    imported = python("-c", "import extension_cpp", cwd=tmp_path)
    assert imported.returncode == 1
    assert "ImportError: " in imported.stderr and "extension_cpp::f: expected s" in imported.stderr
