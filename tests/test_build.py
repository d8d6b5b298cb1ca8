"""Tests the build: its environment variables, what it compiles after a change, its error messages, and wheels."""

import ast
import contextlib
import importlib.machinery
import importlib.util
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools

import build_library
import check_environment
from tests.forked import python

ROOT = Path(build_library.__file__).parent
BUILD_VARIABLES = [
    "USE_CUDA",
    "TORCH_CUDA_ARCH_LIST",
    "DEBUG",
    "MAX_JOBS",
    "CC",
    "CXX",
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
]
BUILD_VARIABLES += ["GLIBC", "MAKEFLAGS", "MAKELEVEL", "PYTHON"]  # `make test` may set these for the tests


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in BUILD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Architectures


@pytest.fixture
def nvcc(tmp_path) -> list[str]:
    """Makes an imitation of nvcc that lists the architectures of CUDA 13.0. Returns the command that runs it."""
    known = "compute_75 compute_80 compute_86 compute_89 compute_90 compute_100 compute_120"
    return [str(script(tmp_path / "nvcc", f"printf '%s\\n' {known}\n"))]


@pytest.mark.parametrize(
    "asked, built",
    [
        ("", ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]),
        ("9.0", ["9.0"]),
        ("7.5;9.0+PTX", ["7.5", "9.0+PTX"]),
        ("8.0 8.6, 8.9", ["8.0", "8.6", "8.9"]),
        ("Turing;Hopper", ["7.5+PTX", "9.0+PTX"]),
        ("ampere", ["8.0", "8.6+PTX"]),
        ("9.0a", ["9.0a"]),
        ("10.0f;12.0f+PTX", ["10.0f", "12.0f+PTX"]),
    ],
)
def test_architecture_list(asked, built, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert build_library.architectures(nvcc) == built


@pytest.fixture
def machine_with(tmp_path, monkeypatch):
    """Returns a function make(output), after which nvidia-smi is an imitation that prints `output`."""

    def make(output: str) -> None:
        script(tmp_path / "nvidia-smi", f"printf '{output}'\n")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        build_library.native_architectures.cache_clear()

    yield make
    build_library.native_architectures.cache_clear()


@pytest.mark.parametrize("output, built", [("8.6\n9.0\n8.6\n", ["8.6", "9.0"]), ("", None), ("[N/A]\n", None)])
def test_native_architecture_is_the_gpu_that_is_there(output, built, nvcc, machine_with, monkeypatch):
    """The architecture "native" means this machine's GPUs. Without a GPU, CUDA is built only on request."""
    machine_with(output)
    monkeypatch.setenv("NVCC", nvcc[0])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    if built:
        assert build_library.find_nvcc() == nvcc and build_library.architectures(nvcc) == built
        monkeypatch.setenv("USE_CUDA", "0")
        assert build_library.find_nvcc() is None
        return
    assert build_library.find_nvcc() is None
    monkeypatch.setenv("USE_CUDA", "1")
    assert build_library.find_nvcc() == nvcc and build_library.architectures(nvcc) == ["9.0+PTX"]
    monkeypatch.delenv("USE_CUDA")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert build_library.find_nvcc() == nvcc and build_library.architectures(nvcc) == ["8.0"]


def test_cuda_home_is_the_toolkit_that_is_taken(nvcc, tmp_path, monkeypatch):
    """The build takes nvcc from CUDA_HOME, whose path may contain a space, unless the variable NVCC is set."""
    (tmp_path / "a toolkit" / "bin").mkdir(parents=True)
    inside = shutil.copy(nvcc[0], tmp_path / "a toolkit" / "bin")
    monkeypatch.setenv("CUDA_HOME", "a toolkit")
    monkeypatch.setenv("NVCC", " ")
    monkeypatch.chdir(tmp_path)
    assert build_library.find_nvcc() == [inside]
    monkeypatch.setenv("NVCC", f"env {nvcc[0]}")
    assert build_library.find_nvcc() == ["env", nvcc[0]]


@pytest.mark.parametrize(
    "asked, flags",
    [("8.6", ["sm_86"]), ("12.0+PTX", ["sm_120", "compute_120"]), ("10.0f+PTX", ["sm_100f", "compute_100f"])],
)
def test_architecture_flags(asked, flags):
    number = flags[0].removeprefix("sm_")
    assert build_library.gencode(asked) == [f"-gencode=arch=compute_{number},code={code}" for code in flags]


def old_torch(nvcc: list[str]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_library.importlib.metadata, "version", lambda name: "2.9.1+cu128")
        return build_library.torch_folder()


@pytest.mark.parametrize(
    "variable, call, sentence",
    [
        ("TORCH_CUDA_ARCH_LIST=9.0;sm_90", build_library.architectures, "'sm_90' is neither a number "),
        ("TORCH_CUDA_ARCH_LIST=9.9", build_library.architectures, "this nvcc does not know 9.9; it knows 7.5, 8.0, "),
        ("USE_CUDA=yes", lambda nvcc: build_library.find_nvcc(), "error: USE_CUDA must be 0 or 1, got 'yes'."),
        ("NVCC=/no/nvcc", lambda nvcc: build_library.find_nvcc(), "NVCC is set to '/no/nvcc', which was not found."),
        ("NVCC=nvcc'", lambda nvcc: build_library.find_nvcc(), "NVCC is set to 'nvcc'', which is not a command: No "),
        ("CUDA_HOME=/no", lambda nvcc: build_library.find_nvcc(), "CUDA_HOME is set to '/no', which has no bin/nvcc; "),
        ("CUDA_PATH=/bin", lambda nvcc: build_library.find_nvcc(), "CUDA_PATH is set to '/bin', which has no bin/nvcc"),
        (
            'CC=gcc "',
            lambda nvcc: build_library.machine(),
            "CC is set to 'gcc \"', which is not a command: No closing ",
        ),
        (
            "DEBUG=yes",
            lambda nvcc: build_library.write_ninja(Path(nvcc[0]).parent),
            "error: DEBUG must be 0 or 1, got 'yes'.",
        ),
        ("CC=false", lambda nvcc: build_library.machine(), "'false -dumpmachine' does not name a processor: CC must"),
        ("CC=false", lambda nvcc: check_environment.check_compilers(), "CC is 'false', which does not compile and "),
        ("GLIBC=2_28", lambda nvcc: build_library.linker(["c++"]), "GLIBC must be a version such as 2.28, got '2_28'"),
        ("", old_torch, "torch 2.9.1+cu128 is too old: extension_cpp needs torch >= 2.10."),
    ],
)
def test_what_cannot_be_built_gets_a_sentence(variable, call, sentence, nvcc, monkeypatch):
    monkeypatch.setenv(*(variable or "USE_CUDA=0").split("="))
    with pytest.raises(SystemExit, match=re.escape(sentence)) as error:
        call(nvcc)
    assert str(error.value).startswith("error: ")


# What is compiled again


def steps(folder: Path) -> list[str]:
    """Returns the output files of the commands that ninja would run now in the build folder."""
    planned = run(sys.executable, "-m", "ninja", "-C", folder, "-n", "-v")
    assert planned.returncode == 0, planned.stdout
    return re.findall(r"-o (\S+)(?: && .*)?$", planned.stdout, re.MULTILINE)


def build_small_tree(root: Path, **variables: str) -> Path:
    """Copies the sources that a library with muladd as its only op needs, and builds them for the CPU."""
    csrc = ROOT / "extension_cpp" / "csrc"
    for part in ("common", "muladd"):
        shutil.copytree(csrc / part, root / "extension_cpp" / "csrc" / part)
    shutil.copy(csrc / "library.cpp", root / "extension_cpp" / "csrc")
    shutil.copy(build_library.__file__, root)
    return build_tree(root, **variables)


def build_tree(root: Path, **variables: str) -> Path:
    environment = {name: value for name, value in os.environ.items() if name not in BUILD_VARIABLES}
    built = run(sys.executable, root / "build_library.py", env=environment | {"USE_CUDA": "0"} | variables)
    assert built.returncode == 0, built.stdout + built.stderr
    return root


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory) -> Path:
    return build_small_tree(tmp_path_factory.mktemp("a $tree $ of $$: one"))


