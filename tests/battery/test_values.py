"""Tests that results and gradients are right for many shapes and layouts, also with overflow, infinities and NaN."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.battery import every_dtype, every_op
from tests.checks import (
    LAYOUTS,
    Expected,
    as_tuple,
    assert_right,
    check,
    expect,
    leaves,
    maker,
    random_grad,
    run,
    with_layout,
)
from tests.opspec import OpSpec, Sample

SHAPES = [
    *itertools.product((0, 1, 33), (1, 31, 32, 33, 1023, 1025, 3584)),
    *[
        (),
        (0,),
        (1,),
        (4097,),
        (3, 0),
        (0, 0),
        (2, 3, 5),
        (2, 0, 5),
        (7, 1, 33),
        (2, 3, 4, 5),
        (1, 1, 1, 1),
        (2, 9, 17, 33),
    ],
]


@every_op
@every_dtype
def test_right_for_every_shape(spec: OpSpec, dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    # A CUDA grid has at most 65535 blocks along its second dimension, which 65536 rows exceed.
    many = 65536 if device == "cuda" or request.config.getoption("--slow") else 4099
    for shape in [*SHAPES, *((many, width) for width in (1, 7, 33))]:
        for sample in spec.sample_inputs(maker(device, dtype, seed=10 + len(shape)), shape):
            check(spec, sample)


@every_op
@every_dtype
def test_many_rows(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results are right for tensors that fill the GPU, at widths from 8 to 131072 for which kernels have different
    shapes."""
    if device != "cuda":
        pytest.skip("how many rows there are decides only on the GPU which kernel takes them")
    narrow = (8, 48, 200, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2304, 2560, 3072, 4096, 4608, 5120)
    wide = (6144, 7168, 8192, 10240, 12288, 16384, 20480, 32768, 36864, 45056)
    wider = (49152, 55296, 81920, 98304, 114688, 131072)
    between_lines = (24584, 49160, 50260, 65544)
    uneven = (18432, 60000, 100000, 118000, 122880)  # some threads of a cluster load one vector more than other threads
    odd = (33, 129, 257, 385, 513, 641, 769, 1025, 1281, 1537, 2049, 2561, 3073, 3585, 4097, 5121, 6145, 8191)
    wide_odd = (8193, 10249, 14001, 16385, 36865, 43013, 50257, 65537, 81921, 120001)
    # At both widths the last CTA of a cluster gets no elements in float32. At the second width this also holds for a
    # half type with a residual.
    last_block_empty = (30725, 61449)
    widths = (*narrow, *wide, *wider, *between_lines, *uneven, *odd, *wide_odd, *last_block_empty)
    # Ops with matrix products are tested at three widths, because cuBLAS chooses their kernels. One kernel of cuBLAS
    # 13.0 is wrong: it leaves out the last 8 of 24584 float16 features on an H200, even in torch.mm alone.
    for width in (1025, 4096, 50257) if spec.bench.flat or spec.has_products else widths:
        # There are so many rows that each cluster processes several of them.
        size = (17 if width <= 16384 else 10) << 20
        shape = (max(size // dtype.itemsize // width, 400 if width <= 32768 else 100) + 3, width)
        # The spec of an op with a slow reference yields no sample for such a shape.
        for sample in itertools.islice(spec.sample_inputs(maker(device, dtype), shape), 1):
            ours = check(spec, sample)
            with torch.no_grad():  # calls the no-grad overload, which may return fewer outputs
                outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
            for output, as_before in zip(outputs, ours.outputs, strict=True):
                assert torch.equal(output, as_before), f"{spec.name} {shape}: without gradients"


@every_op
@every_dtype
def test_few_rows(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results are right for few rows, for which the GPU uses other kernels or other numbers of threads per row."""
    if device != "cuda":
        pytest.skip("how many rows there are decides only on the GPU which kernel takes them")
    for rows, width in itertools.product((3, 132, 133, 513), (64, 256, 512, 1024, 2048, 4096, 8192, 16384)):
        for sample in itertools.islice(spec.sample_inputs(maker(device, dtype), (rows, width)), 1):
            check(spec, sample)


@every_op
@every_dtype
def test_any_layout(spec: OpSpec, dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    """Results are right for every pair of an input layout and a grad_out layout. For example, .sum().backward() makes
    an expanded grad_out. On the CPU, dtypes other than float32 are tested without --slow only with equal layouts,
    because all dtypes share the code that reads strides."""
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    if dtype is not torch.float32 and device == "cpu" and not request.config.getoption("--slow"):
        pairs = [pair for pair in pairs if len(set(pair)) == 1]
    for shape in [(6, 33), (3, 4, 33), (2, 3, 4, 37), (2, 64, 8, 8)]:
        truths: dict[tuple[int, bool, bool], Expected] = {}  # of the layouts, only "expanded" changes values
        for layout, grad_layout in pairs:
            for number, sample in enumerate(spec.sample_inputs(maker(device, dtype, layout=layout), shape)):
                values = (number, layout == "expanded", grad_layout == "expanded")
                if values not in truths:
                    truths[values] = expect(spec, sample, grad_layout)
                what = f"{layout}, grad_out {grad_layout}"
                ours = check(spec, sample, grad_layout, what, expected=truths[values])
                if spec.keeps_strides:
                    expected = torch.empty_like(sample.args[0]).stride()
                    assert ours.outputs[0].stride() == expected, f"{spec.name} {shape} {layout}: strides"


@every_op
@every_dtype
def test_mixed_layouts(spec: OpSpec, dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    """Results are right if the tensors of a call have two layouts in turn. On the CPU without --slow, dtypes other than
    float32 have fewer pairs, in which each layout is once the first and once the second."""
    truths: dict[tuple[int, bool, bool], Expected] = {}
    pairs = list(itertools.permutations(LAYOUTS, 2))
    if dtype is not torch.float32 and device == "cpu" and not request.config.getoption("--slow"):
        pairs = list(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
    for first, second in pairs:
        turns = itertools.cycle(
            [maker(device, dtype, seed=1, layout=first), maker(device, dtype, seed=2, layout=second)]
        )
        samples = spec.sample_inputs(lambda shape, turns=turns: next(turns)(shape), (2, 6, 5, 33))
        for number, sample in enumerate(samples):
            values = (number, first == "expanded", second == "expanded")
            if values not in truths:
                truths[values] = expect(spec, sample)
            check(spec, sample, "contiguous", f"{first} with {second}", expected=truths[values])


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # 4 and 8 elements per 16-byte vector
def test_one_operand_in_another_layout(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results are right if a single input or grad_out has another layout. A kernel may load vectors only if all tensors
    are aligned. Rows of 12 elements are not a multiple of a half type's 8-element vectors."""
    for shape in [(8, 12), (5, 264)] if device == "cuda" else [(8, 12)]:
        for sample in spec.sample_inputs(maker(device, dtype), shape):
            expected = expect(spec, sample)
            count = len(expected.whole.exact.outputs)
            places = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.requires_grad]
            for layout, place in itertools.product(("offset", "spaced"), [*places, *range(-count, 0)]):
                args, grads = list(sample.args), ["contiguous"] * count
                if place < 0:
                    grads[place] = layout
                elif args[place].dim():
                    args[place] = with_layout(args[place].detach(), layout).requires_grad_()
                left = iter(grads)
                ours = run(
                    spec.function,
                    Sample(tuple(args), sample.kwargs),
                    lambda output, left=left: random_grad(next(left))(output),
                )
                what = f"{spec.name}{shape} {dtype}, {f'argument {place}' if place >= 0 else grads} {layout}"
                assert_right(ours, expected, what)


@every_op
@every_dtype
def test_rows_with_gaps(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results are right if three unused elements follow each row, so that most rows are not aligned to 16 bytes."""
    shapes = [(5, 33), (9, 256), *([(300, 1024), (135, 4096), (40, 16384), (9, 50257)] if device == "cuda" else [])]
    for shape in shapes:
        for sample in spec.sample_inputs(maker(device, dtype, layout="padded"), shape):
            check(spec, sample, "padded", "padded rows")


@every_op
@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_inf_at_each_position(
    spec: OpSpec, dtype: torch.dtype, value: float, device: str, request: pytest.FixtureRequest
) -> None:
    """If one element of an input is NaN or infinite, the results are NaN or infinite where the reference's are. If the
    reference computes inf * 0, the op may return the finite limit. A row of 67 columns has two blocks and a tail on the
    CPU, and vectors and a tail on a GPU. Without --slow, only a NaN in float32 is put into every column."""
    slow = request.config.getoption("--slow")
    for number, sample in enumerate(spec.sample_inputs(maker(device, dtype), (2, 67))):
        for x in leaves(sample):
            everywhere = number == 0 and dtype is torch.float32 and (value != value or slow)
            first = x.numel() if slow or x.dim() < 2 else x.shape[-1]  # the same code handles all rows
            step = 22 if dtype is torch.float32 or slow else 66
            places = {*range(0, x.numel(), step), *range(first if everywhere else 0)}  # includes columns 0 and 66
            for index in sorted(places):
                keep = x.detach().clone()
                x.detach().view(-1)[index] = value
                check(spec, sample, what=f"{value} at {index}", limits=value == value)
                x.detach().copy_(keep)


@every_op
@every_dtype
@pytest.mark.parametrize(
    "mean, spread", [(4e4, 1.0), (0.0, 1e30), (0.0, 1e-39), (0.0, 1e-44), (-90.0, 5.0), (0.0, 30.0)]
)
def test_hostile_numbers(
    spec: OpSpec, dtype: torch.dtype, device: str, mean: float, spread: float, request: pytest.FixtureRequest
) -> None:
    """Results are right for overflow, subnormal numbers and both ends of exp's range, on a GPU also in aligned rows."""
    slow = request.config.getoption("--slow")
    rows = 33 if slow else 9
    for width in (1025, 1024) if slow or device == "cuda" else (1025,):
        for sample in spec.sample_inputs(maker(device, dtype, mean=mean, spread=spread), (rows, width)):
            check(spec, sample, what=f"{width} columns, mean {mean}, spread {spread}", limits=True)


@every_op
def test_rows_of_minus_infinity(spec: OpSpec, device: str) -> None:
    for width in (64, 65):
        for sample in spec.sample_inputs(maker(device, torch.float32), (3, width)):
            sample.args[0].detach()[1] = -float("inf")
            # `limits` allows a finite value where the reference has NaN. On a GPU the reference is PyTorch's fused
            # rms_norm, which in a norm over all of x gives NaN for a finite number times 0.
            check(spec, sample, limits=True)


def last_rows(sample: Sample, rows: int, count: int) -> Sample:
    """Returns a copy of the sample in which each tensor of `rows` rows has only its last `count` rows."""

    def cut(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.shape[:1] != (rows,):
            return x
        return x.detach()[-count:].clone().requires_grad_(x.requires_grad)

    return Sample(tuple(map(cut, sample.args)), {name: cut(x) for name, x in sample.kwargs.items()})


def results_of_last(spec: OpSpec, sample: Sample, rows: int, count: int) -> dict[str, torch.Tensor]:
    """Runs the sample. Returns the last `count` of `rows` rows of its results and gradients, and frees the others."""

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.detach()[-count:].clone() if x.shape[:1] == (rows,) else x.detach()

    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
    found = {f"result {number}": last(output) for number, output in enumerate(outputs)}
    y = outputs[0]
    for number, x in enumerate(leaves(sample)):
        if x.shape[:1] == y.shape[:1] == (rows,):
            found[f"gradient {number}"] = last(torch.autograd.grad(y, x, y.detach(), retain_graph=True)[0])
    return found


def differences(spec: OpSpec, sample: Sample, rows: int, count: int) -> list[str]:
    """Returns the names of results and gradients whose last rows differ from those of a call with only these rows."""
    many = results_of_last(spec, sample, rows, count)
    few = results_of_last(spec, last_rows(sample, rows, count), count, count)
    return [name for name in many if not torch.equal(many[name], few[name])]


@every_op
@pytest.mark.slow
@pytest.mark.parametrize("cols", [1 << 16, 50257])
def test_more_than_two_to_the_31_elements(spec: OpSpec, cols: int, device: str) -> None:
    """In a tensor of more than 2^31 elements, the last rows have the results of a call with only these rows. On a GPU,
    this is also tested with more than 2^32 elements, with a row width that does not divide 2^32. Samples in which a
    row's result depends on other rows, as a small tensor shows, are left out."""
    if spec.positional:
        pytest.skip("no small tensor has these elements' masks: test_dropout.py and test_fused_norm.py have this test")
    if spec.has_products:
        pytest.skip("its matrix products and their memory are PyTorch's")
    if cols != 1 << 16 and device == "cpu":
        pytest.skip("the CPU's kernels count in int64 alone, and 2^32 elements take minutes")
    few = 64  # a call with fewer rows might use more threads per row, and sum a row in another order
    # The row counts `many` and, below, 3 * few are multiples of `few`. In each call the last rows then have the same
    # alignment, and are summed in the same order.
    many = ((1 << 31 if cols == 1 << 16 else 1 << 32) // cols // few + 1) * few
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(few, cols, generator=generator).bfloat16().to(device)

    def samples(rows: int) -> Iterator[Sample]:
        def make(shape: Sequence[int]) -> torch.Tensor:
            if shape[0] != rows:
                return torch.ones(shape, dtype=torch.bfloat16, device=device)
            x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            x[-few:] = last[:, : shape[-1]].view(few, *shape[1:])
            return x.requires_grad_(device == "cuda")

        # The dimension of size 1 separates rows in norms over two dimensions. In cross_entropy, dimension 1 is classes.
        return spec.sample_inputs(make, (rows, cols) if spec.name == "cross_entropy" else (rows, 1, cols))

    apart = [number for number, sample in enumerate(samples(3 * few)) if not differences(spec, sample, 3 * few, few)]
    compared = 0
    for number, sample in enumerate(samples(many)):  # if the op's reference is slow, large tensors have fewer samples
        if number in apart:
            assert differences(spec, sample, many, few) == [], f"sample {number}"
            compared += 1
    assert compared, "no sample has rows that do not depend on each other"
