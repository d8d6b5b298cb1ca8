"""Tests that the command `check` accepts right operators, rejects operators that cheat, and reports wrong arguments."""

import itertools
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from extension_cpp import __main__ as command
from extension_cpp.command import check as check_samples
from extension_cpp.command import check_battery
from tests import judge
from tests.forked import python

SAMPLE = "(torch.randn(6, 33), 3.0)"
REFERENCE = f"{__name__}:right"


def right(x: Tensor, factor: float) -> Tensor:
    return x.sin() * factor


def dense(x: Tensor, factor: float) -> Tensor:
    return right(x, factor).contiguous()


KEPT: dict[object, Tensor] = {}
CALLS: dict[int, Iterator[int]] = {}


def kept(key: object, x: Tensor, factor: float) -> Tensor:
    return KEPT.setdefault(key, dense(x, factor)).clone()


def overwritten(x: Tensor, factor: float) -> Tensor:
    result = dense(x, factor)
    if x.numel():
        x.detach().numpy().flat[0] = 0.5  # changes x without a change of x's version counter
    return result


def touched(x: Tensor, factor: float) -> Tensor:
    x.detach().add_(0)
    return dense(x, factor)


def later(x: Tensor, factor: float) -> Tensor:
    """Returns a result whose last element is wrong. Another thread corrects the element 20 ms later."""
    result = dense(x, factor)
    result.view(-1)[-1:] += 1
    threading.Thread(target=lambda: (time.sleep(0.02), result.data.view(-1)[-1:].sub_(1))).start()
    return result


def unwritten(x: Tensor, factor: float) -> Tensor:
    result = torch.empty(x.shape)
    result.view(-1)[:-1] = dense(x, factor).view(-1)[:-1]
    return result


def after_three_calls(x: Tensor, factor: float) -> Tensor:
    """Computes the result in the first three calls for an address of x, and later returns a stored result."""
    result, number = dense(x, factor), next(CALLS.setdefault(x.data_ptr(), itertools.count()))
    return result if number < 3 else KEPT.setdefault(("third", x.data_ptr()), result).clone()


def raises(x: Tensor, factor: float) -> Tensor:
    if x.shape != (6, 33):
        raise ValueError("no")
    return dense(x, factor)


# For each operator that cheats: its function, the check that must reject it, and a pattern of the printed reason.
CHEATS: dict[str, tuple[Callable[[Tensor, float], Tensor], str, str]] = {
    "zeros": (lambda x, factor: torch.zeros(x.shape), "zeros", r"all elements of the results are 0"),
    "wrong_by_a_little": (
        lambda x, factor: dense(x, factor) * 1.00001,
        "values",
        r"x: float32\[6, 33\], factor: 3.0, output 0 .*: \d+ of 198 .* at \[\d+, \d+\] got \S+, expected \S+, error",
    ),
    "cached_by_address": (
        lambda x, factor: kept((x.data_ptr(), x.shape), x, factor),
        "cached",
        r"other values in the memory of the call before, output 0 .* at \[\d+, \d+\] got",
    ),
    "cached_by_shape": (lambda x, factor: kept(x.shape, x, factor), "cached", r"output 0 .* got"),
    "one_buffer": (
        lambda x, factor: KEPT.setdefault("buffer", torch.empty(6, 33)).copy_(right(x, factor)).view(6, 33),
        "cached",
        r"the first results after two more calls: output 0: \d+ of 198 elements differ",
    ),
    "one_shape": (
        lambda x, factor: dense(x, factor) + (x.shape != (6, 33)),
        "other sizes",
        r"x: float32\[\d+, \d+\], factor: 3.0, output 0 .* got",
    ),
    "overwritten": (overwritten, "inputs", r"argument x was overwritten.*the first at \[0, 0\]: got 0.5, expected"),
    "touched": (touched, "inputs", r"argument x was written: expected version 0, but got 1"),
    "later": (later, "left behind", r"changed within 0.2 s after the call: output 0: 1 of 198.* at \[5, 32\]"),
    "unwritten": (unwritten, "every element", r"output 0: 1 of 198 elements differ; the first at \[5, 32\]"),
    "without_strides": (
        lambda x, factor: right(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), factor),
        "layouts",
        r"sliced x, output 0 .* got",
    ),
    "random": (lambda x, factor: dense(x, factor) + torch.rand(1), "determinism", r"call 2 with the same inputs"),
    "after_three_calls": (after_three_calls, "timing", r"the last timed call, output 0 .* got"),
    "gradient": (dense, "gradients", r"gradient of x from end to end: \d+ of 198 .* at \[\d+, \d+\] got"),
    "no_gradient": (dense, "gradients", r"no gradient of x, and the reference has one"),
    "raises": (raises, "other sizes", r"it takes none of 10 other sizes; x: float32\[.*: raised ValueError: no"),
    "no_fake": (dense, "opcheck", r"raised OpCheckError: .*test_faketensor"),
}


