"""Reports in one sentence what this machine or environment lacks, before make leaves anything half done.

    python check_environment.py machine       what a new .venv and the build need: Python, venv, compilers; whether the
                                              .venv that is there is this user's and this folder's
    python check_environment.py PACKAGE...    what this environment lacks of torch >= 2.10 and the packages

`make` runs this script. It uses no new syntax, so that old versions of Python can report that they are old.
"""

import glob
import os
import subprocess
import sys
import tempfile

PYTHON_MINIMUM = (3, 10)
# A small program that each compiler must compile. Many systems have headers in a separate package, so that a compiler
# that answers --version may still compile nothing.
PROBES = {
    "CC": ("cc", "gcc", "c", "-std=c17", "#include <math.h>\n#include <stdint.h>\nint64_t f(void) { return 1; }\n"),
    "CXX": ("c++", "g++", "c++", "-std=c++17", "#include <optional>\nstd::optional<int> f() { return 1; }\n"),
}


def fail(sentence):
    sys.exit("error: " + sentence)


def check_python(version=sys.version_info):
    if tuple(version[:2]) < PYTHON_MINIMUM:
        fail(
            f"Python {PYTHON_MINIMUM[0]}.{PYTHON_MINIMUM[1]} or newer is needed, and {sys.executable} is "
            f"{version[0]}.{version[1]}; put a newer python3 first on PATH, or name one that has torch with PYTHON=."
        )


def check_venv():
    import importlib.util

    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"{sys.executable} cannot make a virtual environment: it lacks {' and '.join(missing)}; install its venv "
            f"package (Debian: apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv)."
        )


def check_own_venv():
    """Fails if .venv is another user's or was made in another folder, so that make must neither use nor empty it. A
    .venv whose python is missing counts as absent."""
    python = os.path.abspath(os.path.join(".venv", "bin", "python"))
    try:
        os.stat(python)
        usable = os.access(python, os.X_OK)
    except FileNotFoundError:
        return
    except PermissionError:
        usable = False
    if not usable:
        fail(f"this user may not run {python}; name an environment of yours with PYTHON=.")
    for path in glob.glob(".venv/lib/python*/site-packages/extension_cpp.pth"):
        with open(path) as file:
            place = file.read().strip()
        if place != os.getcwd():
            fail(
                f".venv was made in {place}, where its programs look for Python and this package; delete .venv here, "
                "and make sets up a new one, or name an environment with PYTHON=."
            )


def check_compilers():
    import build_library

    for variable, (default, package, language, standard, source) in PROBES.items():
        command = build_library.compiler(variable, default, package)
        with tempfile.TemporaryDirectory() as folder:
            output = os.path.join(folder, "probe.so")
            probe = [*command, "-x", language, standard, "-shared", "-fPIC", "-", "-o", output]
            tried = subprocess.run(probe, input=source, stderr=subprocess.PIPE, text=True)
        if tried.returncode != 0:
            reason = next((line for line in tried.stderr.splitlines() if "error" in line), f"exit {tried.returncode}")
            fail(
                f"{variable} is '{' '.join(command)}', which does not compile and link a small {standard[5:]} library "
                f"({reason.strip()}); install its headers (Debian: apt install {package} libc6-dev) or set {variable}."
            )
    nvcc = build_library.find_nvcc()
    if nvcc:
        build_library.architectures(nvcc)


def check_packages(packages):
    import importlib.metadata

    import build_library

    missing = [name for name in ["torch", *packages] if not any(importlib.metadata.distributions(name=name))]
    if missing:
        named = ["torch>=2.10" if name == "torch" else name for name in missing]
        fail(
            f"{sys.executable} lacks {', '.join(named)}; install with '{sys.executable} -m pip install "
            f"{' '.join(missing)}', or leave PYTHON out and make sets up .venv."
        )
    build_library.torch_folder()


if __name__ == "__main__":
    check_python()
    if sys.argv[1:] == ["machine"]:
        check_venv()
        check_own_venv()
        check_compilers()
    else:
        check_packages(sys.argv[1:])
