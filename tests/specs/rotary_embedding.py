import torch

import extension_cpp
from tests.judge import run_with
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms


def factors(make, shape):
    """Makes cos and sin as independent numbers from -1 to 1, in make's layout and without requires_grad."""
    made = [make(shape).detach() for _ in range(2)]
    for x in made:
        x.new_empty(0).set_(x.untyped_storage()).cos_()  # writes the whole storage, because x may be expanded
    return made


def sample_inputs(make, shape):
    if not 2 <= len(shape) <= 4:
        return
    *outer, tokens, width = shape
    of_k = (*outer[:-1], min(outer[-1], 2), tokens, width) if outer else shape
    q, k = make(shape), make(of_k)
    # All columns of tensors with heads and of narrow rows are rotated. Only a part of wide rows without heads is,
    # because torch.compile makes another graph when the number of rotated columns stops being equal to the width. A
    # part is a multiple of 16 columns, for which the GPU uses its widest vectors.
    rotated = width // 2 * 2 if outer or width < 22 else width * 3 // 4 // 16 * 16
    yield Sample((q, k, *factors(make, (tokens, rotated))))
    # Here a part of each row is rotated. Half types have float32 factors, and each sequence has its own factors.
    batch = shape[:1] if len(shape) == 4 else ()
    q, k = make(shape), make(of_k)
    cos, sin = factors(make, (*batch, tokens, width // 4 * 2))
    if q.dtype.itemsize == 2:
        cos, sin = cos.float(), sin.float()
    yield Sample((q, k, cos, sin), {"interleaved": True})
    if len(shape) == 4:
        yield Sample((make(shape), make(of_k), *factors(make, (1, tokens, width // 4 * 2))))


def error_inputs(device):
    q, k = torch.ones(2, 4, 3, 8, device=device), torch.ones(2, 1, 3, 8, device=device)
    cos = torch.ones(3, 6, device=device)
    op = "extension_cpp::rotary_embedding: expected"

    def call(message, q=q, k=k, cos=cos, sin=cos):
        return ErrorSample((q, k, cos, sin), f"{op} {message}")

    yield call("q to be float64, float32, bfloat16 or float16, but got int32", q=q.int())
    yield call("k to be float32 like q, but got bfloat16", k=k.bfloat16())
    yield call("cos to be float32 like q, but got float64", cos=cos.double())
    message = "cos to be bfloat16 like q or float32, but got float16"
    yield call(message, q=q.bfloat16(), k=k.bfloat16(), cos=cos.half(), sin=cos.half())
    yield call("sin to be bfloat16 like cos, but got float32", q=q.bfloat16(), k=k.bfloat16(), cos=cos.bfloat16())
    shapes = "(tokens, width), (heads, tokens, width) or (batch, heads, tokens, width)"
    yield call(f"q of shape {shapes}, but got [8]", q=q[0, 0, 0])
    yield call(f"q of shape {shapes}, but got [1, 2, 4, 3, 8]", q=q[None], k=k[None])
    message = "k of shape [2, *, 3, 8] like q, with any number of heads, but got"
    yield call(f"{message} [4, 3, 8]", k=q[0])
    yield call(f"{message} [1, 1, 3, 8]", k=k[:1])
    yield call(f"{message} [2, 1, 2, 8]", k=k[:, :, :2])
    yield call(f"{message} [2, 1, 3, 7]", k=k[..., :7])
    message = "cos of shape [3, rotated] or [1 or 2, 3, rotated] for the tokens of q, but got"
    yield call(f"{message} [6]", cos=cos[0])
    yield call(f"{message} [2, 6]", cos=cos[:2])
    yield call(f"{message} [3, 3, 6]", cos=cos.expand(3, 3, 6))
    yield call(f"{message} [1, 1, 3, 6]", cos=cos[None, None])
    message = "cos of shape [3, rotated] or [1, 3, rotated] for the tokens of q, but got [2, 3, 6]"
    yield call(message, q=q[0], k=k[0], cos=cos.expand(2, 3, 6))
    yield call("sin of shape [3, 6] like cos, but got [3, 4]", sin=cos[:, :4])
    message = "cos to have an even number of columns, at most the 8 of q, but got"
    yield call(f"{message} 5", cos=cos[:, :5], sin=cos[:, :5])
    yield call(f"{message} 10", cos=cos.repeat(1, 2)[:, :10], sin=cos.repeat(1, 2)[:, :10])
    message = "cos and sin not to require grad: their derivative is not implemented"
    yield call(message, cos=cos.clone().requires_grad_())
    yield call(message, sin=cos.clone().requires_grad_())
    if device != "cpu":
        yield call(f"k on {q.device} like q, but got cpu", k=k.cpu())
        yield call(f"cos on {q.device} like q, but got cpu", cos=cos.cpu())
        yield call(f"sin on {q.device} like cos, but got cpu", sin=cos.cpu())


def terms(call):
    """Bounds the rounding errors of a product with cos, a product with sin, and their sum."""
    q, k, cos, sin = call.sample.args
    zero = torch.zeros_like(cos)
    parts = [
        run_with(extension_cpp.reference.rotary_embedding, Sample((q, k, *f), call.sample.kwargs), call.grads)
        for f in ((cos, zero), (zero, sin))
    ]
    sizes = [a.abs() + b.abs() for (_, a), (_, b) in zip(*(part.tensors() for part in parts), strict=True)]
    numbers = call.leaf_numbers()
    return [Terms(x, 2) for x in sizes[:2]], {i: Terms(x, 2) for i, x in zip(numbers, sizes[2:], strict=True)}


def bench_sample(make, shape):
    """Makes a batch of 4 with heads of width 64, a fifth of them key heads. A token's heads are adjacent in memory."""
    rows, cols = shape
    heads = max(cols // 64, 2)
    batch, width = 4 if rows % 4 == 0 else 1, cols // heads // 2 * 2
    of_k = max(heads // 5, 1)
    q, k = (make((batch, rows // batch, n, width)) for n in (heads - of_k, of_k))
    q, k = (x.transpose(1, 2).detach().requires_grad_(x.requires_grad) for x in (q, k))
    position = torch.arange(rows // batch, device=q.device, dtype=torch.float32)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, width, 2, device=q.device) / width)
    cos, sin = (f.repeat(1, 2)[None].to(q.dtype) for f in (angle.cos(), angle.sin()))
    return Sample((q, k, cos, sin))


def with_options(make, shape, chosen):
    """Makes a sample with the chosen options. "rotated": half of the columns are rotated. "batch": each sequence has
    its own factors. "float32": the factors are float32 beside half types."""
    *outer, tokens, width = shape
    of_k = (*outer[:-1], min(outer[-1], 2), tokens, width) if outer else shape
    q, k = make(shape), make(of_k)
    rotated = width // 4 * 2 if "rotated" in chosen else width // 2 * 2
    batch = (shape[0] if len(shape) == 4 else 1,) if "batch" in chosen else ()
    cos, sin = factors(make, (*batch, tokens, rotated))
    if "float32" in chosen and q.dtype.itemsize == 2:
        cos, sin = cos.float(), sin.float()
    options = {"interleaved": True} if "interleaved" in chosen else {}
    return Sample((q, k, cos, sin), options)


SPEC = OpSpec(
    name="rotary_embedding",
    options=Options(
        {"interleaved": (True,), "rotated": (True,), "batch": (True,), "float32": (True,)},
        with_options,
    ),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench_sample, forward=2, backward=2, flat=True, operations=(3, 3)),
    keeps_strides=True,
    terms=terms,
    launches=(1, 1),
    least_rank=2,
    greatest_rank=4,
)
