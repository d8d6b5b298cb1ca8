"""Tests the C kernels without torch, by the program in tests/c. Its "plain" build runs every instruction set's kernels.

Its "sanitized" build runs the kernels of this machine's instruction set with sanitizers. With --slow, the kernels of
the other instruction sets, whose compilation takes minutes, and the code of the tests also run with sanitizers.

The program is linked like the library. The plain build uses the library's object files: kernels compiled once per
instruction set, and common/cpu/level.c, which picks one of these by EXTENSION_CPP_CPU_LEVEL. Only cpu_should_stream is
replaced, by a function that the tests control.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import build_library

SOURCES = Path(__file__).parent / "c"
LEVELS = build_library.X86_LEVELS if platform.machine() == "x86_64" else {"baseline": []}
BUILDS: dict[str, list[str]] = {
    "plain": [],  # no compiler flags in addition to those of the library
    # -Og keeps the loads and stores of the source, and compiles faster than -O1. Four sanitizers are disabled, which
    # would double the compile time. `address` also detects the errors of `null` and `object-size`. `alignment` and
    # `pointer-overflow` would report the unaligned vectors, which are intended. With CPU_SMALL, each kernel is compiled
    # once instead of once for each value of its constant arguments.
    "sanitized": [
        *["-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize=null,object-size,alignment,pointer-overflow"],
        *["-fno-sanitize-recover=all", "-DCPU_SMALL"],
    ],
}
# Tests that loop over the float32 values, by a step between their bit patterns.
SWEEPS = ["exp", "softmax_math", "mish", "stores"]
TESTS = [
    *SWEEPS,
    "mish_halves",
    "loads",
    "flat_sizes",
    "flat_ranges",
    "scale_bias_relu_sizes",
    "scale_bias_relu_ranges",
    "reduce_sum_sizes",
    "reduce_sum_ranges",
    "philox",
    "dropout_sizes",
    "dropout_ranges",
    "norm_sizes",
    "norm_hostile",
    "norm_ranges",
    "norm_fused",
    "softmax_sizes",
    "softmax_hostile",
    "softmax_ranges",
    "loss_sizes",
    "loss_hostile",
    "loss_ranges",
    "loss_reduce",
    "rotary",
    "bias_gelu",
    "scan_sizes",
    "scan_parts",
]
# The folder of object files, from which later runs take those whose sources have not changed.
COMPILED = build_library.ROOT / "build" / "tests-c"
# The tests in SWEEPS take every 599th float32 value, and every 4999th in the slower sanitized build, which looks for
# wrong memory accesses only. With a step above 1000, the other tests leave out large tensors.
STEPS = {"plain": 599, "sanitized": 4999}
SLOW_STEPS = {"plain": 199, "sanitized": 997}
# Makes the allocator keep freed memory, because the operating system would zero each returned page before its next use.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(2**26)}
SANITIZER = "quarantine_size_mb=16:allocator_release_to_os_interval_ms=-1"
KEEP_MEMORY |= {"ASAN_OPTIONS": ":".join(filter(None, (SANITIZER, os.environ.get("ASAN_OPTIONS"))))}


@functools.cache
def build_folder() -> Path | None:
    """Returns the folder in build/ that contains the same library as extension_cpp/, or None if none does."""
    library = build_library.CSRC.parent / build_library.LIBRARY
    built = library.read_bytes() if library.exists() else b""
    places = build_library.ROOT.glob(f"build/*/{build_library.LIBRARY}")
    return next((place.parent for place in places if place.read_bytes() == built), None)


def library_objects() -> Path | None:
    """Returns the folder of the library's objects, or None if it is a debug build or older than a source."""
    folder = build_folder()
    if folder is None or not folder.name.startswith("release-"):
        return None
    # Without keepdepfile, even a dry run deletes the .d files of sources that another process is compiling.
    ninja = [sys.executable, "-m", "ninja", "-C", str(folder), "-n", "-d", "keepdepfile"]
    return folder if "no work to do" in subprocess.run(ninja, capture_output=True, text=True).stdout else None


@functools.cache
def level_here() -> str:
    level = ctypes.CDLL(str(build_library.CSRC.parent / build_library.LIBRARY)).extension_cpp_cpu_level
    level.restype = ctypes.c_char_p
    return level().decode()