def register(name: str, function: Callable[[Tensor, float], Tensor], share: float | None = 1.0) -> None:
    """Registers check_cheats::<name> with `function` as its kernel. Its gradient is right if `share` is 1."""
    op = torch.library.custom_op(
        f"check_cheats::{name}", function, mutates_args=(), schema="(Tensor x, float factor) -> Tensor"
    )
    if name != "no_fake":
        op.register_fake(lambda x, factor: x.new_empty(x.shape))
    op.register_autograd(
        lambda ctx, grad: (share and grad * ctx.saved_tensors[0].cos() * ctx.factor * share, None),
        setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "factor", inputs[1])),
    )


def sum_of_float32(x: Tensor, factor: float) -> Tensor:
    """Returns factor times the sum of x. It adds in another order for a contiguous x, so that the last bits differ."""
    assert x.dtype is torch.float32
    return (x.flatten().cumsum(0)[-1] if x.is_contiguous() else x.double().sum().float()) * factor


register("honest", dense)
torch.library.custom_op(
    "check_cheats::sum_of_float32", sum_of_float32, mutates_args=(), schema="(Tensor x, float factor) -> Tensor"
).register_fake(lambda x, factor: x.new_empty(()))


def mean_first(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1), x.sin() + 100 - 100  # the judge must allow the rounding error of x.sin() + 100


def keep_x(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[0])


MEAN_FIRST = torch.library.custom_op(
    "check_cheats::mean_first", mean_first, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)
