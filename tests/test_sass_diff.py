"""Tests scripts/sass_diff.py: how it parses cuobjdump's output, how it pairs kernels, and what it prints."""

from collections import Counter

import pytest

from scripts import sass_diff
from scripts.sass_diff import compare, parse, rename, table

# The output of `cuobjdump -sass` for a library of two kernels, shortened.
SASS = """\
Fatbin elf code:
================
arch = sm_90

	code for sm_90
		Function : _ZN9norm_cuda14forward_kernelIfEEvPf
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
                                                                    /* 0x000ff00000000800 */
        /*0010*/              @!P0 BRA 0x30 ;                       /* 0x00008a00ff147b82 */
                                                                    /* 0x000e220000000a00 */
        /*0020*/                   MOV R2, 32@lo(_ZN9norm_cuda14forward_kernelIfEEvPf) ;
        /*0030*/                   EXIT ;                           /* 0x000000000000794d */
		..........
		Function : _ZN4relu14forward_kernelIfEEvPf
        /*0000*/                   EXIT ;                           /* 0x000000000000794d */
"""


def test_parse():
    assert parse(SASS.splitlines()) == [
        (
            "_ZN9norm_cuda14forward_kernelIfEEvPf",
            ("LDC R1, c[0x0][0x28]", "@!P0 BRA 0x30", "MOV R2, 32@lo(NAME)", "EXIT"),
        ),
        ("_ZN4relu14forward_kernelIfEEvPf", ("EXIT",)),
    ]


def library(kernels: dict[str, list[str]]) -> Counter[tuple[str, tuple[str, ...]]]:
    """Returns the kernels of a library. The letters of a word are the instructions of a kernel."""
    return Counter((name, tuple(code)) for name, codes in kernels.items() for code in codes)


def test_rename_replaces_whole_words():
    kernels = {"norm_cuda::row<norm_cuda::Row>": ["A"], "norm_cuda2::row": ["B"], "norm::row<Row>": ["A", "C"]}
    renamed = {"norm::row<Row>": ["A", "A", "C"], "norm_cuda2::row": ["B"]}
    assert rename(library(kernels), [("norm_cuda", "norm"), ("norm::Row", "Row")]) == library(renamed)


def test_kernels_are_paired_by_name_and_then_by_code():
    """Kernels are paired by name, and kernels without a namesake by code. Those of one name may come in any order."""
    before = {"same": ["A", "B"], "old": ["C"], "edited": ["ABC"], "turned": ["AB"], "gone": ["D"]}
    after = {"same": ["B", "A"], "new": ["C"], "edited": ["AXCY"], "turned": ["BA"], "added": ["E"]}
    found = compare(library(before), library(after))
    assert found["identical"] == ["same", "same"] and found["renamed"] == ["old -> new"]
    assert table(found).splitlines() == [
        "renamed, identical  old -> new",
        "changed             edited: 2 of 3 -> 4 instructions",
        "changed             turned: 1 of 2 -> 2 instructions",
        "only before         gone: 1 instructions",
        "only after          added: 1 instructions",
        "2 identical, 1 renamed, 2 changed, 1 only before, 1 only after",
    ]


@pytest.mark.parametrize(
    "after, arguments, status",
    [
        ({"norm::row": ["A"]}, ["--rename", "norm_cuda=norm"], 0),
        ({"norm::line": ["A"]}, [], 0),
        ({"norm_cuda::row": ["B"]}, [], 1),
        ({"norm_cuda::row": ["A"], "sum": ["C"]}, [], 1),
    ],
)
def test_exit_status(after, arguments, status, tmp_path, monkeypatch):
    libraries = [tmp_path / "before.so", tmp_path / "after.so"]
    for path in libraries:
        path.touch()
    code = {libraries[0]: library({"norm_cuda::row": ["A"]}), libraries[1]: library(after)}
    monkeypatch.setattr(sass_diff, "disassemble", lambda path, arch: code[path])
    assert sass_diff.main([*map(str, libraries), *arguments]) == status
