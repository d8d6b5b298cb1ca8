"""Tests `new --schema`: which schemas it reads or rejects, and that the files it writes compile and pass the tests."""

import argparse
import re
import shlex
import sys
from difflib import unified_diff
from itertools import chain
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

import build_library
from extension_cpp import __main__ as command
from extension_cpp.command import generate, generate_python, generate_shim, generate_tests, new, roles, schema
from extension_cpp.command.errors import CannotMake
from tests import test_scaffold
from tests.forked import python
from tests.generated import Fit, too_many_values
from tests.opspec import Sample, indices_below
from tests.test_scaffold import contents, lint, run, run_python, with_objects

ROOT = Path(__file__).resolve().parent.parent
tree = test_scaffold.tree  # imports the fixture
SCHEMAS = [
    "f(Tensor x) -> Tensor",
    "f(Tensor x, Tensor? bias=None, float eps=1e-05, bool flag=False) -> (Tensor y, Tensor z)",
    "f(Tensor(a!) p, Tensor grad, Tensor(b!) m, float lr, int step=1) -> ()",
    "f_(Tensor x, SymInt k) -> Tensor",
    "f(Tensor[] xs, Tensor[] ys, float? s=None) -> Tensor[]",
    "f(Tensor x, float p=0.5, *, int k, bool flag=False) -> Tensor",
    "f(Tensor x, int[] dims, SymInt[2] size=[3, 4], float[]? by=None, bool[2] flags=[True, False]) -> Tensor",
]