MEAN_FIRST.register_fake(lambda x: (x.new_empty(x.shape[:-1]), torch.empty_like(x)))
MEAN_FIRST.register_autograd(lambda ctx, _, grad: grad * ctx.saved_tensors[0].cos(), setup_context=keep_x)
for each, (function, _, _) in CHEATS.items():
    register(each, function, {"gradient": 1.001, "no_gradient": None}.get(each, 1.0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


torch.library.define("check_cheats::autograd_in_kernel", "(Tensor x) -> Tensor")
torch.library.impl("check_cheats::autograd_in_kernel", "CPU", Doubled.apply)
torch.library.register_fake("check_cheats::autograd_in_kernel", torch.empty_like)


def test_opcheck_gets_tensors_that_require_grad(capsys: pytest.CaptureFixture[str]) -> None:
    """opcheck gets tensors that require grad. For others, it would not report a wrong registration of autograd."""
    words = ("check_cheats::autograd_in_kernel", "--sample", "torch.randn(3)", "--device", "cpu")
    _, lines, out = check(capsys, __name__, *words)
    assert re.search("OpCheckError: .*test_autograd_registration", lines["opcheck"]), out


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the number of timed calls and disables the cache flush, because no test here reads the timings."""
    monkeypatch.setattr(check_battery, "CALLS", 2)
    monkeypatch.setattr(check_battery, "twice_the_cache", lambda: torch.zeros(1, dtype=torch.uint8))


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str], str]:
    """Runs the command `check`. Returns its exit status, the printed result of each check by name, and its output."""
    status = command.main(["check", *words])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, dict(re.findall(r"^  (\w+(?: \w+)?) +(.*)$", printed.out, re.MULTILINE)), printed.out


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, refusing, reason = CHEATS[name]
    words = (__name__, f"check_cheats::{name}", "--sample", SAMPLE, "--reference", REFERENCE, "--device", "cpu")
    status, lines, out = check(capsys, *words)
    assert status == 1 and re.match(f"refused: .*{reason}", lines[refusing]), out
    assert refusing in out.splitlines()[-1]


def layer_norm_in_steps(
    x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A reference for layer_norm whose results mean and rstd are differentiable. Those of the operator are not."""
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def add_in_place(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def muladd_into(a: Tensor, b: Tensor, c: float, out: Tensor) -> None:
    out.copy_(a * b + c)


TWO_INTEGERS = "(torch.randint(1, 99, (5, 8)), torch.randint(1, 99, (8,)))"
RIGHT = [
    (__name__, "check_cheats::honest", REFERENCE, SAMPLE),
    (
        "extension_cpp",
        "extension_cpp::rms_norm",
        "torch.nn.functional:rms_norm",
        "(torch.randn(6, 33), [33], None, 1e-5)",
    ),
    ("extension_cpp", "extension_cpp::mish", "torch.nn.functional:mish", "torch.randn(5, 64).bfloat16()"),
    (__name__, "check_cheats::mean_first", f"{__name__}:mean_first", "torch.randn(4, 7)"),
    ("torch", "aten::pow.Scalar", "torch:pow", "(2.0, torch.randn(4, 7))"),
    ("torch", "aten::cat", "torch:cat", "([torch.randn(6, 5), torch.randn(3, 5)], 0)"),
    ("torch", "aten::sort", "torch:sort", "(torch.randn(6, 9), {'dim': 0})"),
    (
        "torch",
        "aten::where.self",
        "torch:where",
        "(torch.rand(4, 5) < 0.5, torch.randn(5).double(), torch.randn(4, 1).double())",
    ),
    (
        "torch",
        "aten::native_layer_norm",
        f"{__name__}:layer_norm_in_steps",
        "(torch.randn(6, 33), [33], torch.randn(33), torch.randn(33), 1e-5)",
    ),
    ("torch", "aten::add_.Tensor", f"{__name__}:add_in_place", "(torch.randn(6, 5), torch.randn(5))"),
    ("torch", "aten::add_.Tensor", "torch:add", "(torch.randn(6, 5), torch.randn(5))"),
    ("torch", "aten::gcd", "torch:gcd", TWO_INTEGERS),
    (
        "extension_cpp",
        "extension_cpp::muladd.out",
        f"{__name__}:muladd_into",
        "(torch.randn(6, 5), torch.randn(6, 5), 2.0, {'out': torch.zeros(6, 5)})",
    ),
]
WITHOUT_DERIVATIVE = ("aten::gcd", "extension_cpp::muladd.out")


@pytest.mark.parametrize("module, op, reference, sample", RIGHT, ids=[op for _, op, *_ in RIGHT])
def test_right_operators_pass(
    module: str, op: str, reference: str, sample: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (module, op, "--reference", reference, "--sample", sample, "--device", "cpu")
    status, lines, out = check(capsys, *words)
    assert status == 0 and out.endswith("\nPassed.\n"), out
    assert [name for name in check_battery.CHECKS if name != "statistics"] == [*lines]
    assert lines["other sizes"].startswith("passed: 10 others" if "norm" in op else "passed: "), out
    not_run = [name for name, line in lines.items() if not line.startswith("passed")]
    assert not_run == (["gradients"] if op in WITHOUT_DERIVATIVE else []), out


def test_without_a_reference_all_but_values_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = (__name__, "--sample", SAMPLE, "--device", "cpu")
    status, lines, out = check(capsys, words[0], "check_cheats::honest", *words[1:])
    assert status == 0 and out.endswith("Passed, but no value was judged: there is no --reference.\n")
    assert [name for name, line in lines.items() if line.startswith("not run")] == ["values", "other sizes"]
    status, _, out = check(capsys, words[0], "check_cheats::sum_of_float32", *words[1:])
    assert status == 0, out
    for name in ("zeros", "cached_by_address", "cached_by_shape", "without_strides"):
        status, lines, out = check(capsys, words[0], f"check_cheats::{name}", *words[1:])
        assert status == 1 and lines[CHEATS[name][1]].startswith("refused: x: float32[6, 33], factor: 3.0"), out
    status, lines, out = check(capsys, words[0], "check_cheats::gradient", *words[1:])
    assert "Jacobian mismatch" in lines["gradients"], out


def scaled(x: Tensor, p: float) -> Tensor:
    return torch.nn.functional.dropout(x, p)


RANDOM: dict[str, tuple[Callable[[Tensor, float], Tensor], str, str]] = {
    "dropout": (scaled, "", ""),
    "unscaled": (
        lambda x, p: x * (torch.rand_like(x) > p),
        "statistics",
        r"means of output 0 in 32 draws: at",
    ),
    "narrow": (lambda x, p: (x + scaled(x, p)) / 2, "statistics", r"mean squares of output 0 in 32 draws: at"),
    "elsewhere": (lambda x, p: scaled(x, p).roll(1), "statistics", r"means of output 0 in 32 draws: at"),
    "seedless": (
        lambda x, p: x * (torch.arange(x.numel()).view(x.shape) % 2) * 2,
        "statistics",
        "two seeds are the same",
    ),
    "own_seed": (lambda x, p: x * torch.tensor(next(KEYS)), "determinism", "call 2 with the same inputs"),
}
KEYS = itertools.count()
for each, (function, _, _) in RANDOM.items():
    random_op = torch.library.custom_op(
        f"check_cheats::{each}", function, mutates_args=(), schema="(Tensor x, float p) -> Tensor"
    )
    random_op.register_fake(lambda x, p: torch.empty_like(x))


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--sample",
        "(torch.randn(64, 33), 0.5)",
        "--reference",
        f"{__name__}:scaled",
        "--random",
        "--device",
        "cpu",
    )
    status, lines, out = check(capsys, __name__, f"check_cheats::{name}", *words)
    _, refusing, reason = RANDOM[name]
    assert status == bool(refusing), out
    assert not refusing or re.match(f"refused: .*{reason}", lines[refusing]), out


def test_a_sample_that_shows_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("torch", "aten::sin", "--reference", "torch:sin", "--sample", "torch.zeros(9)", "--device", "cpu")
    assert "zeros are right, so this sample shows nothing" in check(capsys, *words)[1]["zeros"]


def test_changed_numbers_keep_their_dtype() -> None:
    """judge.Rounded keeps the dtype of a number, because an operator that `check` tests may accept only float32."""
    assert judge.Rounded(torch.float32).changed(torch.ones(3)).dtype is torch.float32


@pytest.mark.parametrize(
    "op, reference, message",
    [
        ("floor", "rounded_down", "expected torch.int64, but got torch.float32"),
        ("argmax", "first_index", "expected torch.float64, but got torch.int64"),
    ],
)
def test_integers_and_numbers_are_not_the_same(
    op: str, reference: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("torch", f"aten::{op}", "--reference", f"{__name__}:{reference}", "--sample", "torch.randn(9)")
    assert message in check(capsys, *words, "--device", "cpu")[1]["values"]


def rounded_down(x: Tensor) -> Tensor:
    return x.floor().long()


def first_index(x: Tensor) -> Tensor:
    return x.argmax().double()


@torch.library.custom_op("check_other::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    """Computes x * y, and has a gradient of x alone."""
    return x * y


gate.register_autograd(
    lambda ctx, grad_out: (grad_out * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@pytest.mark.parametrize("words", [", requires_grad=True", ""])
def test_a_sample_says_which_arguments_are_differentiable(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator without a gradient of y passes if x alone requires grad in the sample. If no tensor of the sample
    does, all are taken to be differentiable, and the operator is refused."""
    sample = f"(torch.randn(3, 4{words}), torch.randn(3, 4))"
    reference = ("--reference", "torch:mul", "--sample", sample, "--device", "cpu")
    line = check(capsys, __name__, "check_other::gate", *reference)[1]["gradients"]
    assert line == ("passed: of x" if words else f"refused: {IN_WORDS}: no gradient of y, and the reference has one")


IN_WORDS = "x: float32[3, 4], y: float32[3, 4]"
SPEC_FILE = """
import torch
from tests.opspec import Sample

def samples(device, dtype):
    if dtype is not torch.float64:
        yield Sample((torch.randn(4, 9, dtype=dtype, device=device), 2.0))
"""


def test_samples_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The file for --spec may define a function that yields samples for a dtype, or an OpSpec with a reference."""
    (tmp_path / "spec.py").write_text(SPEC_FILE)
    words = ("--spec", str(tmp_path / "spec.py"), "--device", "cpu")
    _, _, out = check(capsys, __name__, "check_cheats::zeros", *words, "--reference", REFERENCE)
    assert re.findall(r"^cpu: x: (\w+)\[4, 9\], factor: 2.0$", out, re.MULTILINE) == ["float32", "bfloat16", "float16"]
    monkeypatch.setattr(check_samples, "SHAPES", ((3, 9),))
    words = ("--spec", str(Path(__file__).parent / "specs" / "mish.py"), "--device", "cpu")
    status, lines, out = check(capsys, "extension_cpp", "extension_cpp::mish", *words)
    assert status == 0 and "x: float64[3, 9]" in out and lines["values"] == "passed", out


def test_a_module_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MODULE may be a file whose name is no Python name."""
    (tmp_path / "01-ops.py").write_text("import torch\nmish = torch.nn.functional.mish\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--sample", "torch.randn(3)", "--device", "cpu", "--reference", "01-ops:mish")
    assert check(capsys, "01-ops", "extension_cpp::mish", *words)[1]["values"] == "passed"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("no_such_module", "a::b"), "MODULE no_such_module cannot be imported: ModuleNotFoundError: No module named"),
        (("torch", "mish"), "expected an operator as ns::op, but nothing registered mish"),
        (("torch", "aten::mihs"), "expected an operator as ns::op, but nothing registered aten::mihs"),
        (("torch", "aten::mul"), "expected one of aten::mul.Tensor, aten::mul.Scalar, "),
        (("torch", "aten::mul.Tenzor"), "expected an overload of aten::mul among Tensor, Scalar, "),
        (("torch", "aten::bernoulli"), "aten::bernoulli draws random numbers: expected --random"),
        (("torch", "aten::mish"), "expected a sample, by --sample or --spec, but got none"),
        (
            ("torch", "aten::mish", "--sample", "torch.rand(3"),
            "--sample torch.rand(3 cannot be evaluated: SyntaxError: ",
        ),
        (
            ("torch", "aten::mish", "--sample", "x"),
            "--sample x cannot be evaluated: NameError: name 'x' is not defined",
        ),
        (("torch", "aten::mish", "--sample", "(1, 2)"), "expected arguments of aten::mish(Tensor self) -> Tensor, but"),
        (
            ("torch", "aten::mish", "--sample", "1"),
            "self: 1: the operator raised RuntimeError: aten::mish() Expected a",
        ),
        (("torch", "aten::sin", "--sample", "1j * torch.rand(3)"), "expected real tensors, but got self: complex64[3]"),
        (("torch", "aten::mish", "--spec", "none.py"), "--spec none.py cannot be run: FileNotFoundError: "),
        (
            ("torch", "aten::mish", "--reference", "torch:mihs"),
            "--reference torch:mihs cannot be imported: AttributeError",
        ),
        (
            ("torch", "aten::mish", "--sample", "torch.rand(3)", "--reference", "torch:topk"),
            "self: float64[3]: the reference raised TypeError: ",
        ),
    ],
)
def test_bad_commands_get_a_sentence(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}") and error.count("\n") == 1


OTHER_PACKAGE = """
import torch
from tests.help import factor

@torch.library.custom_op("check_other::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    from tests import help  # at run time, too, `tests` is the one beside this file
    return help.factor * x

double.register_fake(torch.empty_like)

def right(x):
    from tests.help import factor
    return factor * x
"""


def test_from_a_wheel_beside_other_tests(tmp_path: Path) -> None:
    """`check` works from a wheel, which contains judge.py, also for an operator beside a package named `tests`."""
    installed, root = tmp_path / "extension_cpp", Path(__file__).resolve().parent.parent
    ignored = shutil.ignore_patterns("csrc", "__pycache__", "*.so", "tree")
    shutil.copytree(root / "extension_cpp", installed, ignore=ignored)
    in_wheel = re.findall(r'^    "(tests/\w+\.py)",$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    for file in in_wheel:
        (installed / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, installed / "tree" / file)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "help.py").write_text("factor = 2.0\n")
    (tmp_path / "other_package.py").write_text(OTHER_PACKAGE)
    words = ("other_package", "check_other::double", "--reference", "other_package:right", "--sample", "torch.randn(9)")
    done = python("-m", "extension_cpp", "check", *words, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("\nPassed.\n"), done.stdout + done.stderr