def compile_object(command: list[str], source: Path, name: str, seen: bytes) -> str:
    """Compiles a source, unless its object exists for the same command and `seen`, which contains all headers."""
    digest = hashlib.sha256(seen + repr(command).encode() + source.read_bytes()).hexdigest()[:16]
    compiled = COMPILED / f"{name}.{digest}.o"
    if not compiled.exists():
        COMPILED.mkdir(parents=True, exist_ok=True)
        # The object is written to another file and then renamed, because an interrupted compiler may leave half a file.
        unfinished = COMPILED / f"{name}.{os.getpid()}"
        result = subprocess.run([*command, "-c", source, "-o", unfinished], capture_output=True, text=True)
        if result.returncode != 0 or result.stderr:
            unfinished.unlink(missing_ok=True)
            raise AssertionError(f"{shlex.join(command)} {source}\n{result.stderr}")
        for outdated in COMPILED.glob(f"{name}.*.o"):
            outdated.unlink()
        unfinished.rename(compiled)
    return str(compiled)


@functools.cache
def called_ops() -> frozenset[str]:
    """Returns the ops whose headers the files in tests/c include. To save time, other ops' kernels are not compiled."""
    paths = (*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))
    return frozenset(
        name for path in paths for name in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
    )


def compile_program(build: str, folder: Path, levels: Collection[str], everything: bool = False) -> Path:
    """Builds the test program. The kernels of the instruction sets in `levels` are compiled with the flags of `build`,
    and other kernels with the library's flags. The code of the tests is compiled with the library's flags, or with
    those of `build` if `everything` is set."""
    compiler = build_library.compiler("CC", "cc", "gcc")
    include = [f"-I{build_library.CSRC}", f"-I{SOURCES}"]
    of_every_file, optimise = build_library.c_flags(compiler)
    optimised = ["-O2", *optimise]
    common = [*compiler, *of_every_file, *build_library.COMMON_FLAGS]
    flags = {"plain": [*common, *optimised], "sanitized": [*common, *BUILDS["sanitized"]]}
    headers = sorted(path for place in (build_library.CSRC, SOURCES) for path in place.rglob("*.h"))
    version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    seen = version + b"".join(path.read_bytes() for path in headers)
    to_compile: list[tuple[list[str], Path, str]] = []
    objects: list[str] = []
    built = library_objects()

    def add(own: str, source: Path, name: str, extra: list[str]) -> None:
        name = f"{compiler[0]}.{own}.{name}".replace("/", "_")
        to_compile.append(([*flags[own], *extra, *include], source, name))

    kernels = [path for path in sorted(build_library.CSRC.rglob("*_cpu.c")) if path.parent.name in called_ops()]
    for source in [*kernels, SOURCES / "probe_cpu.c"]:
        for level, level_flags in LEVELS.items():
            own = build if level in levels else "plain"
            if own == "plain" and built and source.is_relative_to(build_library.CSRC):
                objects.append(str(built / level / f"{source.relative_to(build_library.CSRC)}.o"))
            else:
                add(own, source, f"{source.stem}.{level}", [*level_flags, f"-DCPU_LEVEL_{level.upper()}"])
    own = build if everything else "plain"
    for source in sorted(SOURCES.glob("test*.c")):
        add(own, source, source.stem, ["-O2"])
    poison = [] if build == "plain" else ["-DSANITIZED"]
    add(own, SOURCES / "check.c", f"check_for_{build}", ["-O2", *poison])
    add(build, build_library.CSRC / "common/cpu/math.c", "cpu_math", [])
    add(build, build_library.CSRC / "common/cpu/level.c", "cpu_level", ["-Dcpu_should_stream=real_cpu_should_stream"])

    program = folder / "tests"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects += pool.map(lambda each: compile_object(*each, seen), to_compile)
    link = [*flags[build], *objects, "-lm", "-o", str(program)]
    result = subprocess.run(link, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(link)}\n{result.stderr}"
    return program