@contextlib.contextmanager
def touched(path: Path) -> Iterator[None]:
    """Inside the with block, makes the file newer than every object, even on file systems with coarse timestamps."""
    before = path.stat().st_mtime_ns
    root = next(folder for folder in path.parents if (folder / "build").is_dir())
    later = max(file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()) + 10**9
    os.utime(path, ns=(later, later))
    yield
    os.utime(path, ns=(before, before))


@pytest.fixture
def builds(monkeypatch, tmp_path) -> list[list[str]]:
    """Replaces ninja and returns its recorded commands. Each command writes a library with bytes of its own."""
    commands: list[list[str]] = []

    def ninja(command: list[str], **_) -> subprocess.CompletedProcess:
        commands.append(command)
        (Path(command[command.index("-C") + 1]) / build_library.LIBRARY).write_bytes(bytes([len(commands)]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("USE_CUDA", "0")
    monkeypatch.setattr(build_library, "ROOT", tmp_path)
    monkeypatch.setattr(build_library, "write_ninja", lambda folder, namespace: "")
    monkeypatch.setattr(build_library, "steps_to_do", lambda ninja: 0)
    monkeypatch.setattr(build_library, "machine", build_library.platform.machine)
    monkeypatch.setattr(build_library.subprocess, "run", ninja)
    return commands


def test_jobs_of_the_build(builds, monkeypatch, tmp_path):
    monkeypatch.setenv("MAX_JOBS", "3")
    build_library.build(tmp_path / "library.so")
    assert builds[0][builds[0].index("-j") + 1] == "3"


def test_library_is_replaced_not_rewritten(builds, monkeypatch, tmp_path):
    """A build replaces the library file and does not write into the old one. A process that has loaded the old file
    keeps it, and no process sees a half-written file. After a failed build, the old file is still there."""
    library = tmp_path / "package" / "library.so"
    build_library.build(library)
    with library.open("rb") as in_use:
        build_library.build(library)
        assert in_use.read() == bytes([1]) and library.read_bytes() == bytes([2])
    monkeypatch.setattr(build_library.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="the compilation failed"):
        build_library.build(library)
    assert library.read_bytes() == bytes([2]) and list(library.parent.iterdir()) == [library]


def test_debug_and_release_builds_take_turns(builds, monkeypatch, tmp_path):
    """A debug build after a release build, or a release build after a debug build, installs its own library. This holds
    even if ninja has nothing to compile and the library is older than the installed one."""

    def ninja(command: list[str]) -> subprocess.CompletedProcess:
        built = Path(command[command.index("-C") + 1]) / build_library.LIBRARY
        if not built.exists():
            built.write_bytes(os.environ["DEBUG"].encode())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build_library.subprocess, "run", ninja)
    for debug in ("0", "1", "0", "1"):
        monkeypatch.setenv("DEBUG", debug)
        build_library.build(tmp_path / "library.so")
        assert (tmp_path / "library.so").read_bytes() == debug.encode()


@pytest.mark.parametrize("debug", ["0", "1"])
def test_debug_is_in_every_command_and_in_what_the_library_says(monkeypatch, tmp_path, debug):
    monkeypatch.setenv("USE_CUDA", "0")
    monkeypatch.setenv("DEBUG", debug)
    build_library.write_ninja(tmp_path)
    text = (tmp_path / "build.ninja").read_text()
    for rule, level in {"c": "-O2", "cxx": "-O1"}.items():
        command = re.search(rf"^rule {rule}\n  command = (.*)", text, re.MULTILINE)[1]
        assert ("-O0 -g" in command) is (debug == "1") and (level in command) is (debug == "0")
    assert f"debug={debug}" in text
    levels = [*build_library.X86_LEVELS] if build_library.platform.machine() == "x86_64" else ["baseline"]
    assert f"cpu={','.join(levels if debug == '0' else levels[:1])} " in text


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_kernels_are_optimised_for_each_instruction_set(compiler, monkeypatch, tmp_path):
    """The kernels of each instruction set get the compiler's options for speed, and those with CPU_SMALL get -O1."""
    says = f'case $1 in -dumpmachine) echo x86_64-linux-gnu;; *) echo "#define __{compiler}__ 1";; esac'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", f"{says}\n")))
    monkeypatch.setenv("USE_CUDA", "0")
    build_library.write_ninja(tmp_path)
    text = (tmp_path / "build.ninja").read_text()
    best = {"gcc": "-ftree-vectorize -fvect-cost-model=dynamic -fpeel-loops", "clang": "-O3"}[compiler]
    assert dict(re.findall(r"(?m)^build (\w+)/norm/norm_cpu\.c\.o: .*\n  flags = (.*) -DCPU_LEVEL", text)) == {
        "baseline": "-O1 -DCPU_SMALL",
        "v3": f"{best} -mavx2 -mfma -mf16c",
        "v4": f"{best} -march=x86-64-v4 -mprefer-vector-width=512",
    }
    rule = re.search(r"(?m)^rule c\n  command = (.*)", text)[1]
    assert all((flag in rule.split()) is (compiler == "gcc") for flag in build_library.GCC_FLAGS)


@pytest.mark.slow
def test_two_builds_give_the_same_bytes(small_tree, tmp_path):
    """Two builds give wheels of the same bytes, even if names of folders and dates and modes of files differ. A wheel
    does not contain torch's path, although error messages in PyTorch's headers contain the header's path."""
    wheels = []
    for number, tree in enumerate([small_tree, build_small_tree(tmp_path / "elsewhere")]):
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "check_environment.py"):
            shutil.copy(ROOT / name, tree)
        shutil.copy(ROOT / "extension_cpp" / "__init__.py", tree / "extension_cpp")
        for package in (ROOT / "extension_cpp").glob("*/__init__.py"):
            shutil.copytree(package.parent, tree / "extension_cpp" / package.parent.name)
        for file in tree.glob("*.py"):
            file.chmod(0o644 + 0o020 * number)
            os.utime(file, (10**9 * (number + 1),) * 2)
        pack = ["setup.py", "-q", "bdist_wheel", "-b", tmp_path / f"build-{number}", "-d", tmp_path / f"dist-{number}"]
        umask = os.umask(0o022 - 0o020 * number)
        packed = run(sys.executable, *pack, cwd=tree, env=os.environ | {"USE_CUDA": "0"})
        os.umask(umask)
        assert packed.returncode == 0, packed.stderr
        wheels += (tmp_path / f"dist-{number}").iterdir()
    one, other = wheels
    assert one.name == other.name
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        library = a.read("extension_cpp/libextension_cpp.so")
        torch = build_library.torch_folder()
        assert b"torch/csrc/stable/" in library
        assert not [folder for folder in (torch, torch.resolve()) if str(folder).encode() in library]
        assert {info.filename: info.CRC for info in a.infolist()} == {info.filename: info.CRC for info in b.infolist()}
    assert one.read_bytes() == other.read_bytes()


