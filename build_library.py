"""Compiles extension_cpp/csrc into one shared library with ninja.

C sources are compiled by the C compiler once per instruction set, `.cu` files by nvcc without any torch header, and
`.cpp` shims by the C++ compiler against PyTorch's stable ABI. Ninja tracks the headers of all of them.

Environment variables:
  USE_CUDA              0: CPU only; 1: CUDA is required; unset: CUDA if nvcc is found
  TORCH_CUDA_ARCH_LIST  "7.5;9.0+PTX", "Turing;Hopper", or "native": the GPU of this machine, and without one CPU only
                        (with USE_CUDA=1: 9.0+PTX);
                        unset: every architecture from 7.5 up that nvcc knows, PTX for the newest
  DEBUG                 1: -O0 -g, and -lineinfo for CUDA; C for the baseline instruction set alone
  MAX_JOBS              compilations at a time
  CC, CXX, NVCC         the compilers; gcc for another processor, such as aarch64-linux-gnu-gcc, makes its library
  CUDA_HOME             the CUDA toolkit
  GLIBC                 2.28: links for systems with this glibc or a newer one, and any C++ library (needs ziglang)
"""

import functools
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036  # any Python can be asked to run this file
    sys.exit(f"error: Python 3.10 or newer is needed, and {sys.executable} is {sys.version.split()[0]}.")

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "extension_cpp" / "csrc"
LIBRARY = "libextension_cpp.so"
NAMESPACE = "extension_cpp"  # torch.ops.NAMESPACE.*; the package has the name in _namespace.py
TORCH_MINIMUM = (2, 10)  # the oldest torch that the library supports; code that uses newer functions does not compile

# Level names are those of the x86-64 psABI; common/cpu/level.h says how a level is picked at run time.
X86_LEVELS = {
    # This level is for processors older than 2013, where a shorter build matters more than speed (common/cpu/block.h).
    "baseline": ["-DCPU_SMALL"],
    "v3": ["-mavx2", "-mfma", "-mf16c"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
# Contraction is off so that every instruction set with FMA gives the same bits. Without
# -fno-tree-loop-distribute-patterns gcc turns lane loops into memcpy and puts every lane array onto the stack. Without
# -fno-tree-pre it turns selections between a constant and a result into branches, which do not vectorise.
C_FLAGS = ["-std=c17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
C_FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
GCC_FLAGS = ["-fno-tree-loop-distribute-patterns", "-fno-tree-pre"]
# gcc's options for kernels beyond -O2. Its -O3 also copies loops and functions, which takes long to compile.
GCC_OPTIMISE = ["-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops"]
# The level for shims, which only check arguments, and for kernels with CPU_SMALL. It compiles 1.5 times as fast as -O2.
LESS_OPTIMISED = ["-O1"]
CXX_FLAGS = ["-std=c++17", "-Wall", "-Wextra"]
# These macros remove parts of the headers that no .cu uses and that the compilers would parse three times for each .cu.
# They are C++17's special functions (the macro is the guard of their header in libstdc++), and the conversions of half
# types, which to_acc and from_acc replace and PyTorch's own flags for extensions remove, too. The headers then take
# half the time. nvcc's -Ofast-compile is not used: its mildest level saves a seventh of the compile time, but makes
# kernels up to 2.5 times slower.
NVCC_FLAGS = ["-std=c++17", "-D_GLIBCXX_BITS_SPECFUN_H"]
NVCC_FLAGS += ["-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__"]
# Several sources are compiled as one file, up to this many bytes. Compiled alone, a .cu takes 2 s more for CUDA's
# headers, and a shim half a second more for PyTorch's templates. A larger folder's files are compiled alone.
TOGETHER = 48_000
COMMON_FLAGS = ["-fPIC", "-fvisibility=hidden"]
# Debian's and Fedora's flags for shared libraries: a guard behind the arrays of a function, no symbol that is resolved
# late, no writable memory without need (full RELRO), and a stack that cannot be executed. The guard protects the shims,
# which get the users' arguments. The C kernels have no guard, which would add code to each of them: their arrays are
# lanes of constant size, and the sanitizers check them.
GUARD_FLAGS = ["-fstack-protector-strong"]
HARDENED_LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
# The header with which every shim begins, and that with which every kernel begins. Each of the two is compiled once,
# before the sources: PyTorch's headers take most of a shim's compile time, and the headers of the CPU's instructions
# take half a second of each kernel's.
SHIMS_HEADER = '#include "common/shim/op.h"\n'
KERNELS_HEADER = '#include "common/cpu/block.h"\n'
# The library exports only the functions that Python calls. -fvisibility alone would leave instantiated templates of the
# C++ standard library visible.
EXPORTS = "{ global: extension_cpp_*; local: *; };\n"
# For each prefix of symbol versions of gcc's C++ library: the newest version in manylinux_2_N, and N, as in
# auditwheel's policy.
CXX_OF_MANYLINUX = {
    "GLIBCXX_3.4.": {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39},
    "CXXABI_1.3.": {7: 17, 10: 24, 11: 27, 12: 31, 13: 34, 15: 39},
}
# gcc's C++ library reads this flag, which glibc has from 2.32 on. 0 means that threads may run, which is always safe.
OLD_GLIBC = "char __libc_single_threaded;\n"

ARCHITECTURE_NAMES = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}


class BuildError(SystemExit):
    """Ends the build with one sentence instead of a traceback."""

    def __init__(self, message: str):
        super().__init__(f"error: {message}")


def switch(variable: str) -> str:
    """Returns an environment variable that is 0 or 1, or "" if it is not set."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{variable} must be 0 or 1, got '{value}'.")
    return value


def command_in(variable: str) -> list[str]:
    """Returns the words of the command in an environment variable, or no words if it is not set."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{variable} is set to '{text}', which is not a command: {error}.") from None


def compiler(variable: str, default: str, package: str) -> list[str]:
    """Returns the command in an environment variable, or the default. Raises BuildError if it is missing."""
    command = command_in(variable) or [default]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"no {variable} compiler: '{command[0]}' was not found; install one (Debian: apt install {package}) "
            f"or set {variable} to the one you have."
        )
    return command