@pytest.mark.parametrize("text", SCHEMAS)
def test_schemas_are_read(text: str) -> None:
    parsed = schema.parse(text)
    shown = parsed.listed(each.text for each in parsed.arguments)
    assert re.sub(r"\(\w!\)", "(!)", text).startswith(f"{parsed.name}({shown}) -> ")
    assert schema.parse(operator_of(text).schema) == schema.parse(
        re.sub(r"\((Tensor \w+(?:, Tensor \w+)*)\)$", r"(\1)", text)
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("f Tensor x) -> Tensor", "expected '(' at column 3 of the schema, but got 'Tensor'"),
        ("f(Tensr x) -> Tensor", "types Tensor, int, SymInt, float, bool at column 3 of the schema, but got 'Tensr'"),
        ("f(Tensor x, Tensor x) -> Tensor", "a name that no other argument has at column 20"),
        ("f(Tensor x) -> (Tensor y, Tensor y)", "a name that no other result has at column 34"),
        ("f(Tensor x, float s=abc) -> Tensor", "a default value at column 21 of the schema, but got 'abc'"),
        ("f(Tensor x, float[] s=[1, abc]) -> Tensor", "a default value at column 27 of the schema, but got 'abc'"),
        ("f(Tensor x)", "expected '->' at column 12 of the schema, but got its end"),
        ("f(Tensor x) -> Tensor y z", "the end of the schema at column 25 of the schema, but got 'z'"),
    ],
)
def test_the_column_of_a_wrong_schema_is_named(text: str, sentence: str) -> None:
    with pytest.raises(CannotMake, match=re.escape(sentence)):
        schema.parse(text)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["f(Tensor x, int k) -> Tensor", "--shape", "out=[k]"], "but got int k; write SymInt"),
        (["f(Tensor x) -> Tensor", "--shape", "out=[x[0] + 1]"], "but got 'x[0] + 1'"),
        (["f(Tensor x) -> Tensor", "--shape", "out=z"], "expected the shape of out to name tensors of the schema"),
        (["f(Tensor x, Tensor index) -> Tensor", "--grad", "index"], "but got index, which is int64"),
        (["f(Tensor x) -> Tensor", "--grad", "y"], "floating-point tensors of the schema, but got 'y'"),
        (["f(Tensor x) -> Tensor", "--grad", "x", "--save", "z"], "expected --save with names of x, out, but got 'z'"),
        (["f(Tensor x) -> Tensor", "--save", "x"], "expected --grad beside --save, which says what backward reads"),
        (["f(Tensor x) -> Tensor", "--dtype", "out=int63"], "but got 'int63'"),
        (["f(Tensor x) -> Tensor", "--dtype", "z=int64"], "with a name of x, out, but got 'z=int64'"),
        (["f(Tensor x, Tensor y) -> Tensor", "--role", "y=vector"], "for y, but got 'vector'"),
        (["f(Tensor x) -> Tensor", "--dtype", "out=int64", "--grad", "x"], "no floating-point result"),
        (["f(Tensor(a!) x) -> Tensor"], "either results or arguments that are written"),
        (["f(Tensor(a!) x) -> ()", "--grad", "x"], "an operator that writes into an argument has no derivative"),
        (["f(Tensor[] x) -> Tensor"], "expected results of Tensor[], one tensor for each of the list"),
        (["f(Tensor x) -> Tensor[]"], "expected a list as the first tensor, because the others have its length"),
        (["f(Tensor[] x) -> (Tensor[] y, Tensor z)"], "results that are all tensors or all lists of tensors"),
        (["f(Tensor(a!)[] x, Tensor(b!) y) -> ()"], "expected y to be a list, because each of the launches would"),
        (["f(Tensor[] x) -> Tensor[]", "--grad", "x"], "the template 'tensors' has such gradients"),
        (["f(Tensor[] x) -> Tensor[]", "--role", "x=[n]"], "beside lists, but got [n] of x"),
        (["f(Tensor[] x, Tensor[] y) -> Tensor[]", "--role", "y=any"], "beside lists, but got any of y"),
        (["f(Tensor[] x) -> Tensor[]", "--shape", "out=[x[0]]"], "the shape of out to be a list of x, but got [x[0]]"),
        (["f(Tensor[] x) -> Tensor[]", "--work", "rows"], "expected --work flat with lists, but got rows"),
        (["f(Tensor x) -> Tensor", "--shape", "out=[?]"], "expected --work items=... with a size of ?"),
        (["f(Tensor x) -> Tensor", "--work", "items=[?]"], "the work items to name SymInt arguments, but got '?'"),
        (
            ["f(Tensor[] x, Tensor[]? y) -> Tensor[]"],
            "y is Tensor[]?: of lists of tensors `new --schema` writes Tensor[]",
        ),
        (["f(Tensor x, int[17] k) -> Tensor"], "expected k to have at most 16 values, but got int[17]"),
        (["f(Tensor x, int[2] k=[1]) -> Tensor"], "expected a default of int[2] for k, but got [1]"),
        (["f(Tensor x, int[] k=1) -> Tensor"], "expected a default of int[] for k, but got 1"),
        (["f(Tensor x, bool[] k=[1]) -> Tensor"], "expected a default of bool[] for k, but got [1]"),
        (["f(Tensor x, SymInt[] k) -> Tensor", "--shape", "out=[k]"], "but got SymInt[] k"),
        (["f(Tensor x, int[] k) -> Tensor", "--shape", "out=[*k]"], "or results before it, but got 'k'"),
        (["f(Tensor x, SymInt[2] k) -> Tensor", "--shape", "out=[k[2]]"], "but got k[2] of SymInt[2]"),
        (["f(Tensor x, SymInt[] k) -> Tensor", "--shape", "out=[k[0]]"], "but got k[0] of SymInt[]"),
        (["f(Tensor x, int[] k, Tensor k_count) -> Tensor"], "'k_count' would stand for two things"),
        (["f(Tensor x, *, Tensor s) -> Tensor"], "expected s before the *, because autograd takes tensors only by"),
        (["f(Tensor x) -> (Tensor x)"], "names for the results that no argument has, but got x"),
        (["f(Tensor x, Tensor? m=None, float s) -> Tensor"], "expected a default for s, because m before it has one"),
        (["f(Tensor x, int k=1.5) -> Tensor"], "expected a default of int for k, but got 1.5"),
        (["f(Tensor x, Tensor y=None) -> Tensor"], "expected a default of Tensor for y, but got None"),
        (["f(Tensor x, Tensor args) -> Tensor"], "and the files leave free, but got 'args'"),
        (["f(Tensor x, Tensor int64_t) -> Tensor"], "but got 'int64_t'"),
        (["f(Tensor x, float lambda) -> Tensor"], "but got 'lambda'"),
        (["f(Tensor x, Tensor x_numel) -> Tensor"], "'x_numel' would stand for two things"),
        (["f(Tensor x, SymInt n) -> Tensor", "--role", "x=[*, n]"], "'n' would stand for two things"),
        (["f(Tensor x, Tensor y) -> Tensor", "--role", "x=like:y"], "for x, but got 'like:y'"),
        (["f(Tensor x) -> Tensor", "--role", "x=[*, *]"], "with * once at most, but got '[*, *]'"),
        (["f(Tensor x, Tensor index) -> Tensor", "--role", "index=index:z"], "the size of index to name SymInt"),
        (["f(Tensor x) -> Tensor", "--dtype", "x=int8"], "as the first argument, but got x of int8"),
        (["f(Tensor x) -> Tensor", "--work", "all"], "expected --work flat, rows or items=SHAPE, but got 'all'"),
        (["f(Tensor x) -> Tensor", "--work", "rows", "--role", "x=[n]"], "a shape of x with * for --work rows"),
        (["f(Tensor x) -> Tensor", "--work", "items=[z]"], "the work items to name SymInt arguments, but got 'z'"),
        (["f(Tensor x) -> (Tensor y, Tensor z)", "--shape", "y=z", "z=y"], "or results before it, but got 'z'"),
        (["f(Tensor x) -> (Tensor y, Tensor z)", "--shape", "z=[*y[1:]]"], "all sizes of the result, *y, but got some"),
        (["f(Tensor x) -> Tensor", "--shape", "out=[x[0]].y"], "but got '[x[0]].y'"),
        (["f(Tensor x) -> Tensor", "--shape", "out=[,x[0]]"], "but got '' in '[,x[0]]'"),
        (["f(Tensor x) -> Tensor", "--shape", "out=[x[0],,3]"], "but got '' in '[x[0],,3]'"),
        (["f(Tensor x, Tensor? m) -> Tensor", "--shape", "out=m"], "that are not optional, or results before it"),
        (["f(Tensor x) -> Tensor", "--grad", "x,x"], "expected --grad to name each tensor once, but got x,x"),
        (["f(Tensor x) -> Tensor", "--kind", "rows"], "expected --schema or --kind, but got both"),
        (["g(Tensor x) -> Tensor"], "expected the schema of f, but got one of g"),
        (["f.mode(Tensor x) -> Tensor"], "f.mode is an overload, of which `new --schema` writes .out alone: make f"),
        (["f.out(Tensor x, Tensor(a!) out) -> ()"], "expected f.out(..., *, Tensor(a!) out) -> ()"),
        (["f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"], "expected -> () of an operator that writes, because"),
        (["f.out(Tensor x, Tensor out, *, Tensor(a!) y) -> ()"], "expected another name than out, which Python gives"),
        (["f.out(Tensor[] x, *, Tensor(a!) y) -> ()"], "the overload .out of an operator without lists of tensors"),
        (
            ["f.out(Tensor x, *, Tensor(a!) y) -> ()", "--shape", "y=[?]", "--work", "items=[1]"],
            "expected no overload .out with a size of ?, because the caller could not allocate it",
        ),
    ],
)
def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    before = contents(Path(generate.__file__).parent)
    assert command.main(["new", "f", "--schema", *words]) == 1
    told = capsys.readouterr()
    assert sentence in told.err and told.err.count("\n") == 1 and told.out == ""
    assert contents(Path(generate.__file__).parent) == before