@pytest.fixture(scope="session")
def run(tmp_path_factory, pytestconfig):
    """Returns a function run(build, level, test, step), which runs a test of the program and returns what it prints.
    The program is built once per session, and a test's first call runs it for all instruction sets (levels) at once."""

    @functools.cache
    def levels(build: str) -> list[str]:
        return [*LEVELS] if build == "plain" or pytestconfig.getoption("--slow") else [level_here()]

    @functools.cache
    def program(build: str) -> Path:
        everything = pytestconfig.getoption("--slow")
        return compile_program(build, tmp_path_factory.mktemp(f"c_{build}"), levels(build), everything)

    def at_level(build: str, level: str, test: str, step: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **KEEP_MEMORY, "EXTENSION_CPP_CPU_LEVEL": level}
        return subprocess.run([program(build), test, str(step)], env=environment, capture_output=True, text=True)

    @functools.cache
    def at_all_levels(build: str, test: str, step: int) -> dict[str, subprocess.CompletedProcess[str]]:
        program(build)
        there = levels(build)
        if test != "level":  # if the machine lacks a level, the library picks another one, which would run twice
            picked = at_all_levels(build, "level", 0)
            there = [level for level in there if picked[level].stdout.strip() == level]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(there, pool.map(lambda level: at_level(build, level, test, step), there), strict=True))

    def checked(build: str, level: str, test: str, step: int) -> str:
        if level not in levels(build):
            pytest.skip("slow tier: sanitizers look at the instruction set that runs here")
        picked = at_all_levels(build, "level", 0)[level]
        assert picked.returncode == 0, picked.stdout + picked.stderr
        if picked.stdout.strip() != level:
            pytest.skip(f"this machine does not have the instruction set {level}")
        result = at_all_levels(build, test, step)[level]
        assert result.returncode == 0, f"{test} at {level}:\n{result.stdout}{result.stderr}"
        return result.stdout

    return checked


def bits(output: str) -> list[str]:
    """Returns those lines of the program's output that contain a hash of a result's bits."""
    return [line for line in output.splitlines() if line.startswith("bits ")]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("test", TESTS)
def test_c(run, build, level, test, pytestconfig):
    """Every test of the program passes with every instruction set (level). Without --slow, large tensors are tested
    with this machine's instruction set only, because the kernels of all instruction sets have the same source."""
    if pytestconfig.getoption("--slow"):
        print(run(build, level, test, SLOW_STEPS[build]))
    else:
        print(run(build, level, test, STEPS[build if test in SWEEPS or level == level_here() else "sanitized"]))


def test_results_larger_than_the_cache_of_a_core_are_streamed(run):
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if not size.exists():
        pytest.skip(f"this system has no {size}")
    kib = int(size.read_text().strip().removesuffix("K"))
    assert run("plain", level_here(), "streams", kib) == "0 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("test", SWEEPS)
def test_every_float(run, level, test):
    print(run("plain", level, test, 1))


@pytest.mark.skipif("v4" not in LEVELS, reason="this processor has one instruction set")
@pytest.mark.parametrize("test", [test for test in TESTS if test != "loads" and not test.endswith("_sizes")])
def test_same_bits_on_all_levels_with_fma(run, test):
    """The results of the instruction sets v3 and v4 have the same bits. The baseline has no fused multiply-add, and so
    its results have the bits of v3 only in tests without sums of products."""
    v3 = bits(run("plain", "v3", test, STEPS["plain"]))
    assert v3 and v3 == bits(run("plain", "v4", test, STEPS["plain"]))
    if test in ("stores", "reduce_sum_ranges", "philox", "dropout_ranges", "loss_reduce"):
        assert v3 == bits(run("plain", "baseline", test, STEPS["plain"]))


CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
IN_AN_EMULATOR = [test for test in TESTS if test != "norm_ranges"]  # norm_ranges takes many minutes in an emulator


@pytest.fixture(scope="session")
def aarch64_program(tmp_path_factory) -> Path:
    """Builds the plain program for aarch64. The library has one instruction set there, with fused multiply-adds."""
    if missing := [tool for tool in CROSS if shutil.which(tool) is None]:
        pytest.skip(f"no {missing[0]} (Debian: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", CROSS[0])
        patch.setattr(sys.modules[__name__], "LEVELS", {"baseline": []})
        patch.setattr(sys.modules[__name__], "library_objects", lambda: None)
        return compile_program("plain", tmp_path_factory.mktemp("aarch64"), ["baseline"])


