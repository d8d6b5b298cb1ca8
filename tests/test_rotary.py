"""Compares rotary_embedding with functions of Hugging Face transformers, on q and k in the layouts of models."""

import itertools

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp import reference
from tests.checks import Calls, check, maker, run
from tests.opspec import DTYPES, Sample
from tests.specs.rotary_embedding import SPEC, factors

BATCH, HEADS, KEY_HEADS, TOKENS = 2, 6, 2, 9


def angles(width: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of angles (BATCH, TOKENS, width / 2). Each sequence begins at its own position."""
    position = torch.arange(TOKENS, device=device)[None, :, None] + torch.tensor([[[0]], [[100]]], device=device)
    angle = position * 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    return angle.cos(), angle.sin()


def packed(width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Returns q and k as views of one linear layer's output: in each token the heads of q, k and v are adjacent."""
    heads = HEADS + 2 * KEY_HEADS
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(BATCH, TOKENS, heads * width, generator=generator).to(device, dtype)
    q, k, _ = qkv.view(BATCH, TOKENS, heads, width).transpose(1, 2).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
    return q, k


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Compares sums of two products of numbers up to 5. transformers rounds each product, and our op only the sum."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * 5 * torch.finfo(ours.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_llama(dtype: torch.dtype, device: str) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = packed(64, dtype, device)
    cos, sin = (torch.cat([f, f], -1).to(dtype) for f in angles(64, device))
    for ours, theirs in zip(
        extension_cpp.rotary_embedding(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert_near(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_phi_and_gpt_neox(dtype: torch.dtype, device: str) -> None:
    """The op rotates the first part of each row and keeps the rest, as Phi and GPT-NeoX do."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    q, k = packed(80, dtype, device)
    cos, sin = (torch.cat([f, f], -1).to(dtype) for f in angles(32, device))
    ours = extension_cpp.rotary_embedding(q, k, cos, sin)
    theirs = apply_rotary_pos_emb(q[..., :32], k[..., :32], cos, sin)
    for x, rotated, y in zip((q, k), theirs, ours, strict=True):
        assert_near(y, torch.cat([rotated, x[..., 32:]], -1) if rotated.shape != x.shape else rotated)
        assert torch.equal(y[..., 32:], x[..., 32:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_cohere_and_gpt_j(dtype: torch.dtype, device: str) -> None:
    """With interleaved=True the op rotates adjacent elements, as Cohere and GPT-J do. Cohere's cos and sin
    have each number twice in a row. GPT-J's function takes each number once, and repeats it."""
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
    from transformers.models.gptj import modeling_gptj

    q, k = packed(64, dtype, device)
    halves = angles(64, device)
    cos, sin = (f.repeat_interleave(2, -1).to(dtype) for f in halves)
    ours = extension_cpp.rotary_embedding(q, k, cos, sin, interleaved=True)
    for y, theirs in zip(ours, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert_near(y, theirs)
    for x, y in zip((q, k), ours, strict=True):  # GPT-J's function takes (batch, tokens, heads, width)
        cos_j, sin_j = (f.to(dtype) for f in halves)
        assert_near(y, modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin_j, cos_j).transpose(1, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_float_factors_beside_half(interleaved: bool, device: str) -> None:
    """float32 factors beside half types are not rounded: the result is the float32 result, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k = packed(80, dtype, device)
        cos, sin = factors(maker(device, torch.float32), (BATCH, TOKENS, 72))
        ours = extension_cpp.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
        exact = extension_cpp.rotary_embedding(q.float(), k.float(), cos, sin, interleaved=interleaved)
        for y, z in zip(ours, exact, strict=True):
            assert torch.equal(y, z.to(dtype))


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_with_unequal_halves(interleaved: bool, device: str) -> None:
    """The gradient is grad_out times the transposed matrix of the op. The op applied to unit vectors gives this matrix.
    Each pair of elements has four different factors."""
    width = 6
    cos, sin = factors(maker(device, torch.float64), (TOKENS, width))
    eye = torch.eye(width, device=device, dtype=torch.float64)[:, None].expand(width, TOKENS, width)
    matrix, _ = extension_cpp.rotary_embedding(eye, eye[:1], cos, sin, interleaved=interleaved)  # (from, token, to)
    assert not torch.equal(matrix, matrix.transpose(0, 2))
    grad = torch.randn(HEADS, TOKENS, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
    q = torch.zeros_like(grad).requires_grad_()
    y, _ = extension_cpp.rotary_embedding(q, q.detach(), cos, sin, interleaved=interleaved)
    (ours,) = torch.autograd.grad(y, q, grad)
    torch.testing.assert_close(ours, torch.einsum("hto,fto->htf", grad, matrix))


# Widths of a row and of its rotated part. On a GPU half of this part is whole vectors of 16, 8 or 4 bytes, or not, and
# the rest of the row has one or two vectors. On the CPU a half is one block, several blocks, or has a tail.
WIDTHS = [(64, 64), (128, 128), (80, 32), (96, 96), (72, 48), (40, 24), (20, 8), (18, 12), (10, 10), (7, 6), (5, 0)]
WIDTHS += [(256, 192), (65, 64), (200, 136)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_and_layouts(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    """Results are right for q and k that are contiguous, views of packed memory, or unaligned. The number of heads is
    no multiple of those that a GPU thread processes, and the number of tokens no multiple of a tile."""
    make = maker(device, dtype)
    for (width, rotated), heads in zip(WIDTHS, itertools.cycle([(1, 1), (6, 2), (4, 0), (7, 1), (0, 3)]), strict=False):
        for layout in ("contiguous", "packed", "offset"):
            tensors = []
            for count in heads:
                if layout == "packed":
                    x = make((BATCH, 35, count + 3, width)).detach().transpose(1, 2)[:, 1 : count + 1]
                else:
                    x = maker(device, dtype, layout=layout)((BATCH, count, 35, width)).detach()
                tensors.append(x.requires_grad_())
            cos, sin = factors(make, (35, rotated))
            check(SPEC, Sample((*tensors, cos, sin), {"interleaved": interleaved}), what=f"{layout} {rotated}")


@pytest.mark.parametrize("rows", ["transposed", "packed", "broadcast"])
def test_reads_rows_where_they_lie(rows: str, device: str) -> None:
    """Forward and backward allocate only the two results and copy nothing."""
    q, k = packed(64, torch.float32, device)
    if rows == "transposed":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif rows == "broadcast":
        q, k = q[:1].expand_as(q), k[:, :1].expand(-1, 3, -1, -1)
    cos, sin = (torch.cat([f, f], -1)[:1] for f in angles(64, device))
    for op in (torch.ops.extension_cpp.rotary_embedding, torch.ops.extension_cpp.rotary_embedding_backward):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            ours = op(q, k, cos, sin, False)
        names = [event.name for event in profiler.events() if event.name.startswith("aten::")]
        assert set(names) <= {"aten::empty_strided"}, names
        assert [y.stride() for y in ours] == [torch.empty_like(x).stride() for x in (q, k)]


def test_results_in_the_order_of_the_inputs(device: str) -> None:
    """For packed inputs results are (batch, tokens, heads, width) in memory, which attention reads without a copy."""
    q, k = packed(64, torch.bfloat16, device)
    cos, sin = (torch.cat([f, f], -1).bfloat16() for f in angles(64, device))
    for y in extension_cpp.rotary_embedding(q, k, cos, sin):
        assert y.transpose(1, 2).is_contiguous()


def test_one_result_used(device: str) -> None:
    make = maker(device, torch.float64)
    q, k = make((4, 5, 8)), make((2, 5, 8))
    cos, sin = factors(make, (5, 8))
    both = []
    for function in (extension_cpp.rotary_embedding, reference.rotary_embedding):
        of_q, of_k = function(q, k, cos, sin)
        of_q, of_k = of_q.cos().sum(), of_k.cos().sum()
        both.append([*torch.autograd.grad(of_q, q, retain_graph=True), *torch.autograd.grad(of_k, k)])
    for ours, exact in zip(*both, strict=True):
        torch.testing.assert_close(ours, exact)


def test_autocast_of_mixed_dtypes(device: str) -> None:
    """Autocast converts q and k to the wider of their dtypes, and cos and sin to float32 if their dtypes differ."""
    q, k = packed(64, torch.float32, device)
    cos, sin = (torch.cat([f, f], -1) for f in angles(64, device))
    half = torch.bfloat16
    calls = {
        (q.dtype, k.dtype): ((q, k.to(half), cos, sin), (q, k.to(half).float(), cos, sin)),
        (half, half): ((q.to(half), k.to(half), cos, sin.half()), (q.to(half), k.to(half), cos, sin.half().float())),
        (q.dtype, q.dtype): ((q, k, cos.half(), sin), (q, k, cos.half().float(), sin)),
    }
    for mixed, same in calls.values():
        with pytest.raises(RuntimeError, match="extension_cpp::rotary_embedding: expected"):
            extension_cpp.rotary_embedding(*mixed)
        with torch.autocast(device, half):
            ours = extension_cpp.rotary_embedding(*mixed)
        for y, z in zip(ours, extension_cpp.rotary_embedding(*same), strict=True):
            assert y.dtype == z.dtype and torch.equal(y, z)


def test_one_call_each_way(device: str) -> None:
    make = maker(device, torch.float32)
    sample = Sample((make((4, 5, 8)), make((2, 5, 8)), *factors(make, (5, 8))))
    with Calls() as calls:
        run(extension_cpp.rotary_embedding, sample, torch.ones_like)
    names = [op._schema.name.removesuffix("_no_grad") for op, _, _ in calls.made]
    assert names == ["extension_cpp::rotary_embedding", "extension_cpp::rotary_embedding_backward"]
