"""python -m extension_cpp info: prints what was built, what this machine has, and whether both fit.

The command must work even if the package cannot be loaded, because the library or torch is missing or too old. So this
module needs no library when it is imported, and imports torch only inside functions. `misfits` takes no torch objects.
"""

import argparse
import contextlib
import ctypes
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import LIBRARY
from .errors import require

OLDEST_GPU = (7, 5)
# The oldest NVIDIA driver that runs programs of a major CUDA version.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Build:
    """What the library was built for."""

    cuda: str | None  # for example "13.0"; None if built without CUDA
    architectures: tuple[str, ...]  # as in TORCH_CUDA_ARCH_LIST: "8.0", "9.0+PTX"
    cpu: tuple[str, ...]  # instruction sets: "baseline", "v3", "v4"
    debug: bool


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]

    def words(self) -> str:
        return f"compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True)
class Machine:
    """Describes what decides whether the GPU kernels can run on the machine."""

    torch: str | None  # version; None if torch is not installed
    torch_cuda: str | None  # the CUDA version that torch was built with
    driver: str | None  # NVIDIA's driver, "580.65.06"
    driver_cuda: str | None  # the newest CUDA version that the driver supports, "13.0"
    gpus: tuple[Gpu, ...] = ()
    torch_sees_gpus: bool = True


# ---- deciding ----


def parse_build(text: str) -> Build:
    """Parses the library's build text, such as `cuda=13.0 architectures=8.0,9.0+PTX cpu=baseline,v3,v4 debug=0`."""
    fields = dict(item.split("=", 1) for item in text.split())
    architectures = () if fields["architectures"] == "none" else tuple(fields["architectures"].split(","))
    cuda = None if fields["cuda"] == "none" else fields["cuda"]
    return Build(cuda, architectures, tuple(fields["cpu"].split(",")), fields["debug"] == "1")