def test_the_page_lists_the_names_that_are_refused() -> None:
    page = (ROOT / "docs" / "TEMPLATE_USAGE.md").read_text()
    listed = re.search(r"generated files use: ([^.]+)\.", page)
    assert listed and set(re.findall(r"`(\w+)`", listed[1])) == roles.RESERVED


def test_options_of_a_schema_go_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["new", "f", "--dtype", "x=int64"]) == 1
    assert capsys.readouterr().err == "error: --dtype goes with --schema\n"


# The names of these ops must differ from those of any op that a reader may add.
PLANTED = {
    "planted_topk": [
        *["planted_topk(Tensor logits, SymInt k) -> (Tensor weights, Tensor indices)", "--dtype", "indices=int64"],
        *["--shape", "weights=[*logits[:-1], k]", "indices=weights", "--role", "logits=[*, experts]"],
        *["--grad", "logits", "--save", "weights,indices", "--work", "rows"],
    ],
    "planted_step": [
        "planted_step(Tensor(a!) p, Tensor grad, Tensor(b!) m, float lr, float beta=0.9) -> ()",
        *["--dtype", "m=float32"],
    ],
    "planted_sum": [
        *["planted_sum(Tensor x, Tensor index, SymInt n) -> Tensor", "--shape", "out=[n, x[1]]"],
        *["--role", "x=[rows, cols]", "index=index:n:[rows]", "--grad", "x", "--save", "index", "--work", "items=[n]"],
    ],
    "planted_conv": [
        *["planted_conv(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", "--grad", "x,weight,bias"],
        *["--role", "x=[*, channels, time]", "weight=[channels, taps]", "bias=[channels]"],
    ],
    "planted_scale": [
        "planted_scale.out(Tensor x, Tensor? mask=None, *, float? scale=None, Tensor(a!) out) -> ()",
        *["--grad", "x", "--save", "mask"],
    ],
    "planted_lists": ["planted_lists(Tensor[] xs, Tensor[] ys, *, float alpha=1.0) -> Tensor[]"],
    "planted_decay": ["planted_decay(Tensor(a!)[] ps, Tensor rate, Tensor(b!)[] ms) -> ()", "--dtype", "ms=float32"],
    "planted_count": [
        *["planted_count(Tensor boxes, *, float least) -> Tensor", "--dtype", "out=int64", "--shape", "out=[?]"],
        *["--work", "items=[1]", "--role", "boxes=[n, 4]"],
    ],
    "planted_tile": [
        "planted_tile(Tensor x, SymInt[2] copies, float[] scales, bool[2] flips=True, int[]? more=None) -> Tensor",
        *["--shape", "out=[*copies, *x]", "--grad", "x", "--save", ""],
    ],
    "planted_round": [
        *["planted_round.out(Tensor x, *, Tensor(a!) q, Tensor(b!) scale) -> ()", "--dtype", "q=int8", "scale=float32"],
        *["--role", "x=[*, n]", "--shape", "scale=[*x[:-1]]", "--work", "rows"],
    ],
    # sizes without *, and a tensor like one that is not the first
    "planted_exact": [
        *["planted_exact(Tensor x, Tensor y, Tensor z) -> Tensor", "--shape", "out=y", "--grad", "x,z", "--save", "y"],
        *["--role", "x=[planes, rows, cols]", "y=[rows, cols]", "z=like:y"],
    ],
    # an argument that is written where an index says
    "planted_cache": [
        *["planted_cache(Tensor(a!) cache, Tensor key, Tensor slots) -> ()", "--work", "items=[*key]"],
        *["--role", "cache=[places, width]", "key=[tokens, width]", "slots=index:cache[0]:[tokens]"],
    ],
    # a size that changes where equal numbers become different
    "planted_most": [
        *["planted_most(Tensor x) -> (Tensor values, Tensor places)", "--dtype", "places=int64"],
        *["--shape", "values=[?]", "places=values", "--work", "items=[*x]"],
    ],
    # results that have elements where there are no work items
    "planted_tally": [
        *["planted_tally(Tensor x, Tensor index, SymInt n) -> Tensor", "--shape", "out=[n, x[1]]"],
        *["--role", "x=[rows, cols]", "index=index:n:[rows]", "--work", "items=[*index]"],
    ],
}


