"""Defines the build commands that differ from setuptools' own. The package's metadata is in pyproject.toml."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip does not put this folder on the path
import build_library

# All files in a wheel get the date that hatch uses, unless the user sets one, so that two builds give the same bytes.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1580601600")


class BuildLibrary(build_ext):
    """Builds a plain shared library, without a PyInit function and without Python's version in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], build_library.LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if importlib.util.find_spec("torch") is None:  # as in pip's isolation
                fetch_torch(folder)
            build_library.build(Path(self.get_ext_fullpath(ext.name)))


class StableWheel(bdist_wheel):
    """Makes one wheel for every Python 3, because the library uses neither Python's nor PyTorch's C++ ABI."""

    def write_wheelfile(self, *args: Any, **options: Any) -> None:
        super().write_wheelfile(*args, **options)
        for path in Path(self.bdist_dir).rglob("*"):  # the modes of a checkout's files depend on the user's umask
            if path.is_file():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir) / "extension_cpp" / build_library.LIBRARY
        if not library.exists():  # an editable install gets its tag before the build; its wheel stays on this machine
            return "py3", "none", f"linux_{build_library.machine()}"
        asked = tuple(int(part) for part in os.environ.get("GLIBC", "0.0").split("."))
        major, minor = max(build_library.glibc_required(library), asked)
        return "py3", "none", f"manylinux_{major}_{minor}_{build_library.machine()}"


class TaggedVersion(egg_info):
    """Sets the local version of a wheel, +cpu or such as +cu130, by which builds for the CPU and for CUDA differ. This
    happens after setup.cfg is read, because in a source distribution setup.cfg has an empty tag."""

    def finalize_options(self) -> None:
        if "sdist" in sys.argv:
            self.tag_build = ""
        else:
            nvcc = build_library.find_nvcc()
            self.tag_build = "+cu" + build_library.cuda_version(nvcc).replace(".", "") if nvcc else "+cpu"
        super().finalize_options()


def fetch_torch(folder: str) -> None:
    """Installs torch into the folder without its dependencies. The build only reads its headers and links to it, and
    pip would spend more time on gigabytes of CUDA's libraries than the compilers on the CPU's code."""
    torch = f"torch>={'.'.join(map(str, build_library.TORCH_MINIMUM))}"
    print(f"There is no torch here: pip fetches {torch} for its headers (0.5 GB).", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-user", "--no-deps", "--no-compile"]
    if subprocess.run([*command, "--target", folder, torch]).returncode != 0:
        raise build_library.BuildError(
            f"{sys.executable} has no torch, and pip could not fetch it; install {torch} there and build with "
            "--no-build-isolation."
        )
    sys.path.insert(0, folder)


def readme() -> str:
    """Returns README.md for a package index, which has no other file. Links into the repository become plain text."""
    text = (Path(__file__).resolve().parent / "README.md").read_text()
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)[^)]*\)", r"*Picture: \1.*", text)
    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("extension_cpp.libextension_cpp", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": StableWheel, "egg_info": TaggedVersion},
)
