"""Makes the source distribution beside the wheel in dist/, checks both in clean environments, and writes SHA256SUMS.

    python -m scripts.release [--python PATH]...

The wheel is installed with every Python from 3.10 up that PATH and pyenv have. The oldest Python gets the oldest
supported torch, and the others get the newest, as in scripts/matrix.py, which runs all tests there. pip builds the
source distribution in isolation, for the CPU, with the newest Python. An environment takes 5 GB while it is checked.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time

from scripts import matrix

DIST = matrix.ROOT / "dist"
BUILD_SDIST = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
# Checks forward, backward and a graph against PyTorch.
CHECK = """
import platform, torch, extension_cpp
x = torch.randn(64, 96, requires_grad=True)
w = torch.randn(96, requires_grad=True)
for ours in (extension_cpp.rms_norm, torch.compile(extension_cpp.rms_norm, backend="aot_eager", fullgraph=True)):
    got = torch.autograd.grad(ours(x, (96,), w, 1e-6).square().sum(), (x, w))
    wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x, (96,), w, 1e-6).square().sum(), (x, w))
    torch.testing.assert_close(got, wanted)
print("Python", platform.python_version(), "torch", torch.__version__, "extension_cpp", extension_cpp.__version__)
"""


def check(interpreter: str, *packages: str, **variables: str) -> str:
    """Installs the packages in a new environment and checks them there. Returns a line about the result."""
    with tempfile.TemporaryDirectory() as name:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GLIBC"))}
        environment = kept | variables
        python = f"{name}/venv/bin/python"
        subprocess.run([interpreter, "-m", "venv", f"{name}/venv"], check=True, env=environment)
        start = time.monotonic()
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True, cwd=name, env=environment)
        seconds = time.monotonic() - start
        command = [python, "-W", "ignore", "-c", CHECK]
        done = subprocess.run(command, check=True, cwd=name, env=environment, stdout=subprocess.PIPE, text=True)
        return f"{done.stdout.strip()}: right; installed in {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use; may be repeated")
    found = matrix.interpreters(parser.parse_args().python)
    (wheel,) = DIST.glob("*.whl")
    subprocess.run([sys.executable, "-c", BUILD_SDIST], check=True, cwd=matrix.ROOT, stdout=subprocess.DEVNULL)
    (sdist,) = DIST.glob("*.tar.gz")
    for version, torch in matrix.plan(list(found)):
        print(f"{wheel.name}: {check(found[version], f'torch=={torch}.*', str(wheel))}", flush=True)
    print(f"{sdist.name}: {check(found[max(found)], str(sdist), USE_CUDA='0')}, from source for the CPU", flush=True)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted((wheel, sdist))]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