FORMULAS = {
    "planted_topk": "w = logits.sum(-1, keepdim=True).expand(*logits.shape[:-1], k).clone()\n"
    "return w, torch.ones_like(w, dtype=torch.int64)",
    "planted_step": "m.mul_(beta).add_(grad, alpha=1 - beta)\np.add_(m, alpha=-lr)",
    "planted_sum": "return x.new_zeros(n, x.shape[1]).index_add(0, index, x)",
    "planted_conv": "pad = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))\n"
    "out = sum(weight[:, i, None] * pad[..., i : i + x.shape[-1]] for i in range(weight.shape[1]))\n"
    "return out if bias is None else out + bias[:, None]",
    "planted_scale": "x = x.clone() if scale is None else x * scale\nreturn x if mask is None else x * mask",
    "planted_lists": "return [x + alpha * y for x, y in zip(xs, ys, strict=True)]",
    "planted_decay": "for p, m in zip(ps, ms, strict=True):\n    p.sub_(rate.sum())\n    m.add_(p)",
    "planted_count": "return (boxes.sum(1) > least).nonzero()[:, 0]",
    "planted_tile": "factor = sum(scales) * (1 + flips[0] + 2 * flips[1]) + sum(more or ())\n"
    "return (x * factor).expand(*copies, *x.shape).clone()",
    "planted_round": "return x.sign().to(torch.int8), x.abs().sum(-1).float()",
    "planted_exact": "return (x * y).sum(0) + z",
    "planted_cache": "cache.index_copy_(0, slots, key)",
    "planted_most": "if x.numel() == 0:\n    return x.flatten(), x.new_empty(0, dtype=torch.int64)\n"
    "places = (x == x.max()).flatten().nonzero()[:, 0]\nreturn x.flatten()[places], places",
    "planted_tally": "return x.new_zeros(n, x.shape[1]).index_add(0, index, x)",
}


FACTOR = """
  double factor = 0;
  for (int64_t k = 0; k < args->scales_count; ++k) factor += args->scales[k];
  factor *= 1 + args->flips[0] + 2 * args->flips[1];
  for (int64_t k = 0; args->has_more && k < args->more_count; ++k) factor += (double)args->more[k];
"""


