"""The messages in docs/troubleshooting.md are real: the tests provoke each one that this machine can produce."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import build_library
import extension_cpp
from extension_cpp.command import info
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
    for variable in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda command: None)
    return message_of(build_library.find_nvcc)


def unsupported_gpu_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    return message_of(lambda: build_library.architectures(["sh", "-c", "echo compute_75 compute_90"]))


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
    return message_of(lambda: torch.ops.extension_cpp.mish(torch.ones(3).to_sparse()))


def different_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU to provoke it on")
    return message_of(lambda: extension_cpp.scale_bias_relu(torch.ones(2, 3, device="cuda"), torch.ones(3)))


def driver_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    build = info.Build("13.0", ("9.0",), ("baseline",), False)
    machine = info.Machine("2.11.0", "13.0", "535.54.03", "12.2", (info.Gpu("A GPU", (9, 0)),))
    return info.misfits(build, machine)[0]


# Maps headings to the functions that provoke one of their messages.
PROVOKED = {
    "nvcc not found": nvcc_not_found,
    "Unsupported gpu architecture": unsupported_gpu_architecture,
    "PyTorch's headers not found": headers_not_found,
    "Library not built": library_not_built,
    "Undefined symbol": undefined_symbol,
    "Operator not found": operator_not_found,
    "No kernel for a backend": no_kernel_for_a_backend,
    "Tensors on different devices": different_devices,
    "Driver too old": driver_too_old,
}
# Messages of PyTorch, CUDA and the system, which do not name this package.
OF_OTHERS = {"CUDA_HOME not set", "CUDA version mismatch", "Out of memory while compiling", "No CUDA-capable device"}
OF_OTHERS |= {"No kernel image", "Invalid configuration argument", "gradcheck fails"}


def documented() -> dict[str, list[str]]:
    """Returns the headings of the document, each with the error messages below it."""
    parts = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {part.split("\n")[0]: re.findall(r"^```text\n(.*?)\n```$", part, re.MULTILINE | re.DOTALL) for part in parts}


def test_every_message_is_provoked() -> None:
    assert {heading for heading, messages in documented().items() if messages} == PROVOKED.keys() | OF_OTHERS


@pytest.mark.parametrize("heading", PROVOKED)
def test_message(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages, said = documented()[heading], PROVOKED[heading](tmp_path, monkeypatch)
    patterns = [".*".join(re.escape(part) for part in message.split("...")) for message in messages]
    assert any(re.search(pattern, said, re.DOTALL) for pattern in patterns), f"documented: {messages}\nsaid: {said}"