def version(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (580, 65, 6) for "580.65.06", (2, 11, 0) for "2.11.0+cu130"."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def serves(architecture: str, capability: tuple[int, int], driver_compiles: bool = True) -> bool:
    """Returns whether code built for an architecture, such as "9.0+PTX", runs on a GPU of a compute capability.

    Machine code runs on GPUs with the same major number and the same or a higher minor number. With the suffix a it
    runs only on GPUs of exactly this capability. The driver compiles PTX for GPUs of the same or a higher capability.
    """
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", architecture)
    if match is None:
        return False
    built = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return built == capability
    if built[0] == capability[0] and built <= capability:
        return True
    return bool(match[4]) and not match[3] and driver_compiles and built <= capability


def misfits(build: Build, machine: Machine) -> list[str]:
    """Returns the reasons why this build does not run on the machine's GPUs, and what to do, one sentence each.

    A machine without a GPU fits every build, because the CPU operators need nothing but the library.
    """
    if not machine.gpus:
        return []
    gpus = sorted(set(machine.gpus))
    supported = [gpu for gpu in gpus if gpu.capability >= OLDEST_GPU]
    found = [
        f"The GPU {gpu.name} ({gpu.words()}) is older than 7.5, the oldest that CUDA 13 and this package build for: "
        "use the CPU operators."
        for gpu in gpus
        if gpu not in supported
    ]
    named = ";".join(f"{major}.{minor}" for major, minor in sorted({gpu.capability for gpu in supported}))
    rebuild = f'TORCH_CUDA_ARCH_LIST="{named}" make build'
    if build.cuda is None:
        if supported:
            found.append(
                f"This build has no CUDA kernels, so the GPU ({', '.join(sorted({gpu.name for gpu in gpus}))}) is not "
                f"used: install the CUDA toolkit (nvcc), and in a checkout run: USE_CUDA=1 {rebuild}"
            )
        return found
    oldest = OLDEST_DRIVER.get(version(build.cuda)[0], 0)
    if machine.driver is not None and version(machine.driver) < (oldest,):
        found.append(
            f"The NVIDIA driver is {machine.driver}, and this build's CUDA {build.cuda} needs {oldest} or newer: "
            "update the driver (https://www.nvidia.com/drivers); until then the CPU operators work."
        )
    elif machine.torch is not None and machine.torch_cuda is None:  # without torch the package says so itself
        found.append(
            f"torch {machine.torch} was built without CUDA, so no tensor can be on the GPU: install a torch with CUDA "
            "(https://pytorch.org/get-started/locally)."
        )
    elif machine.torch is not None and not machine.torch_sees_gpus:
        found.append(
            "nvidia-smi lists a GPU that torch does not see: look at CUDA_VISIBLE_DEVICES, and whether torch's CUDA "
            f"{machine.torch_cuda} is newer than the driver ({machine.driver or 'unknown'})."
        )
    # A driver compiles PTX only of CUDA versions that it supports. Machine code needs only the same major version.
    knows_ptx = machine.driver_cuda is None or version(machine.driver_cuda) >= version(build.cuda)
    for gpu in supported:
        if any(serves(each, gpu.capability, knows_ptx) for each in build.architectures):
            continue
        why = "which does not cover"
        if any(serves(each, gpu.capability) for each in build.architectures):
            why = f"whose PTX a driver for CUDA {machine.driver_cuda} cannot compile for"
        found.append(
            f"This library was built for {', '.join(build.architectures)}, {why} {gpu.name} ({gpu.words()}): in a "
            f"checkout run: {rebuild}"
        )
    return found


def cuda_problem(build: Build, machine: Machine) -> str | None:
    """Returns why the operators cannot run on a GPU here, in one sentence, or None if they can."""
    if machine.gpus:
        return next(iter(misfits(build, machine)), None)
    if build.cuda is None:
        return "This build has no CUDA kernels, and this machine has no NVIDIA GPU."
    return "This machine has no NVIDIA GPU, or no driver for it."


# ---- finding out ----


def ask_library(question: str, *arguments: Any) -> str:
    """Calls the library's C function extension_cpp_<question>, which returns a string."""
    function = getattr(ctypes.CDLL(str(LIBRARY)), f"extension_cpp_{question}")
    function.restype = ctypes.c_char_p
    return function(*arguments).decode()


def read_build() -> Build:
    """Returns what the library was built for, as the loaded library says it."""
    return parse_build(ask_library("build_info"))


def search_build() -> Build | None:
    """Returns what a library that cannot be loaded was built for, or None. The text is searched in the file's bytes."""
    try:
        match = re.search(rb"cuda=\S+ architectures=\S+ cpu=\S+ debug=[01]", LIBRARY.read_bytes())
    except OSError:
        return None
    return parse_build(match[0].decode()) if match else None


def read_machine() -> Machine:
    driver, gpus = _nvidia_smi()
    torch_version = torch_cuda = None
    sees = False
    with contextlib.suppress(ImportError):
        import torch

        torch_version, torch_cuda = torch.__version__, torch.version.cuda
        sees = torch.cuda.is_available()
        if sees:
            indices = range(torch.cuda.device_count())
            gpus = tuple(Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices)
    return Machine(torch_version, torch_cuda, driver, _driver_cuda(), gpus, sees)


def _nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """Returns the driver's version and all GPUs, including those that are hidden from torch or too old for it."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    rows = re.findall(r"^([\d.]+), (\d+)\.(\d+), (.+)$", text, re.MULTILINE)
    gpus = tuple(Gpu(name.strip(), (int(major), int(minor))) for _, major, minor, name in rows)
    if rows:
        return rows[0][0], gpus
    # A container may have the driver without nvidia-smi.
    match = _search(r"Module +(\d[\d.]+)|x86_64 +(\d[\d.]+)", "/proc/driver/nvidia/version")
    return (match[1] or match[2] if match else None), ()


def _driver_cuda() -> str | None:
    try:
        value = ctypes.c_int()
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(value))
    except (OSError, AttributeError):
        return None
    return None if failed or not value.value else f"{value.value // 1000}.{value.value % 1000 // 10}"


def cpu_name() -> str:
    match = _search(r"^model name\s*: (.+)$", "/proc/cpuinfo")
    return match[1] if match else platform.machine()


def _search(pattern: str, path: str) -> re.Match[str] | None:
    try:
        return re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None


def schemas() -> list[str]:
    """Returns the schemas of all registered operators, except for overloads without an Autograd kernel. Defaults are
    written as Python does, because PyTorch prints 1e-05 with 17 digits."""
    import torch

    from .._namespace import NAMESPACE
    from ..registration.calls import without_suffix

    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")}
    found = [str(torch._C._get_schema(*name.partition(".")[::2])) for name in names if name == without_suffix(name)]
    return sorted(re.sub(r"(?<==)\d+\.\d*(e[-+]\d+)?", lambda number: repr(float(number[0])), each) for each in found)


# ---- plans of the norms' GPU kernels (csrc/rows/plan.h) ----

# What each norm fuses, on which its plan depends (rows/plan.h): 0 is nothing, 1 a residual addition, 2 dropout.
NORMS = {"layer_norm": 0, "rms_norm": 0, "add_layer_norm": 1, "add_rms_norm": 1, "layer_norm_dropout": 2}
DTYPES = ("float64", "float32", "bfloat16", "float16")  # numbered as in csrc/common/dtype.h


def norm_plan(op: str, dtype: str, rows: int, cols: int, backward: bool) -> dict[str, str]:
    """Returns the plan with which an H100 would run a norm of contiguous tensors, or its backward for all gradients."""
    shape = ctypes.c_int64(rows), ctypes.c_int64(cols)
    text = ask_library("norm_plan", NORMS[op], DTYPES.index(dtype), backward, *shape)
    return dict(word.split("=", 1) for word in text.split())


def print_plan(options: argparse.Namespace) -> None:
    """Prints the plan of a norm's kernel on an H100, with one number per line."""
    op, dtype, shape = options.plan
    require(op in NORMS, f"expected OP to be one of {', '.join(NORMS)}, but got '{op}'")
    for name in (dtype, options.weights or dtype):
        require(name in DTYPES, f"expected DTYPE to be one of {', '.join(DTYPES)}, but got '{name}'")
    require(bool(re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)), f"expected ROWSxCOLS such as 4096x5120, but got '{shape}'")
    (rows, cols), step = map(int, shape.split("x")), "backward" if options.backward else "forward"
    print(f"{op}, {step}, {rows} x {cols} in {dtype}, weights in {options.weights or dtype}, on an H100")
    for name, value in norm_plan(op, dtype, rows, cols, options.backward).items():
        print(f"  {name.replace('_', ' '):18} {value}")
    if options.weights:
        print("The weights' type does not change the plan.")