# The arithmetic of forward and backward on the CPU: a mask that broadcasts, an index, lists of numbers, and results of
# other dtypes.
KERNELS = {
    "planted_tile": [
        f"{FACTOR}  out[i] = NARROW(WIDEN(x[i % args->x_numel]) * (ACC)factor);",
        f"{FACTOR}  double sum = 0;\n"
        "  for (int64_t k = i; k < args->grad_out_numel; k += args->grad_x_numel) sum += WIDEN(grad_out[k]);\n"
        "  grad_x[i] = NARROW((ACC)(sum * factor));",
    ],
    "planted_scale": [
        "out[i] = NARROW(WIDEN(x[i]) * (args->has_scale ? (ACC)args->scale : 1) * (mask == NULL || mask[i]));",
        "grad_x[i] = NARROW(WIDEN(grad_out[i]) * (args->has_scale ? (ACC)args->scale : 1) * (!mask || mask[i]));",
    ],
    "planted_sum": [
        "for (int64_t col = 0; col < args->cols; ++col) {\n  double sum = 0;\n"
        "  for (int64_t row = 0; row < args->rows; ++row)\n"
        "    if (index[row] == i) sum += WIDEN(x[row * args->cols + col]);\n"
        "  out[i * args->cols + col] = NARROW((ACC)sum);\n}",
        "grad_x[i] = grad_out[index[i / args->cols] * args->cols + i % args->cols];",
    ],
    "planted_round": [
        "double sum = 0;\nfor (int64_t j = i * args->n; j < (i + 1) * args->n; ++j) {\n"
        "  const ACC value = WIDEN(x[j]);\n  q[j] = (int8_t)((value > 0) - (value < 0));\n  sum += fabs(value);\n}\n"
        "scale[i] = (float)sum;",
    ],
    "planted_exact": [
        "ACC sum = WIDEN(z[i]);\nfor (int64_t j = i; j < args->x_numel; j += args->out_numel)\n"
        "  sum += WIDEN(x[j]) * WIDEN(y[i]);\nout[i] = NARROW(sum);",
        "const int64_t numel = args->rows * args->cols;\n"
        "if (i < args->grad_x_numel) grad_x[i] = NARROW(WIDEN(grad_out[i % numel]) * WIDEN(y[i % numel]));\n"
        "if (i < args->grad_z_numel) grad_z[i] = grad_out[i];",
    ],
    "planted_most": [
        "if (i > 0) return;\nACC most = WIDEN(x[0]);\nint64_t found = 0;\n"
        "for (int64_t j = 1; j < args->x_numel; ++j) {\n"
        "  const ACC value = WIDEN(x[j]);\n  if (value > most || value != value) most = value;\n}\n"
        "for (int64_t j = 0; j < args->x_numel; ++j) {\n  if (WIDEN(x[j]) != most) continue;\n"
        "  if (args->count == NULL) values[found] = x[j], places[found] = j;\n  ++found;\n}\n"
        "if (args->count != NULL) *args->count = found;",
    ],
    "planted_tally": [
        "for (int64_t j = 0; i == 0 && j < args->out_numel; ++j) {\n  double sum = 0;\n"
        "  for (int64_t row = 0; row < args->rows; ++row)\n"
        "    if (index[row] == j / args->cols) sum += WIDEN(x[row * args->cols + j % args->cols]);\n"
        "  out[j] = NARROW((ACC)sum);\n}",
    ],
    "planted_cache": ["cache[slots[i / args->width] * args->width + i % args->width] = key[i];"],
}


def operator_of(*words: str) -> schema.Operator:
    parser = argparse.ArgumentParser()
    new.add_schema(parser)
    operator = new.described(parser.parse_args(["--schema", *words], argparse.Namespace(kind=None)), None)
    assert operator is not None
    return operator


@pytest.mark.parametrize("name", PLANTED)
def test_entries_say_what_nested_tensors_and_dtensors_get(name: str) -> None:
    """The entry that `new --schema` writes has the parts for which tests/battery looks: nested, sharding, fake,
    backward."""
    entry = new.from_schema(operator_of(*PLANTED[name])).entry.split("register(")[1]
    assert "nested=" in entry and "sharding=" in entry and "fake=" in entry and "backward=" in entry


def test_kernels_get_a_mask_in_the_shape_to_which_it_broadcasts() -> None:
    shim = generate_shim.shim(operator_of(*PLANTED["planted_scale"]))
    assert "as_expanded(mask, x.sizes())" in shim and "as_expanded(mask, grad_out.sizes())" in shim
    shim = generate_shim.shim(operator_of("f(Tensor x, Tensor mask, SymInt k) -> Tensor", "--shape", "out=[k]"))
    assert "as_expanded(mask, x.sizes())" in shim


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (PLANTED["planted_topk"], {"experts": "size_of(logits_sizes, -1)"}),
        (PLANTED["planted_sum"], {"rows": 'match.size("rows")', "cols": "size_of(x_sizes, 1)"}),
        (
            ["f(Tensor x) -> Tensor", "--role", "x=[4, rows, *]", "--grad", "x", "--save", ""],
            {"rows": "size_of(x_sizes, 1)"},
        ),
    ],
)
def test_backward_knows_the_sizes_of_a_tensor_that_is_not_saved(words: list[str], sizes: dict[str, str]) -> None:
    operator = operator_of(*words)
    assert generate.sizes(operator.backward) == sizes
    shim, header = generate_shim.shim(operator), generate.header(operator)
    for name, size in sizes.items():
        assert f"args.{name} = {size};" in shim and header.count(f"int64_t {name};") == 2