def test_library_for_an_older_glibc(small_tree, tmp_path, monkeypatch):
    """A library linked for an older glibc needs no newer glibc or C++ library. Its errors still reach Python."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang, which links for older systems, is not installed")
    shutil.copytree(small_tree, tmp_path / "old")  # with the objects, because only linking depends on the glibc
    tree = build_tree(tmp_path / "old", GLIBC="2.28")
    library = tree / "extension_cpp" / build_library.LIBRARY
    assert build_library.glibc_required(library) <= (2, 28)
    imports = run("objdump", "-Tp", library).stdout
    assert "GLIBCXX" not in imports and "libgcc_s.so.1" in imports and re.search(r"GLIBC_\S+ +memset", imports)
    call = f"import torch; torch.ops.load_library(r'{library}'); one = torch.ones(3)\n"
    call += "print(torch.ops.extension_cpp.muladd(one, one, 2.0).tolist())\n"
    call += "try: torch.ops.extension_cpp.muladd(one, torch.ones(4), 2.0)\nexcept RuntimeError as error: print(error)"
    said = python("-c", call).stdout
    assert said == "[3.0, 3.0, 3.0]\nextension_cpp::muladd: expected b of shape [3] like a, but got [4]\n"


def test_library_for_another_processor(small_tree, tmp_path, monkeypatch):
    """A cross compiler builds the library for another processor, and needs no torch for that processor. The built
    library names the same libraries of torch, and the same symbols of these, as a library for this processor."""
    compilers = {"CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++"}
    if missing := [name for name in compilers.values() if not shutil.which(name)]:
        pytest.skip(f"no {missing[0]} (Debian: apt install g++-aarch64-linux-gnu)")
    tree = build_small_tree(tmp_path / "other", **compilers)
    library = tree / "extension_cpp" / build_library.LIBRARY
    assert "AArch64" in run("readelf", "-h", library).stdout
    needed = re.findall(r"NEEDED.*\[(libtorch\S*)\]", run("readelf", "-d", library).stdout)
    assert needed == ["libtorch.so", "libtorch_cpu.so"]

    def of_torch(library: Path) -> set[str]:
        return set(re.findall(r"UND ((?:aoti_)?torch_\w+)", run("readelf", "--dyn-syms", "-W", library).stdout))

    here = of_torch(small_tree / "extension_cpp" / build_library.LIBRARY)
    assert here and of_torch(library) == here
    with monkeypatch.context() as patch:
        patch.setenv("CC", compilers["CC"])
        assert build_library.machine() == "aarch64"


@pytest.mark.parametrize("answer, name", [("x86_64-alpine-linux-musl", "x86_64"), ("powerpc64le-linux-gnu", "ppc64le")])
def test_the_compiler_names_the_processor(answer, name, tmp_path, monkeypatch):
    """machine() derives platform.machine()'s name of the processor from the compiler's target, even behind ccache."""
    script(tmp_path / "gcc", f"echo {answer}\n")
    script(tmp_path / "ccache", '"$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CC", "ccache gcc")
    assert build_library.machine() == name


def test_what_is_built_is_not_built_again(small_tree, tmp_path):
    """A second build leaves the library file alone. A copy of sources and build folder compiles nothing again."""
    library = small_tree / "extension_cpp" / build_library.LIBRARY
    before = library.stat()
    build_tree(small_tree)
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    shutil.copytree(small_tree, tmp_path / "copy")
    assert steps(tmp_path / "copy" / "build" / "release-cpu") == []


def test_header_change_rebuilds_c_and_cpp(small_tree):
    folder = small_tree / "build" / "release-cpu"
    ninja = [sys.executable, "-m", "ninja", "-C", str(folder)]
    assert steps(folder) == [] and build_library.steps_to_do(ninja) == 0
    levels = ["baseline", "v3", "v4"] if build_library.platform.machine() == "x86_64" else ["baseline"]
    expected = [f"{level}/muladd/muladd_cpu.c.o" for level in levels] + ["together_1.cpp.o", build_library.LIBRARY]
    with touched(small_tree / "extension_cpp" / "csrc" / "muladd" / "muladd.h"):
        assert sorted(steps(folder)) == sorted(expected)
        assert build_library.steps_to_do(ninja) == len(expected)


@pytest.mark.parametrize(
    ("rule", "header", "others"),
    [("shims.h", "shim/op.h", "torch/headeronly"), ("baseline/kernels.h", "cpu/block.h", "/usr/")],
)
def test_a_precompiled_header_follows_all_that_it_includes(rule, header, others, small_tree):
    """A precompiled header is rebuilt if any included header changes. The compiler does not check this itself."""
    folder = small_tree / "build" / "release-cpu"
    listed = run(sys.executable, "-m", "ninja", "-C", folder, "-t", "deps", f"{rule}.gch").stdout
    assert f"common/{header}" in listed and others in listed
    with touched(small_tree / "extension_cpp" / "csrc" / "common" / header):
        assert f"{rule}.gch" in steps(folder)


def test_an_op_includes_no_other_op():
    """An op includes no header of another op. Shared code is in common/, rows/ and activation/, which include no op."""
    shared = {"common", "rows", "activation"}
    allowed = {"common": set(), "rows": {"common"}, "activation": {"common"}}
    for path in sorted(build_library.CSRC.rglob("*.*")):
        folder = path.relative_to(build_library.CSRC).parts[0]
        others = set(re.findall(r'#include "(\w+)/', path.read_text())) - {folder}
        assert others <= allowed.get(folder, shared), f"{path} includes {', '.join(sorted(others))}"


def test_each_shim_has_a_namespace_of_its_own():
    """Each op's .cpp file has a namespace of its own, because several of these files are compiled as one."""
    for path in [*build_library.CSRC.glob("*/*.cpp"), *ROOT.glob("templates/*/kernel_template/*.cpp")]:
        if path.parent.name != "rows":  # rows/ has no op: its functions are called through ctypes
            assert f"\nnamespace extension_cpp::{path.parent.name} {{\n" in path.read_text(), path