# ---- the command ----


def _machine_lines(machine: Machine, level: str | None) -> list[str]:
    asked = os.environ.get("EXTENSION_CPP_CPU_LEVEL")
    lowered = f", EXTENSION_CPP_CPU_LEVEL={asked} is set" if asked else ""
    known = f" (knows CUDA up to {machine.driver_cuda})" if machine.driver_cuda else ""
    gpus = [f"{gpu.name}, {gpu.words()}" for gpu in machine.gpus] or ["none"]
    return [
        f"CPU            {cpu_name()}, {os.cpu_count()} logical cores",
        f"instructions   {f'{level} runs{lowered}' if level else 'unknown: the library is not loaded'}",
        f"C library      {' '.join(platform.libc_ver()).strip() or 'not glibc'}",
        f"NVIDIA driver  {f'{machine.driver}{known}' if machine.driver else 'none'}",
        *(f"GPU {index}          {gpu}" for index, gpu in enumerate(gpus)),
    ]


def run(options: argparse.Namespace) -> int:
    """Prints whether the build fits the machine, then the facts about both. Returns 1 if the package cannot be used.
    With --plan, prints the plan instead."""
    from .. import __version__, load_error  # this module may be imported before the package has completed them

    require(options.plan or not (options.backward or options.weights), "--backward and --weights go with --plan")
    if options.plan and load_error is None:
        print_plan(options)
        return 0
    build, machine = search_build() if load_error else read_build(), read_machine()
    level = None if load_error else ask_library("cpu_level")
    built = ["               there is no such file, or it does not say what it is"]
    if build is not None:
        cuda = f"{build.cuda}, for {', '.join(build.architectures)}" if build.cuda else "none: CPU only"
        built = [
            f"CUDA           {cuda}",
            f"CPU            {', '.join(build.cpu)} (each file once per instruction set, picked when loaded)",
            f"kind           {'debug (-O0: slow)' if build.debug else 'release'}",
        ]
    torch_cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "no CUDA"
    problems = [*([str(load_error)] if load_error else []), *(misfits(build, machine) if build else [])]
    sections = {
        "Do they fit?": problems or ["Yes" + ("." if machine.gpus else "; without a GPU, the CPU operators run.")],
        "Versions": [
            f"extension_cpp  {__version__}",
            f"Python         {platform.python_version()}",
            f"torch          {f'{machine.torch} ({torch_cuda})' if machine.torch else 'not installed'}",
        ],
        "Built": [f"library        {LIBRARY}", *built],
        "This machine": _machine_lines(machine, level),
    }
    if options.schemas:
        sections["Operators"] = ["none: the library is not loaded"] if load_error else schemas()
    for title, lines in sections.items():
        print(title, *(f"  {line}" for line in lines), "", sep="\n")
    return 1 if load_error else 0