def samples_of(shape: tuple[int, ...], *words: str) -> list[Any]:
    """Returns the arguments of the samples that the spec of a schema makes for a shape."""
    text = generate_tests.spec(operator_of(*words))
    names: dict[str, Any] = {"Fit": Fit, "Sample": Sample, "torch": torch, "indices_below": indices_below}
    exec(re.search(r"def sample_inputs(?:.|\n)+?\n\n\n", text)[0], names)  # type: ignore[index]  # each spec has it
    return [sample.args for sample in names["sample_inputs"](torch.ones, shape)]


@pytest.mark.parametrize("rank", ["[n]", "[*, a, b]", "[a, b, c]", "[a, b, c, d, e]", "[3, *, 4]"])
@pytest.mark.parametrize("shape", [(), (0, 33), (6, 33), (2, 6, 5, 33)])
def test_samples_have_the_rank_of_the_first_tensor(rank: str, shape: tuple[int, ...]) -> None:
    """The written `sample_inputs` yields two samples with the rank of the first tensor's pattern, also for a shape of
    another rank. Where a shape has fewer dimensions, the samples have two rows: tests of the battery put -inf into the
    second row, and expand the first one."""
    samples = samples_of(shape, "f(Tensor x, SymInt k) -> Tensor", "--role", f"x={rank}")
    assert len(samples) == 2 and all(x.shape[-1:] == (shape[-1:] or (2,)) or "4" in rank for x, _ in samples)
    first = samples[0][0].shape
    assert len(first) == rank.count(",") + 1 if "*" not in rank else len(first) >= rank.count(",")
    assert len(shape) >= len(first) or first[0] > 1 or rank[1] == "3"


@pytest.mark.parametrize("shape", [(), (1, 33), (6, 33), (2, 6, 33), (3, 0), (0, 33)])
@pytest.mark.parametrize(
    "words",
    [
        ["f(Tensor(a!) x, Tensor key, Tensor index) -> ()", "--role", "x=[places, width]", "key=[tokens, width]"],
        ["f(Tensor key, Tensor index, Tensor(a!) x) -> ()", "--role", "key=[tokens, width]", "x=[places, width]"],
        ["f(Tensor x, Tensor index) -> Tensor", "--role", "x=[places, *]"],
    ],
)
def test_an_index_of_samples_has_valid_values(words: list[str], shape: tuple[int, ...]) -> None:
    """Where the op writes, no two of them are equal."""
    written = "(a!)" in words[0]
    samples = samples_of(shape, *words, "index=index:x[0]:[tokens]")
    assert len(samples) == 2
    for args in samples:
        values = dict(zip(re.findall(r"(\w+)[,)]", words[0]), args, strict=True))
        index, x = values["index"], values["x"]
        assert bool((index >= 0).all() and (index < x.shape[0]).all()) and (index.numel() > 0 or shape[:1] == (0,))
        assert not written or len(index.unique()) == index.numel()


def test_an_index_may_be_bounded_by_a_product_of_sizes() -> None:
    words = "f(Tensor x, Tensor index) -> Tensor", "--role", "x=[rows, cols]", "index=index:*x:[tokens]"
    samples = samples_of((3, 5), *words)
    assert len(samples) == 2 and all(index.min() >= 0 and index.max() < x.numel() for x, index in samples)


def test_an_index_without_a_valid_value_gets_no_sample() -> None:
    words = "f(Tensor x, Tensor target) -> Tensor", "--role", "x=[*, vocab]", "target=index:x[-1]:[*]"
    assert len(samples_of((3, 0), *words)) == 0 and len(samples_of((3, 5), *words)) == 2
    assert indices_below((5,), 3, 0, different=True).unique().tolist() == [0, 1, 2]  # more than 3 cannot all differ


def test_without_work_items_an_op_that_writes_returns_early() -> None:
    """The shim of an op that only writes returns early if there are no work items, here if `key` has no elements, and
    not if the written `cache` has none."""
    words = "f(Tensor(a!) cache, Tensor key, Tensor slots) -> ()"
    roles = ["cache=[places, width]", "key=[tokens, width]", "slots=index:cache[0]:[tokens]"]
    shim = generate_shim.shim(operator_of(words, "--role", *roles, "--work", "items=[*key]"))
    assert "if (product_of(sizes_of(key.sizes())) == 0) return;" in shim and "cache.numel() == 0" not in shim