def c_flags(cc: list[str]) -> tuple[list[str], list[str]]:
    """Returns the flags of all C files, and the optimisation of kernels beyond -O2, for levels without CPU_SMALL."""
    macros = subprocess.run([*cc, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True).stdout
    return (C_FLAGS, ["-O3"]) if "__clang__" in macros else (C_FLAGS + GCC_FLAGS, GCC_OPTIMISE)


def torch_folder() -> Path:
    """Returns the folder of torch, without the import of torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"{sys.executable} has no torch; install torch >= 2.10 there.")
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < TORCH_MINIMUM:
        raise BuildError(f"torch {version} is too old: extension_cpp needs torch >= 2.10.")
    return Path(spec.origin).parent


def find_nvcc() -> list[str] | None:
    """Returns nvcc's command, or None for a build without CUDA. A compiler that a variable names must exist."""
    use_cuda = switch("USE_CUDA")
    if use_cuda == "0":
        return None
    candidates, fault = [["nvcc"], ["/usr/local/cuda/bin/nvcc"]], ""
    if use_cuda == "1":
        fault = "USE_CUDA=1, but nvcc was not found; install the CUDA toolkit or set CUDA_HOME."
    if home := next((variable for variable in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(variable)), None):
        candidates = [[os.path.abspath(f"{os.environ[home]}/bin/nvcc")]]
        fault = (
            f"{home} is set to '{os.environ[home]}', which has no bin/nvcc; set it to a CUDA toolkit or unset it "
            "(USE_CUDA=0 builds for the CPU only)."
        )
    if asked := command_in("NVCC"):
        candidates, fault = [asked], f"NVCC is set to '{os.environ['NVCC']}', which was not found."
    found = next((candidate for candidate in candidates if shutil.which(candidate[0])), None)
    if found is None and fault:
        raise BuildError(fault)
    return None if asked_architectures() is None else found


def asked_architectures() -> str | None:
    """Returns the list in TORCH_CUDA_ARCH_LIST, or None if it is for the GPUs of this machine, which has none."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip("; ,")
    if asked != "native":
        return asked
    return native_architectures() or ("9.0+PTX" if os.environ.get("USE_CUDA") == "1" else None)


@functools.cache
def native_architectures() -> str:
    """Returns the compute capabilities of this machine's GPUs, such as "8.6;9.0"."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ";".join(sorted(set(re.findall(r"^\d+\.\d$", listed, re.MULTILINE))))


def architectures(nvcc: list[str]) -> list[str]:
    """Returns the architectures to build, such as ['8.0', '9.0+PTX']."""
    listed = subprocess.run([*nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = sorted({(int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", listed)})
    if not known:
        raise BuildError(
            f"'{shlex.join(nvcc)} --list-gpu-arch' names no architecture: set NVCC or CUDA_HOME to a CUDA toolkit that "
            "works, or USE_CUDA=0 to build for the CPU only."
        )
    asked = asked_architectures()
    if not asked:
        modern = [f"{major}.{minor}" for major, minor in known if (major, minor) >= (7, 5)]
        return [*modern[:-1], modern[-1] + "+PTX"]
    for name, numbers in ARCHITECTURE_NAMES.items():
        asked = re.sub(rf"\b{name}\b(\+PTX)?", numbers, asked, flags=re.IGNORECASE)
    wanted = [item for item in re.split(r"[;, ]+", asked) if item]
    for item in wanted:
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", item)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: '{item}' is neither a number such as 9.0 or 9.0+PTX nor one of "
                f"{', '.join(ARCHITECTURE_NAMES)}."
            )
        if (int(match[1]), int(match[2])) not in known:
            names = ", ".join(f"{major}.{minor}" for major, minor in known)
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: this nvcc does not know {item}; it knows {names}. "
                "(CUDA 13 dropped everything before 7.5, Volta included.)"
            )
    return wanted


def gencode(architecture: str) -> list[str]:
    number = architecture.removesuffix("+PTX").replace(".", "")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    if architecture.endswith("+PTX"):
        flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cuda_version(nvcc: list[str]) -> str:
    text = subprocess.run([*nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise BuildError(f"'{shlex.join(nvcc)} --version' does not name a CUDA release.")
    return match[1]


def quote(*flags: list[str]) -> str:
    """Quotes flags for a ninja file."""
    return shlex.join(itertools.chain(*flags)).replace("$", "$$")


def nvcc_command(nvcc: list[str], cxx: list[str], debug: bool, archs: list[str]) -> tuple[list[str], list[str]]:
    """Returns nvcc with its flags, and the link options for the libraries of its CUDA toolkit."""
    if is_cross():
        raise BuildError(f"CC makes code for {machine()}, and GPU code is for this machine's alone: set USE_CUDA=0.")
    # nvcc needs the compiler itself, not a compiler cache such as ccache that calls it.
    host = next(word for word in cxx if Path(word).name not in ("ccache", "sccache"))
    command = [*nvcc, *NVCC_FLAGS, "-ccbin", shutil.which(host) or host]
    command += ["-Xcompiler", ",".join(COMMON_FLAGS + GUARD_FLAGS)]
    # This level is for host code, which only launches kernels. Device code is always compiled with -O3.
    command += ["-O0", "-g", "-lineinfo"] if debug else ["-O1"]
    if tuple(int(part) for part in cuda_version(nvcc).split(".")) >= (12, 8):
        # Compresses the machine code as well as the PTX. `balance` takes a second and makes 8.5 MB of 51 MB; `size`
        # takes half a minute and makes 5.9 MB. Drivers from CUDA 12.4 on can read it.
        command += ["--compress-mode=balance", "-Xfatbin", "-compress-all"]
    for architecture in archs:
        command += gencode(architecture)
    toolkit = Path(shutil.which(nvcc[0]) or nvcc[0]).resolve().parent.parent
    folders = [toolkit / lib for lib in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib")]
    libraries = [f"-L{folder}" for folder in folders if folder.is_dir()]
    return command, [*libraries, "-lcudart_static", "-lrt", "-lpthread", "-ldl"]


def machine() -> str:
    """Returns the processor that the C compiler targets, such as x86_64 or aarch64, by the Linux kernel's name."""
    command = [*compiler("CC", "cc", "gcc"), "-dumpmachine"]
    answer = subprocess.run(command, capture_output=True, text=True)
    name, is_named, _ = answer.stdout.partition("-")
    if answer.returncode != 0 or not is_named:
        raise BuildError(f"'{shlex.join(command)}' does not name a processor: CC must be gcc or clang, or act alike.")
    return {"powerpc64le": "ppc64le"}.get(name, name)


def is_cross() -> bool:
    return machine() != platform.machine()


def library_linker(cxx: list[str], torch: Path) -> tuple[list[str], list[str]]:
    """Returns the command that links, and its options for a library without GPU code."""
    command, stdcxx = linker(cxx)
    options = [*stdcxx, "-shared", "-Wl,--version-script=exports.map", *HARDENED_LINK]
    if is_cross():
        options += ["-L."]  # this folder has empty libraries with the names of torch's
    else:  # -z defs makes undefined symbols errors of the link, not of the first import
        options += ["-Wl,-z,defs", f"-L{torch}/lib"]
    return command, [*options, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]


def linker(cxx: list[str]) -> tuple[list[str], list[str]]:
    """Returns the link command, and its options for the C++ library: -lstdc++, or gcc's static one if GLIBC is set."""
    glibc = os.environ.get("GLIBC", "")
    if not glibc:
        return cxx, ["-lstdc++"]
    if not re.fullmatch(r"2\.\d+", glibc):
        raise BuildError(f"GLIBC must be a version such as 2.28, got '{glibc}'.")
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError(f"GLIBC={glibc} needs zig, which links for older systems: pip install ziglang.")
    # Exceptions reach PyTorch only through the unwinder that it uses, libgcc_s. Without libgcc.a the linker takes zig's
    # compiler_rt, whose memcpy and memset would replace glibc's.
    names = ["libstdc++.a", "libgcc.a", "libgcc_s.so.1"]
    asked = [subprocess.run([*cxx, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    files = [answer.stdout.strip() for answer in asked]
    if missing := [name for name, file in zip(names, files, strict=True) if file in ("", name)]:
        raise BuildError(f"GLIBC={glibc} links gcc's static libraries, and '{shlex.join(cxx)}' has no {missing[0]}.")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-gnu.{glibc}"]
    # --gc-sections removes unused code, because parts of gcc's library need a newer glibc.
    return [*zig, "-Wl,--gc-sections"], files


def write_if_new(path: Path, text: str) -> None:
    """Writes a file only if its text changes, so that ninja does not compile anything again."""
    if not (path.exists() and path.read_text() == text):
        path.write_text(text)


def write_objects(ninja: Any, folder: Path, own: str, levels: dict[str, list[str]], info: str, cuda: bool) -> list[str]:
    """Writes to build.ninja how each source is compiled to an object file. Returns the names of the object files."""
    csrc = Path(os.path.relpath(CSRC, folder.resolve()))
    objects: list[str] = []

    def add(rule: str, source: Path, flags: list[str], prefix: str = "", header: str = "") -> None:
        """Adds a source of CSRC, or a file in the build folder that includes several sources."""
        name = source.relative_to(CSRC) if source.is_relative_to(CSRC) else source
        objects.append(f"{prefix}{name}.o")
        path = str(source if name == source else csrc / name)
        variables = {"flags": quote(flags, ["-include", header] if header else [])}
        ninja.build(objects[-1], rule, path, implicit=f"{header}.gch" if header else None, variables=variables)

    def together(suffix: str) -> list[Path]:
        """Returns the files to compile for all sources with this suffix. The sources of small folders are included
        together by files of about TOGETHER bytes."""
        alone, groups, space = sorted(CSRC.glob(f"*{suffix}")), [], 0
        for part in sorted(path for path in CSRC.iterdir() if path.is_dir()):
            sources, headers = sorted(part.rglob(f"*{suffix}")), part.rglob("*.cuh") if suffix == ".cu" else ()
            size = sum(source.stat().st_size for source in sources)
            if size + sum(header.stat().st_size for header in headers) > TOGETHER:
                alone += sources
            elif sources:
                if size > space:
                    groups.append("")
                    space = TOGETHER
                groups[-1] += "".join(f'#include "{source.relative_to(CSRC)}"\n' for source in sources)
                space -= size
        names = [Path(f"together_{i}{suffix}") for i in range(1, len(groups) + 1)]
        for name, text in zip(names, groups, strict=True):
            write_if_new(folder / name, text)
        return [*alone, *names]

    def precompile(rule: str, header: str, text: str, flags: list[str]) -> str:
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        write_if_new(folder / header, text)
        # -MD also lists headers of torch and of the system. Compilers use outdated precompiled headers without warning.
        ninja.build(f"{header}.gch", rule, header, variables={"listed": "-MD", "flags": quote(flags)})
        return header

    # The files that take longest come first, so that no core has to wait at the end.
    if cuda:
        for source in together(".cu"):
            add("nvcc", source, [])
    for source in sorted(CSRC.glob("common/cpu/*.c")):
        add("c", source, [], "baseline/")
    for level, flags in levels.items():
        flags = [*flags, f"-DCPU_LEVEL_{level.upper()}"]
        header = precompile("c", f"{level}/kernels.h", KERNELS_HEADER, [*flags, "-x", "c-header"])
        for source in sorted(CSRC.rglob("*_cpu.c")):
            add("c", source, flags, f"{level}/", header)
    header = precompile("cxx", f"{own}shims.h", SHIMS_HEADER, ["-x", "c++-header"])
    for source in together(".cpp"):
        add("cxx", source, [f'-DBUILD_INFO="{info}"'] if source.name == "library.cpp" else [], own, header)
    return objects


def write_ninja(folder: Path, namespace: str = NAMESPACE) -> str:
    """Writes build.ninja for the build that the environment asks for. Returns the subfolder with the files that depend
    on the namespace: build.ninja, shims and library."""
    from ninja.ninja_syntax import Writer

    torch = torch_folder()
    cc, cxx, nvcc = compiler("CC", "cc", "gcc"), compiler("CXX", "c++", "g++"), find_nvcc()
    debug = switch("DEBUG") == "1"
    optimise = ["-O0", "-g", "-DCPU_BASELINE_ONLY"] if debug else ["-O2"]
    optimise_shim = ["-O0", "-g"] if debug else LESS_OPTIMISED
    flags, best = c_flags(cc)
    levels = X86_LEVELS if machine() == "x86_64" and not debug else {"baseline": []}
    if not debug:
        levels = {name: [*(LESS_OPTIMISED if "-DCPU_SMALL" in own else best), *own] for name, own in levels.items()}
    archs = architectures(nvcc) if nvcc else []
    cuda = cuda_version(nvcc) if nvcc else "none"
    info = f"cuda={cuda} architectures={','.join(archs) or 'none'} cpu={','.join(levels)} debug={int(debug)}"
    # Paths are relative to the build folder, so that a checkout that is moved or copied keeps its object files.
    csrc = Path(os.path.relpath(CSRC, folder.resolve()))
    include = [f"-I{csrc}"]
    # Messages contain __FILE__, which must not depend on the folder of the build, so that two builds give the same
    # bytes. gcc names a header by the path behind symbolic links, so this path is mapped, too.
    here = [f"-fmacro-prefix-map={path}/=" for path in (csrc, torch / "include", (torch / "include").resolve())]
    target = "0x{:02x}{:02x}000000000000".format(*TORCH_MINIMUM)
    shim = [f"-isystem{torch}/include", f"-DTORCH_TARGET_VERSION={target}", f"-DTORCH_EXTENSION_NAME={namespace}"]
    for name, text in (("exports.map", EXPORTS), ("old_glibc.c", OLD_GLIBC), ("empty.c", "")):
        write_if_new(folder / name, text)
    link_command, link = library_linker(cxx, torch)
    if nvcc:
        shim += ["-DWITH_CUDA", "-DUSE_CUDA"]
        nvcc, toolkit = nvcc_command(nvcc, cxx, debug, archs)
        link += toolkit
    tail = " -MF $out.d $flags -c $in -o $out"
    commands = {
        "c": quote(cc, flags, COMMON_FLAGS, optimise, include) + " $listed" + tail,
        "cxx": quote(cxx, CXX_FLAGS, COMMON_FLAGS, GUARD_FLAGS, optimise_shim, include, here, shim) + " $listed" + tail,
        "nvcc": quote(nvcc or [], include) + " -MD",
    }
    if nvcc and int(cuda.split(".")[0]) >= 13:  # an older nvcc may not know -frandom-seed
        # nvcc makes up random names, and names a file in the object by its process. These options remove both.
        commands["nvcc"] += f" -frandom-seed=$out{tail} && objcopy --wildcard --strip-symbol='tmpxft_*' $out"
    else:
        commands["nvcc"] += tail
    own = "" if namespace == NAMESPACE else "other_namespace/"
    (folder / own).mkdir(exist_ok=True)
    with (folder / own / "build.ninja").open("w") as file:
        ninja = Writer(file, width=1000)  # type: ignore[arg-type]  # its stub asks for a str
        ninja.variable("listed", "-MMD")  # ninja tracks the headers of csrc
        for rule, command in commands.items():
            ninja.rule(rule, command, depfile="$out.d", deps="gcc", description=f"{rule} $out")
        ninja.rule("link", quote(link_command) + " $in " + quote(link, ["-lm"]) + " -o $out", description="link $out")

        objects = write_objects(ninja, folder, own, levels, info, nvcc is not None)
        if link_command != cxx:
            objects.append("old_glibc.c.o")
            ninja.build(["old_glibc.c.o"], "c", ["old_glibc.c"])
        names = ["libtorch.so", "libtorch_cpu.so"] if is_cross() else []
        ninja.rule("empty", quote(cxx, ["-shared", "-x", "c"]) + " $in -Wl,-soname,$out -o $out")
        for name in names:
            ninja.build([name], "empty", ["empty.c"])
        ninja.build([own + LIBRARY], "link", objects, implicit=["exports.map", *names])
        ninja.default([own + LIBRARY])
    return own


def steps_to_do(ninja: list[str]) -> int:
    """Returns how many files would be compiled or linked now."""
    planned = subprocess.run([*ninja, "-n"], capture_output=True, text=True)
    counted = re.search(r"^\[\d+/(\d+)\]", planned.stdout or "", re.MULTILINE)
    return int(counted[1]) if counted else 0


def build(destination: Path, namespace: str = NAMESPACE) -> None:
    """Builds the library and copies it to destination."""
    nvcc = find_nvcc()
    archs = "-".join(architectures(nvcc)).replace("+", "") if nvcc else "cpu"
    debug = "debug" if switch("DEBUG") == "1" else "release"
    other = f"-{machine()}" if is_cross() else ""
    folder = ROOT / "build" / f"{debug}-{archs}{other}"
    folder.mkdir(parents=True, exist_ok=True)
    own = write_ninja(folder, namespace)
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    command = [sys.executable, "-m", "ninja", "-C", str(folder), "-f", f"{own}build.ninja", *jobs]
    if steps := steps_to_do(command):
        what, times = "the CPU kernels", ""
        if nvcc:
            what += f" and GPU code for {archs.replace('-', ', ')}"
        elif asked_architectures() is None:
            what += " (this machine has no GPU; TORCH_CUDA_ARCH_LIST=9.0+PTX adds the code of one)"
        if steps > 20:
            times = " All of them take about a minute on 2 cores, and another for each GPU architecture."
        print(f"Compiling {what}: {steps} files.{times}", flush=True)
    else:
        command.append("--quiet")
    if subprocess.run(command).returncode != 0:
        raise BuildError("the compilation failed; the first message above says where.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    built = folder / own / LIBRARY
    if not (destination.exists() and destination.read_bytes() == built.read_bytes()):
        # The old file is replaced, never rewritten, so that a process that has it open keeps its contents.
        temporary = destination.with_suffix(".tmp")
        shutil.copyfile(built, temporary)
        temporary.replace(destination)


def glibc_required(library: Path) -> tuple[int, int]:
    """Returns (2, N) for the oldest manylinux_2_N whose glibc and C++ library have all symbols that `library` needs."""
    table = subprocess.run(["readelf", "-V", str(library)], capture_output=True, text=True, check=True).stdout
    found = [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", table)]
    newer = [int(part) for part in platform.libc_ver()[1].split(".")[:2]]  # for versions that are newer than the table
    for name, glibc_of in CXX_OF_MANYLINUX.items():
        for version in map(int, re.findall(rf"{re.escape(name)}(\d+)", table)):
            glibc = next((glibc for newest, glibc in glibc_of.items() if version <= newest), None)
            found.append((2, glibc) if glibc else (newer[0], newer[1]))
    return max(found)


if __name__ == "__main__":
    build(ROOT / "extension_cpp" / LIBRARY)
