"""Tests the class Match: C++ and fakes accept the same tensors, and refuse others with the same error message."""

import random
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

import build_library
from extension_cpp.registration import match

# Test operators that check tensors in C++. Names, dtypes and shapes of the tensors are given as words joined by "|".
SOURCE = """
#include "common/shim/match.cpp"
#include "common/shim/op.cpp"
#include "common/shim/registration.cpp"
namespace extension_cpp {
static std::vector<std::string> words_in(const std::string &text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (c == '|')
      words.emplace_back();
    else
      words.back().push_back(c);
  }
  return words;
}
static Dtypes dtypes(const std::string &word) {
  return word == "same" ? SAME : word == "same or float32" ? SAME_OR_FLOAT32 : word == "int64" ? INT64
       : word == "bool" ? BOOL : word == "bytes" ? any_of(ScalarType::Byte, ScalarType::Char) : FLOATING;
}
static int64_t ask(const std::vector<Tensor> &tensors, std::string names, std::string types, std::string shapes,
                   std::string size) {
  const auto name = words_in(names), type = words_in(types), shape = words_in(shapes);
  Match match("op");
  for (size_t i = 0; i < tensors.size(); ++i)
    match(name[i].c_str(), tensors[i], dtypes(type[i]), shape[i].c_str());
  return size.empty() ? 0 : match.size(size);
}
static void list(const Tensor &x, const std::vector<Tensor> &xs, const std::optional<Tensor> &mask) {
  Match match("op");
  match("x", x, FLOATING, "[*, n]");
  match("xs", xs, SAME, "[n]");
  match("mask", mask, BOOL, "broadcasts to x");
  match("late", x, FLOATING, "like mask");
}
static void two_lists(const std::vector<Tensor> &xs, const std::vector<Tensor> &ys) {
  Match match("op");
  match("xs", xs, FLOATING);
  match("ys", ys, SAME, "like xs");
}
static void length(const Tensor &, std::vector<int64_t> numbers, int64_t least, int64_t most) {
  Match("op").length("numbers", numbers.size(), least, most);
}
static void index(const Tensor &x, int64_t n) { Match("op").index("x", x, n); }
static Tensor make(const Tensor &x, ScalarType dtype) { return allocate(x.sizes(), dtype, x); }
static void number_of_cpu(int64_t, int64_t, void *) {}
struct number_args {};
static void nothing(const Tensor &x) {
  number_args args;
  launch("op", Kernel<number_args>{number_of_cpu, nullptr}, args, x, x.numel(), 1);
}
STABLE_TORCH_LIBRARY(match_tests, m) {
  DEF(m, "ask(Tensor[] tensors, str names, str types, str shapes, str size) -> int", &ask);
  DEF(m, "list(Tensor x, Tensor[] xs, Tensor? mask) -> ()", &list);
  DEF(m, "two_lists(Tensor[] xs, Tensor[] ys) -> ()", &two_lists);
  DEF(m, "length(Tensor x, int[] numbers, int least, int most) -> ()", &length);
  DEF(m, "index(Tensor x, int n) -> ()", &index);
  DEF(m, "make(Tensor x, ScalarType dtype) -> Tensor", &make);
  DEF(m, "nothing(Tensor x) -> ()", &nothing);
}
REGISTER_KERNELS(m) {
  impl(m, "ask", TORCH_BOX(&ask));
  impl(m, "list", TORCH_BOX(&list));
  impl(m, "two_lists", TORCH_BOX(&two_lists));
  impl(m, "length", TORCH_BOX(&length));
  impl(m, "index", TORCH_BOX(&index));
  impl(m, "make", TORCH_BOX(&make));
  impl(m, "nothing", TORCH_BOX(&nothing));
}
}  // namespace extension_cpp
"""


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiles and loads the operators of SOURCE."""
    source, made = (tmp_path_factory.mktemp("match") / name for name in ("match.cpp", "match.so"))
    source.write_text(SOURCE)
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-w", "-O0", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", f"-I{build_library.CSRC}", f"-isystem{build_library.torch_folder()}/include"]
    command += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_EXTENSION_NAME=match_tests"]
    command += [str(source), "-o", str(made), f"-L{build_library.torch_folder()}/lib", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    torch.ops.load_library(made)
    return torch.ops.match_tests


DTYPES = {
    "floating": match.FLOATING,
    "int64": match.INT64,
    "bool": match.BOOL,
    "bytes": (torch.uint8, torch.int8),
    "same": match.SAME,
    "same or float32": match.SAME_OR_FLOAT32,
}
Call = tuple[tuple[Tensor, str, str], ...]  # tensors, each with its expected dtype and shape


def kernel_says(ops: Any, call: Call, size: str = "") -> str:
    """Returns the matched size or the error message that the check in C++ gives."""
    tensors, dtypes, shapes = zip(*call, strict=True)
    try:
        return str(ops.ask(list(tensors), "|".join("xyz"[: len(call)]), "|".join(dtypes), "|".join(shapes), size))
    except RuntimeError as error:
        return str(error)


def fake_says(call: Call, size: str = "") -> str:
    matched = match.Match("op")
    try:
        for name, (x, dtypes, shape) in zip("xyz", call, strict=False):
            matched(name, x.to("meta"), DTYPES[dtypes], shape)
        return str(matched.size(size) if size else 0)
    except RuntimeError as error:
        return str(error)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


X = (zeros(2, 3, 8), "floating", "[*, n]")
HALF = (zeros(2, 8, dtype=torch.float16), "floating", "[*, n]")
SENTENCES: list[tuple[Call, str]] = [
    (((zeros(2, dtype=torch.int32), "floating", ""),), "x to be float64, float32, bfloat16 or float16, but got int32"),
    (((zeros(2), "bytes", ""),), "x to be int8 or uint8, but got float32"),
    (((zeros(2, dtype=torch.float8_e5m2), "int64", ""),), "x to be int64, but got float8_e5m2"),
    (((zeros(), "floating", "[*, n]"),), "x to have at least one dimension, but got shape []"),
    (((zeros(4), "floating", "[*, m, n]"),), "x to have at least 2 dimensions, but got shape [4]"),
    (((zeros(4), "floating", "[m, n]"),), "x of shape [m, n], but got [4]"),
    (((zeros(4, 3), "floating", "[n, 2]"),), "x of shape [n, 2], but got [4, 3]"),
    (((zeros(4, 3), "floating", "[n, n]"),), "x of shape [n, n], but got [4, 3]"),
    ((X, (zeros(8).double(), "same", "[n]")), "y to be float32 like x, but got float64"),
    ((HALF, (zeros(8).double(), "same or float32", "[n]")), "y to be float16 like x or float32, but got float64"),
    ((X, (zeros(7), "same", "[n]")), "y of shape [8], the last dimension of x, but got [7]"),
    ((X, (zeros(2, 4), "same", "[*]")), "y of shape [2, 3], x without its last dimension, but got [2, 4]"),
    ((X, (zeros(5, 7), "same", "[m, n]")), "y of shape [m, 8], but got [5, 7]"),
    ((X, (zeros(2, 3, 7), "same", "like x")), "y of shape [2, 3, 8] like x, but got [2, 3, 7]"),
    (
        (X, (zeros(7, dtype=torch.bool), "bool", "broadcasts to x")),
        "y of a shape that broadcasts to [2, 3, 8] of x, but got [7]",
    ),
    (
        ((zeros(5, 2, 3), "floating", "[n, *]"), (zeros(4), "same", "[n]")),
        "y of shape [5], dimension 0 of x, but got [4]",
    ),
    (
        (X, (zeros(3, 1, dtype=torch.bool), "bool", "broadcasts to x"), (zeros(2, 3), "same", "broadcasts to x")),
        "z of a shape that broadcasts to [2, 3, 8] of x, but got [2, 3]",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_sentences(ops: Any, call: Call, sentence: str) -> None:
    assert kernel_says(ops, call) == fake_says(call) == f"extension_cpp::op: expected {sentence}"


def test_a_name_stands_for_sizes(ops: Any) -> None:
    for name, size in (("*", 6), ("n", 8)):
        assert kernel_says(ops, (X,), name) == fake_says((X,), name) == str(size)
    assert kernel_says(ops, (X,), "m") == "extension_cpp::op: no tensor has a dimension m"


def test_kernel_and_fake_decide_alike(ops: Any) -> None:
    """The check in C++ and that of the fake say the same of three random tensors. Many of the calls are accepted."""
    draw, accepted = random.Random(0), 0
    shapes = ["", "[n]", "[*, n]", "[m, n]", "[n, *, m]", "[*]", "[m, 2]", "[]", "like x", "broadcasts to x"]
    types = [*[torch.float32] * 8, torch.float16, torch.float64, torch.int64, torch.bool]
    for _ in range(3000):
        sizes = [draw.choice((1, 2, 2, 2)) for _ in range(draw.randrange(4))]
        others = [draw.choice((1, 2)) for _ in sizes]
        call = tuple(
            (
                torch.zeros(draw.choice((sizes, sizes, others))[draw.randrange(2) :], dtype=draw.choice(types)),
                draw.choice([*["floating", "same", "same or float32"] * 3, "int64", "bool"]),
                draw.choice(shapes),
            )
            for _ in range(3)
        )
        said = kernel_says(ops, call)
        assert said == fake_says(call), call
        accepted += said == "0"
    assert accepted > 60


def test_lists_and_none(ops: Any) -> None:
    x = torch.ones(2, 8)
    ops.list(x, [], None)
    with pytest.raises(RuntimeError) as error:
        ops.list(x, [x[0], x], None)
    sentence = "extension_cpp::op: expected xs[1] of shape [8], the last dimension of x, but got [2, 8]"
    assert str(error.value) == sentence
    matched = match.Match("op")
    matched("x", x, match.FLOATING, "[*, n]")
    matched("mask", None, match.BOOL, "broadcasts to x")
    matched("late", x, match.FLOATING, "like mask")
    with pytest.raises(RuntimeError) as error:
        matched("xs", [x[0], x], match.SAME, "[n]")
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("xs", "ys", "sentence"),
    [
        ([zeros(2), zeros(3)], [zeros(2), zeros(3)], ""),
        ([zeros(2)], [], "ys to have as many tensors as xs, 1, but got 0"),
        ([zeros(2), zeros(3)], [zeros(2), zeros(4)], "ys[1] of shape [3] like xs[1], but got [4]"),
        ([zeros(2), zeros(3).double()], [], "xs[1] to be float32 like xs[0], but got float64"),
        ([zeros(2).int()], [], "xs[0] to be float64, float32, bfloat16 or float16, but got int32"),
        ([zeros(2)], [zeros(2).double()], "ys[0] to be float32 like xs[0], but got float64"),
    ],
)
def test_lists_like_lists(ops: Any, xs: list[Tensor], ys: list[Tensor], sentence: str) -> None:
    def fake(xs: list[Tensor], ys: list[Tensor]) -> None:
        matched = match.Match("op")
        matched("xs", xs, match.FLOATING)
        matched("ys", ys, match.SAME, "like xs")

    for function in (ops.two_lists, fake):
        if not sentence:
            function(xs, ys)
            continue
        with pytest.raises(RuntimeError) as error:
            function(xs, ys)
        assert str(error.value) == f"extension_cpp::op: expected {sentence}"


def test_lists_of_numbers_have_their_lengths(ops: Any) -> None:
    def fake(x: Tensor, numbers: list[int], least: int, most: int) -> None:
        match.Match("op").length("numbers", numbers, least, most)

    for function in (ops.length, fake):
        for count, least, most in ((0, 0, 16), (16, 0, 16), (2, 2, 2)):
            function(zeros(1), [7] * count, least, most)
        for count, least, most, expected in (
            (17, 0, 16, "at most 16 values"),
            (0, 1, 1, "1 value"),
            (3, 2, 2, "2 values"),
        ):
            with pytest.raises(RuntimeError) as error:
                function(zeros(1), [7] * count, least, most)
            assert str(error.value) == f"extension_cpp::op: expected numbers to have {expected}, but got {count}"


def test_indices_are_read_on_the_cpu(ops: Any) -> None:
    numbers = torch.arange(6).view(2, 3)
    ops.index(numbers.t(), 6)
    ops.index(numbers[:0], 0)
    for x, n, got in ((numbers.t(), 5, "5 at [2, 1]"), (-numbers, 6, "-1 at [0, 1]"), (numbers[:, 2], 5, "5 at [1]")):
        with pytest.raises(RuntimeError) as error:
            ops.index(x, n)
        assert str(error.value) == f"extension_cpp::op: expected x to have numbers from 0 to below {n}, but got {got}"


def test_any_dtype_is_allocated(ops: Any) -> None:
    for dtype in match.EVERY_DTYPE:
        assert ops.make(zeros(2, 3), dtype).dtype == dtype
    with pytest.raises(RuntimeError, match="expected a dtype of EVERY_DTYPE, but got complex64"):
        ops.make(zeros(2, 3), torch.complex64)


def test_a_launch_for_nothing_fails(ops: Any) -> None:
    ops.nothing(zeros(1))
    with pytest.raises(RuntimeError, match="return early if there is no work"):
        ops.nothing(zeros(0))


def test_sizes_may_be_symbolic() -> None:
    """A fake that uses Match takes symbolic sizes: a call with other sizes compiles nothing again."""

    @torch.library.custom_op("match_fakes::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @scale.register_fake
    def _(x: Tensor, weight: Tensor) -> Tensor:
        matched = match.Match("scale")
        matched("x", x, match.FLOATING, "[*, n]")
        matched("weight", weight, match.SAME, "[n]")
        return x.new_empty(x.shape)

    # A function of its own, because scale's code is PyTorch's, which other tests compile, too.
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return scale(x, weight)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, n in ((2, 3), (5, 7)):
            assert compiled(zeros(rows, n), zeros(n)).shape == (rows, n)