def test_without_work_items_results_are_zeros() -> None:
    """Results may have elements although there are no work items, as the sums of no rows into n segments have."""
    zero = "torch::stable::zero_(each);"
    for work, items in (("items=[*key]", "product_of(sizes_of(key.sizes()))"), ("rows", 'match.size("*")')):
        shim = generate_shim.shim(operator_of("f(Tensor x, Tensor key) -> (Tensor y, Tensor z)", "--work", work))
        assert f"if ({items} == 0) {{\n    for (Tensor each : {{y, z}}) {zero}\n    return {{y, z}};\n" in shim
    unknown = ["--dtype", "y=int64", "--shape", "y=[?]", "z=[1]", "--work", "items=[*x]"]
    assert zero in generate_shim.shim(operator_of("f(Tensor x) -> (Tensor y, Tensor z)", *unknown))
    assert zero not in generate_shim.shim(operator_of("f(Tensor x) -> Tensor", "--grad", "x"))


def test_files_say_that_nothing_checks_an_index_on_a_gpu() -> None:
    operator = operator_of(*PLANTED["planted_sum"])
    for text in (generate.header(operator), generate.cuda(operator), *generate_python.documents(operator)[1:]):
        assert "the values of index" in text and "GPU" in text
    assert "values of" not in generate.cuda(operator_of(*PLANTED["planted_topk"]))


def test_an_overload_out_writes_its_operator_too() -> None:
    operator = operator_of("f.out(Tensor x, *, int k, Tensor(a!) y, Tensor(b!) z) -> ()", "--grad", "x", "--save", "y")
    assert [each.schema for each in operator.registered] == [
        "f(Tensor x, *, int k) -> (Tensor y, Tensor z)",
        "f.out(Tensor x, *, int k, Tensor(a!) y, Tensor(b!) z) -> ()",
        "f_backward(Tensor grad_y, Tensor grad_z, Tensor y, SymInt[] x_sizes, int k) -> Tensor",
    ]
    assert "def f(x: Tensor, *, k: int, out: tuple[Tensor, Tensor] | None = None)" in generate_python.functional(
        operator
    )


def test_nothing_may_be_saved() -> None:
    operator = operator_of("f(Tensor x, float s) -> Tensor", "--grad", "x", "--save", "")
    assert operator.backward.schema == "f_backward(Tensor grad_out, SymInt[] x_sizes, float s) -> Tensor"


def test_samples_have_both_values_of_a_bool_and_the_shape_of_the_other_tensor() -> None:
    """A written spec has a sample with the defaults, and one with another value of each bool, int and float. The tensor
    z, whose role is like:y, has the shape of y and not of the first tensor."""
    words = "f(Tensor x, Tensor y, Tensor z, bool off=False, bool on=True, int count=2, float by=0.25) -> Tensor"
    text = generate_tests.spec(operator_of(words, "--role", "x=[*, n]", "y=[3, heads]", "z=like:y"))
    for line in ("off = (False, True)", "on = (True, False)", "count = (2, 3)", "by = (0.25, 0.5)"):
        assert line in text
    made = dict(re.findall(r"(y|z) = make\((.*?)\)\n", text))
    assert made["z"] == made["y"] != "shape"


def test_specs_say_that_results_are_saved_and_whether_lines_decide_lines() -> None:
    saving = {name for name, words in PLANTED.items() if "saves_results" in generate_tests.spec(operator_of(*words))}
    whole = {name for name, words in PLANTED.items() if "by_lines=False" in generate_tests.spec(operator_of(*words))}
    odd = {"planted_exact", "planted_cache", "planted_most", "planted_tally", "planted_tile"}
    assert saving == {"planted_topk"} and whole == {"planted_sum", "planted_conv", "planted_count"} | odd


def plant(names: list[str]) -> None:
    for name in names:
        assert command.main(["new", name, "--schema", *PLANTED[name]]) == 0


def test_what_is_written_is_laid_out_and_removed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    plant([*PLANTED])
    new = [tree / path for path, text in contents(tree).items() if path not in before and text is not None]
    lint(tree, True, "extension_cpp", new=new)
    check_syntax(tree / "extension_cpp" / "csrc")
    for name in PLANTED:
        assert command.main(["remove", name]) == 0
    after = contents(tree)
    assert after == before


