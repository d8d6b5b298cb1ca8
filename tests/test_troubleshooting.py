"""The messages in docs/troubleshooting.md are real: the tests provoke each one that this machine can produce."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import build_library
import extension_cpp
from extension_cpp import info
from tests.forked import python
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"


def run(*command: object, **options) -> str:
    """Runs a command that must fail, and returns its output."""
    return failed(subprocess.run([str(word) for word in command], capture_output=True, text=True, **options))


def failed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0, result.stdout
    return result.stdout + result.stderr


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises((Exception, SystemExit)) as error:
        call()
    return str(error.value)


def nvcc_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("USE_CUDA", "1")
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda command: None)
    return message_of(build_library.find_nvcc)


def unsupported_gpu_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    if "compute_70" in subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout:
        pytest.skip("this nvcc knows compute_70")
    (tmp_path / "a.cu").write_text("")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    ours = message_of(lambda: build_library.architectures([nvcc]))
    return run(nvcc, "-gencode=arch=compute_70,code=sm_70", "-c", tmp_path / "a.cu") + ours


def headers_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = build_library.CSRC / "library.cpp"
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-fsyntax-only", source]
    return run(*command, env=os.environ | {"LC_ALL": "C"})


def package(folder: Path, library: Path | None) -> str:
    """Imports a copy of the package with another library or without one, and returns the message."""
    ignore = shutil.ignore_patterns("csrc", "__pycache__", "*.so")
    shutil.copytree(extension_cpp.LIBRARY.parent, folder / "extension_cpp", ignore=ignore)
    if library:
        shutil.copy(library, folder / "extension_cpp" / build_library.LIBRARY)
    return failed(python("-c", "import extension_cpp", cwd=folder))


def library_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return package(tmp_path, None)


def undefined_symbol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = "void _ZN3c105of_another_torchEv(void); void f(void) { _ZN3c105of_another_torchEv(); }"
    library = tmp_path / "other.so"
    compiler = build_library.compiler("CC", "cc", "gcc")
    command = [*compiler, "-x", "c", "-shared", "-fPIC", "-", "-o", str(library)]
    subprocess.run(command, input=code, text=True, check=True)
    return package(tmp_path, library)


def operator_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return message_of(lambda: torch.ops.extension_cpp.no_such_op).replace("no_such_op", "my_op")  # a reader's name


def no_kernel_for_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return message_of(lambda: extension_cpp.mish(torch.ones(3).to_sparse()))


def different_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU to provoke it on")
    return message_of(lambda: extension_cpp.scale_bias_relu(torch.ones(2, 3, device="cuda"), torch.ones(3)))


def no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    return message_of(lambda: torch.ones(1, device="cuda"))


def driver_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    build = info.Build("13.0", ("9.0",), ("baseline",), False)
    machine = info.Machine("2.11.0", "13.0", "535.54.03", "12.2", (info.Gpu("A GPU", (9, 0)),))
    return info.misfits(build, machine)[0]


def cuda_runtime(error: int) -> Callable[[Path, pytest.MonkeyPatch], str]:
    """Returns a function that gives the CUDA runtime's message for an error number."""

    def provoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        packages = Path(torch.__file__).parent.parent
        found = [*packages.glob("nvidia/*/lib/libcudart.so*"), *Path("/usr/local/cuda/lib64").glob("libcudart.so*")]
        if not found:
            pytest.skip("there is no CUDA runtime")
        name = ctypes.CDLL(str(found[0])).cudaGetErrorString
        name.restype = ctypes.c_char_p
        return name(error).decode()

    return provoke


def gradcheck_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.warns(UserWarning, match="not a double precision"):
        return message_of(lambda: torch.autograd.gradcheck(extension_cpp.mish, torch.ones(3, requires_grad=True)))


# To provoke the messages of other programs takes long, and they say nothing of this package.
OF_OTHERS = {"CUDA_HOME not set", "CUDA version mismatch", "Out of memory while compiling"}

# Headings and the functions that provoke their messages, in the order of the page. A heading with two messages is
# listed twice.
PROVOKED = [
    ("nvcc not found", nvcc_not_found),
    ("Unsupported gpu architecture", unsupported_gpu_architecture),
    ("Unsupported gpu architecture", unsupported_gpu_architecture),
    ("PyTorch's headers not found", headers_not_found),
    ("Library not built", library_not_built),
    ("Undefined symbol", undefined_symbol),
    ("Operator not found", operator_not_found),
    ("No kernel for a backend", no_kernel_for_a_backend),
    ("Tensors on different devices", different_devices),
    ("No CUDA-capable device", no_device),
    ("No CUDA-capable device", cuda_runtime(100)),
    ("Driver too old", driver_too_old),
    ("Driver too old", cuda_runtime(35)),
    ("No kernel image", cuda_runtime(209)),
    ("Invalid configuration argument", cuda_runtime(9)),
    ("gradcheck fails", gradcheck_fails),
]


def documented() -> Iterator[tuple[str, str]]:
    """The headings and messages of the page, in order, without those of other programs."""
    for part in re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        for message in re.findall(r"^```text\n(.*?)\n```$", part, re.MULTILINE | re.DOTALL):
            if (heading := part.split("\n")[0]) not in OF_OTHERS:
                yield heading, message


def test_every_message_is_provoked() -> None:
    assert [heading for heading, _ in documented()] == [heading for heading, _ in PROVOKED]


@pytest.mark.parametrize("number", range(len(PROVOKED)), ids=lambda number: f"{number} {PROVOKED[number][0]}")
def test_message(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message, provoke = list(documented())[number][1], PROVOKED[number][1]
    pattern = ".*".join(re.escape(part) for part in message.split("..."))
    said = provoke(tmp_path, monkeypatch)
    assert re.search(pattern, said, re.DOTALL), f"documented: {message}\nsaid: {said}"
