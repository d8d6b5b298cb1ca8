"""Builds the package for Hugging Face's `kernels`, as build/<variant>/ from the same sources (docs/hub.md).

    python -m scripts.hub       the variant for CPUs and, if nvcc is found, the one for CUDA

USE_CUDA=0 omits the variant for CUDA. The variables of build_library.py apply. A variant is a copy of the package whose
operators have a namespace of their own, so that it can be loaded beside the installed package.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import build_library

ROOT = build_library.ROOT
PACKAGE = ROOT / "extension_cpp"
NAME, VERSION = "extension-cpp", 1  # the Hub repository's; within a version, layers keep their names and results
# A variant has no command line. A variant's modules import only these files of extension_cpp/command/.
OF_COMMAND = ("__init__.py", "errors.py", "info.py")
NEWEST_GLIBC = "manylinux_2_28"  # the newest glibc that `kernels` allows


def python_files() -> list[Path]:
    found = (path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")
    return sorted(path for path in found if path.parent.name != "command" or path.name in OF_COMMAND)


def namespace_for(backend: str) -> str:
    """Returns a namespace with a digest of the sources, because two versions may be loaded in one process."""
    digest = hashlib.sha256()
    sources = [path for path in build_library.CSRC.rglob("*") if path.is_file()]
    for path in (*python_files(), *sorted(sources), ROOT / "build_library.py"):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return f"_extension_cpp_{backend}_{digest.hexdigest()[:10]}"


def lay_out(build: Path, namespace: str | None = None) -> Path:
    """Builds the variant that the environment asks for, and returns its folder in `build`."""
    nvcc = build_library.find_nvcc()
    # The kind of build, in the words of metadata.json.
    backend = {"type": "cuda", "archs": build_library.architectures(nvcc)} if nvcc else {"type": "cpu"}
    device = "cu" + build_library.cuda_version(nvcc).replace(".", "") if nvcc else "cpu"
    abi = "".join(map(str, build_library.TORCH_MINIMUM))
    namespace = namespace or namespace_for("cuda" if nvcc else "cpu")
    folder = build / f"torch-stable-abi{abi}-{device}-{build_library.machine()}-linux"
    shutil.rmtree(folder, ignore_errors=True)
    build_library.build(folder / build_library.LIBRARY, namespace)
    for path in python_files():
        copy = folder / path.relative_to(PACKAGE)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    constant = folder / "_namespace.py"  # which must be that of the library, or the operators are not found
    constant.write_text(constant.read_text().replace(f'"{build_library.NAMESPACE}"', f'"{namespace}"'))
    metadata = {"id": namespace, "name": NAME, "version": VERSION, "license": "BSD-3-Clause"}
    metadata |= {"python-depends": [], "backend": backend}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def faults(library: Path) -> list[str]:
    """Returns the errors that `kernel-builder check-abi` would report: symbols of newer systems, or of Python."""
    from kernel_abi_check import ObjectFile

    file = ObjectFile(str(library))
    return [str(each) for each in (*file.check_manylinux(NEWEST_GLIBC), *file.check_python_abi("3.9"))]


def main() -> None:
    for use_cuda in ("0", "1") if build_library.find_nvcc() else ("0",):
        os.environ["USE_CUDA"] = use_cuda
        folder = lay_out(ROOT / "build")
        size = subprocess.run(["du", "-sh", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0]
        print(f"{folder.relative_to(ROOT)}: {size}")
        for fault in faults(folder / build_library.LIBRARY):
            print(f"  not for publishing, which needs {NEWEST_GLIBC} (GLIBC=2.28 make hub): {fault}")


if __name__ == "__main__":
    main()