@pytest.mark.parametrize("size", [1, 10_000, 10**9])
def test_each_source_is_compiled_once(size, tmp_path, monkeypatch):
    """Each C++ source is compiled exactly once: alone, together with some others, or together with all others."""
    monkeypatch.setenv("USE_CUDA", "0")
    monkeypatch.setattr(build_library, "TOGETHER", size)
    build_library.write_ninja(tmp_path)
    objects = re.findall(r"(?m)^build (\S+\.cpp)\.o: cxx ", (tmp_path / "build.ninja").read_text())
    groups = [name for name in objects if name.startswith("together_")]
    assert bool(groups) == (size > 1) and (size < 10**9 or len(groups) == 1)
    compiled = [name for name in objects if name not in groups]
    for name in groups:
        compiled += re.findall(r'#include "(\S+)"', (tmp_path / name).read_text())
    assert sorted(compiled) == sorted(str(p.relative_to(build_library.CSRC)) for p in build_library.CSRC.rglob("*.cpp"))


@pytest.mark.parametrize("op", ["scan", "loss"])
def test_a_large_folder_has_a_map_of_its_files(op):
    folder = build_library.CSRC / op
    text = (folder / f"{op}.h").read_text()
    listed = re.search(r"/\* The files of this folder, from PyTorch down:.*?\*/", text, re.DOTALL)
    assert listed and set(re.findall(r"\b\w+\.(?:cpp|cuh|cu|c|h)\b", listed[0])) == {p.name for p in folder.iterdir()}