@pytest.mark.slow
@pytest.mark.parametrize("test", IN_AN_EMULATOR)
def test_aarch64(run, aarch64_program, test):
    """Results on aarch64 are right and, except in float64, have the same bits as those of the instruction set v3. In
    float64 each of the two programs calls exp of its own C library, and the two may differ."""
    step = STEPS["sanitized"]
    emulated = subprocess.run(
        [CROSS[1], "-L", "/usr/aarch64-linux-gnu", str(aarch64_program), test, str(step)],
        capture_output=True,
        text=True,
    )
    assert emulated.returncode == 0, emulated.stdout + emulated.stderr
    if "v3" in LEVELS:
        ours, wanted = (bits(output) for output in (emulated.stdout, run("plain", "v3", test, step)))
        assert [line for line in ours if " float64 " not in line] == [
            line for line in wanted if " float64 " not in line
        ]


# Replaces the compiler's cpuid.h, for a processor that has every feature except the one in the variable MISSING.
CPUID_H = """
#define __get_cpuid(leaf, a, b, c, d) \\
  (*(a) = *(b) = *(d) = 0, *(c) = strcmp(getenv("MISSING"), "f16c") ? ~0u : ~(1u << 29), (leaf) == 1)
#define __builtin_cpu_supports(name) (strcmp(getenv("MISSING"), name) != 0)
"""
PRINT_LEVEL = """
#include <stdio.h>
#include "common/cpu/level.h"
int main(void) { return printf("%s %d", cpu_level_name(cpu_level()), cpu_should_stream(100)) < 0; }
"""


def level_program(tmp_path: Path) -> Path:
    """Builds a program that prints the instruction set that level.c chooses, and whether it would stream 100 bytes."""
    (tmp_path / "cpuid.h").write_text(CPUID_H)
    (tmp_path / "main.c").write_text(PRINT_LEVEL)
    sources, program = [tmp_path / "main.c", build_library.CSRC / "common" / "cpu" / "level.c"], tmp_path / "level"
    compiler = build_library.compiler("CC", "cc", "gcc")
    subprocess.run([*compiler, f"-I{tmp_path}", f"-I{build_library.CSRC}", "-o", program, *sources], check=True)
    return program


def test_settings_that_are_none_are_ignored_with_a_sentence(tmp_path: Path) -> None:
    program = level_program(tmp_path)

    def said(level: str, cache: str) -> tuple[str, str]:
        environment = {"MISSING": "", "EXTENSION_CPP_CPU_LEVEL": level, "EXTENSION_CPP_CPU_CACHE": cache}
        done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    highest = [*LEVELS][-1]
    assert said("", "") == (f"{highest} 0", "") and said("baseline", "99") == ("baseline 1", "")
    assert {said(level, "")[1] for level in ("baseline", "v3", "v4")} == {""}
    output, warning = said("v9", "1M")
    assert output == f"{highest} 0" and warning.splitlines() == [
        "extension_cpp: expected EXTENSION_CPP_CPU_LEVEL to be baseline, v3 or v4, but got 'v9', which is ignored",
        "extension_cpp: expected EXTENSION_CPP_CPU_CACHE to be a number of bytes, but got '1M', which is ignored",
    ]


@pytest.mark.skipif("v4" not in LEVELS, reason="this processor has one instruction set")
def test_an_instruction_set_needs_all_its_parts(tmp_path: Path) -> None:
    program = level_program(tmp_path)

    def level(missing: str, asked: str = "v4") -> str:
        environment = {"MISSING": missing, "EXTENSION_CPP_CPU_LEVEL": asked}
        return subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.split()[0]

    assert [level("nothing", asked) for asked in ("baseline", "v3", "v4", "")] == ["baseline", "v3", "v4", "v4"]
    assert {level(part) for part in ("f16c", "avx2", "fma")} == {"baseline"}
    assert {level(f"avx512{part}") for part in ("f", "bw", "vl", "dq")} == {"v3"}


def test_plan(tmp_path: Path) -> None:
    """Some shape reaches each row of the table of norm plans. Forward's plan does not depend on the number of rows."""
    program = tmp_path / "plan"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    include = ["-I", str(build_library.CSRC)]
    subprocess.run([*compiler, "-std=c++17", "-O1", *include, "-o", program, SOURCES / "plan.cpp"], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