def check_syntax(csrc: Path) -> None:
    """Checks that the C and C++ of the planted ops compile without a warning."""
    warnings = [
        "-fsyntax-only",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        f"-I{csrc}",
    ]
    for name in PLANTED:
        c = [*build_library.compiler("CC", "cc", "gcc"), "-std=c17", "-DCPU_LEVEL_BASELINE"]
        run(*c, *warnings, csrc / name / f"{name}_cpu.c")
    shims = "".join(f'#include "{name}/{name}.cpp"\n' for name in PLANTED)
    torch = [f"-isystem{build_library.torch_folder()}/include", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    cxx = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", *torch, "-DTORCH_EXTENSION_NAME=extension_cpp"]
    run(*cxx, *warnings, "-x", "c++", "-", input=shims)


WRITE = "write the formula"


def battery(tree: Path, names: list[str], *files: str) -> tuple[set[str], set[str]]:
    """Runs the ops' tests. Returns the names of the failed tests without the message WRITE, and of those with it."""
    words = " or ".join(names)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu", *files, "-k", words, cwd=tree)
    reports = re.split(r"\n_{3,} (\S+) _{3,}\n", done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 10, done.stdout[-2000:] + done.stderr[-2000:]
    errors = dict(zip(reports[1::2], reports[2::2], strict=True))
    missing = {name for name, text in errors.items() if WRITE in text}
    return errors.keys() - missing, missing


@pytest.mark.slow
def test_the_page_of_eight_ops_counts_what_is_written(tree: Path) -> None:
    page = (ROOT / "docs" / "eight_ops.md").read_text()
    commands = re.search(r"```sh\n((?:.|\n)+?)```", page)
    assert commands is not None
    found = {}
    for words in map(shlex.split, commands[1].replace("\\\n", "").splitlines()):
        before = contents(tree)
        assert command.main(words[3:]) == 0
        changed = ((before.get(path) or b"", text or b"") for path, text in contents(tree).items())
        pairs = ((old.decode().splitlines(), new.decode().splitlines()) for old, new in changed if old != new)
        diffs = (unified_diff(old, new, n=0, lineterm="") for old, new in pairs)
        found[words[4]] = sum(line[0] == "+" and line[:3] != "+++" for line in chain.from_iterable(diffs))
    assert found == {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+) ", page, re.M)}
    assert f"| {sum(found.values()):,} |" in page


@pytest.mark.slow
def test_only_values_fail_until_the_formula_is_written(tree: Path) -> None:
    environment = with_objects(tree)
    plant([*PLANTED])
    run(sys.executable, "build_library.py", cwd=tree, env=environment)
    others, missing = battery(tree, [*PLANTED], "tests")
    assert not others and missing
    reference = tree / "extension_cpp" / "reference.py"
    text = reference.read_text()
    for name, formula in FORMULAS.items():
        text = re.sub(rf" +raise NotImplementedError\(.* of {name} in .*", indent(formula, "    "), text)
    reference.write_text(text)
    others, missing = battery(tree, [*PLANTED], "tests/battery")  # now each failure names a kernel without formula
    assert not others and missing
    for name, formulas in KERNELS.items():
        kernel = tree / "extension_cpp" / "csrc" / name / f"{name}_cpu_kernel.h"
        left = iter(formulas)
        loops = rf"(?:  if \(args->count(?:(?!^  }}).)*  }}\n)?  /\* {re.escape(generate.MARK)} \*/\n.*?(?=^}})"
        kernel.write_text(re.sub(loops, lambda _, left=left: next(left) + "\n", kernel.read_text(), flags=re.S | re.M))
    run(sys.executable, "build_library.py", cwd=tree, env=environment)
    assert battery(tree, [*KERNELS], "tests") == (set(), set())
    check = ["check", "extension_cpp", "extension_cpp::planted_cache", "--spec", "tests/specs/planted_cache.py"]
    run_python("-m", "extension_cpp", *check, cwd=tree)
    for name in PLANTED:
        assert command.main(["remove", name]) == 0
    assert not [path for path in contents(tree) for name in PLANTED if name in path.name]


def test_a_zero_of_an_unwritten_kernel_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import judge

    folder = tmp_path / "extension_cpp" / "csrc" / "planted_op"
    folder.mkdir(parents=True)
    (folder / "planted_op_cuda.cu").write_text(f"//\n// {generate.MARK}\n")
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    place = "extension_cpp/csrc/planted_op/planted_op_cuda.cu:2"
    for device in ("cuda", None):
        assert judge.unwritten("planted_op", device) == f"write the formula in {place}"
    assert judge.unwritten("planted_op", "cpu") == judge.unwritten("relu", None) == ""


def test_too_many_values_of_a_list_with_an_empty_default():
    def op(x, ks=()):
        """Stands for an operator."""

    (wrong,) = too_many_values(op, Sample((torch.ones(2), ())), {"ks": "at most 2 values"})
    assert len(wrong.args[1]) == 3