def test_gpu_code_has_no_namespace_without_a_name():
    """GPU code has no anonymous namespace, into whose symbol names nvcc puts a date, so that builds would differ."""
    for path in build_library.CSRC.rglob("*.cu*"):
        assert not re.search(r"\bnamespace \{", path.read_text()), path


def test_header_change_rebuilds_cu_to_the_same_bytes(small_tree, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    if build_library.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    tree = tmp_path / "a $tree"
    shutil.copytree(small_tree / "extension_cpp", tree / "extension_cpp")
    folder = tree / "build" / "cuda"
    folder.mkdir(parents=True)
    monkeypatch.setattr(build_library, "CSRC", tree / "extension_cpp" / "csrc")
    build_library.write_ninja(folder)
    target = "together_1.cu.o"  # the object into which common/cuda/error.cu is compiled
    compile_target = [sys.executable, "-m", "ninja", "-C", folder, target]
    built = run(*compile_target)
    assert built.returncode == 0, built.stdout
    assert target not in steps(folder)
    first = (folder / target).read_bytes()
    with touched(tree / "extension_cpp" / "csrc" / "common" / "cuda" / "error.h"):
        assert target in steps(folder)
        if int(build_library.cuda_version(build_library.find_nvcc()).split(".")[0]) >= 13:
            assert run(*compile_target).returncode == 0
            assert (folder / target).read_bytes() == first  # before CUDA 13, nvcc writes its process ID into the object


# The version and tags that setup.py gives to a wheel


@pytest.mark.parametrize(
    "command, use_cuda, tag",
    [
        ("bdist_wheel", "0", "+cpu"),
        ("bdist_wheel", "1", "+cu130"),
        ("dist_info", "1", "+cu130"),
        ("sdist", "1", ""),
        ("sdist --formats gztar --dist-dir dist", "1", ""),  # as pip and other build front ends call it
    ],
)
def test_version_of_a_wheel_says_what_it_was_built_for(command, use_cuda, tag, tmp_path):
    """The version of a wheel ends with its CUDA version or "+cpu". The version of a source distribution does not.

    The tests use a setup.cfg with an empty tag, like that in a source distribution.
    """
    nvcc = script(tmp_path / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    for name in ("setup.py", "build_library.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "setup.cfg").write_text("[egg_info]\ntag_build = \ntag_date = 0\n")
    ask = "import sys, setuptools; sys.argv[0] = 'setup.py'; __file__ = 'setup.py'; "
    ask += "setuptools.setup = lambda **options: given.update(options); given = {}; exec(open('setup.py').read()); "
    ask += "distribution = setuptools.Distribution({'name': 'n', 'version': '1'}); distribution.parse_config_files(); "
    ask += "made = given['cmdclass']['egg_info'](distribution); distribution._set_command_options(made); "
    ask += "made.ensure_finalized(); print(made.egg_version)"
    variables = os.environ | {"USE_CUDA": use_cuda, "NVCC": str(nvcc)}
    told = run(sys.executable, "-c", ask, *command.split(), cwd=tmp_path, env=variables)
    assert told.returncode == 0, told.stderr
    assert told.stdout == f"1{tag}\n"


@pytest.mark.parametrize(
    "symbols, manylinux",
    [
        (["GLIBC_2.2.5", "GLIBC_2.32", "GLIBC_2.17"], (2, 32)),
        (["GLIBC_2.32", "GLIBCXX_3.4.29", "CXXABI_1.3"], (2, 34)),
        (["GLIBC_2.36", "GLIBCXX_3.4.29", "GLIBCXX_3.4"], (2, 36)),
        (["GLIBC_2.17", "GLIBCXX_3.4.21", "CXXABI_1.3.9"], (2, 24)),
        (["GLIBC_2.17", "GLIBCXX_3.4.9", "CXXABI_1.3.13"], (2, 34)),
        (["GLIBC_2.17", "GLIBCXX_3.4.99"], (2, 50)),  # in no manylinux policy: needs this machine's glibc
    ],
)
def test_the_tag_of_a_wheel_is_the_oldest_manylinux_that_has_all(symbols, manylinux, monkeypatch):
    table = "".join(f"  0x0020:   Name: {name}  Flags: none  Version: 5\n" for name in symbols)
    monkeypatch.setattr(build_library.platform, "libc_ver", lambda: ("glibc", "2.50"))
    done = subprocess.CompletedProcess([], 0, table)
    monkeypatch.setattr(build_library.subprocess, "run", lambda *words, **options: done)
    assert build_library.glibc_required(Path("any.so")) == manylinux


def test_wheel_is_built_with_a_torch_that_pip_fetches_alone(tmp_path, monkeypatch):
    """To build the wheel, setup.py downloads torch without its dependencies, gigabytes of which it uses no header."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    setup_file = runpy.run_path(str(ROOT / "setup.py"))
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words) or subprocess.CompletedProcess(words, 0))
    setup_file["fetch_torch"](str(tmp_path))
    (words,) = asked
    assert words[:4] == [sys.executable, "-m", "pip", "install"] and words[-1] == "torch>=2.10"
    assert "--no-deps" in words and words[words.index("--target") + 1] == sys.path[0] == str(tmp_path)


# The checks before the build


@pytest.mark.parametrize("file", ["check_environment.py", "build_library.py", "extension_cpp/__init__.py"])
def test_old_python_gets_a_sentence(file):
    """A Python that is too old prints an error message, for which the file must parse with the old grammar."""
    ast.parse((ROOT / file).read_text(), feature_version=(3, 6) if file.startswith("check") else (3, 8))
    pretend = (
        "import sys; sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'; sys.path.insert(0, sys.argv[1]); "
    )
    module = Path(file).parts[0].removesuffix(".py")
    call = "check_environment.check_python(sys.version_info)" if file.startswith("check") else ""
    done = run(sys.executable, "-c", f"{pretend} import {module}; {call}", ROOT)
    sentence = r"Python (3\.10 or newer is needed|>= 3\.10), and \S+ is 3\.9"
    assert done.returncode == 1 and re.search(sentence, done.stderr)


# make reports errors before it starts to create .venv


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("Makefile", "requirements.txt", "check_environment.py", "build_library.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


OLD = "import runpy, sys; sys.version_info = (3, 9); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["CC=no-such-compiler"], "error: no CC compiler: 'no-such-compiler' was not found"),
        (["PATH=bin:/usr/bin:/bin"], " is 3.9; "),
        (["PYTHON=/nowhere/python"], "error: PYTHON=/nowhere/python was not found."),
        (["PYTHON="], "PYTHON= is empty"),
        (["PYTHON=bin/bare"], "lacks torch>=2.10, ninja, rich, matplotlib; install with '"),
    ],
    ids=str,
)
def test_make_says_what_is_missing(checkout, words, sentence):
    (checkout / "bin").mkdir()
    script(checkout / "bin" / "python3", f'exec {sys.executable} -c "{OLD}" "$@"\n')
    script(checkout / "bin" / "bare", f'exec {sys.executable} -S "$@"\n')  # without site-packages
    variables = dict(word.split("=") for word in words if not word.startswith("PYTHON"))
    result = run("make", "run", *words, cwd=checkout, env=os.environ | {"PIP_NO_INDEX": "1"} | variables)
    assert result.returncode != 0 and sentence in result.stderr and "Traceback" not in result.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("fault", ["another user's", "another folder's"])
def test_make_leaves_a_venv_that_it_cannot_use(checkout, fault):
    """make reports an error for a .venv that was made in another folder or by another user, and does not delete it."""
    site = checkout / ".venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    script(checkout / "python3", f'exec {sys.executable} "$@"\n')
    (checkout / ".venv" / "bin").mkdir()
    inside = Path(shutil.copy(checkout / "python3", checkout / ".venv" / "bin" / "python"))
    (site / "extension_cpp.pth").write_text(f"{checkout if fault[8] == 'u' else '/an/old place'}\n")
    (checkout / ".venv" / "ready").touch()  # newer than requirements.txt
    sentence = "error: .venv was made in /an/old place, where its programs look for Python and this package; delete "
    if fault == "another user's":
        inside.chmod(0o644)
        sentence = f"error: this user may not run {inside}; name an environment of yours with PYTHON=."
    before = sorted((checkout / ".venv").rglob("*"))
    variables = os.environ | {"PATH": f"{checkout}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    result = run("make", "build", cwd=checkout, env=variables)
    assert result.returncode != 0 and result.stderr.startswith(sentence)
    assert sorted((checkout / ".venv").rglob("*")) == before


def test_make_updates_a_venv_after_a_change_of_requirements(checkout):
    (site := checkout / ".venv" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (site / "extension_cpp.pth").write_text(f"{checkout}\n")
    (checkout / ".venv" / "bin").mkdir()
    script(checkout / ".venv" / "bin" / "python", "exit 1\n")
    (checkout / ".venv" / "ready").touch()
    for seconds, outdated in ((-60, 0), (60, 1)):
        changed = (checkout / ".venv" / "ready").stat().st_mtime + seconds
        os.utime(checkout / "requirements.txt", (changed, changed))
        assert run("make", "--question", ".venv/ready", cwd=checkout).returncode == outdated


def test_a_venv_behind_a_closed_folder_is_not_taken_for_none(monkeypatch):
    def closed(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    sentence = r"^error: this user may not run \S+/\.venv/bin/python; name an "
    with pytest.raises(SystemExit, match=sentence), monkeypatch.context() as patch:
        patch.setattr(check_environment.os, "stat", closed)  # no folder is closed to root, as which tests may run
        check_environment.check_own_venv()


@pytest.mark.parametrize("goals, glibc", [("wheel", ""), ("release", "2.28"), ("wheel release", "2.28")])
def test_make_release_builds_the_wheel_for_its_glibc(checkout, goals, glibc):
    python = script(checkout / "python", 'mkdir -p dist && echo "$* with GLIBC=$GLIBC"\n')
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC"}
    result = run("make", *goals.split(), f"PYTHON={python}", cwd=checkout, env=environment)
    built = [line for line in result.stdout.splitlines() if line.startswith("-m pip wheel ")]
    assert len(built) == 1 and built[0].endswith(f" with GLIBC={glibc}")
