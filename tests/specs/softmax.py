import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))
    if len(shape) > 1:
        yield Sample((make(shape), 0))
    if len(shape) > 2:
        yield Sample((make(shape), -2))


def error_inputs(name):
    def of(device):
        x = torch.ones(2, 3, device=device)
        op = f"extension_cpp::{name}: expected"
        yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
        yield ErrorSample((x, 2), f"{op} dim in [-2, 1], but got 2")
        yield ErrorSample((x, -3), f"{op} dim in [-2, 1], but got -3")
        yield ErrorSample((x[0, 0], 1), f"{op} dim in [-1, 0], but got 1")

    return of


def product(a, b):
    """Returns a * b, but 0 where a is 0, even if b is infinite: a term with the weight 0 adds nothing to a sum."""
    return torch.where(a == 0, 0, a * b)


def dim_of(call):
    return (*call.sample.args, -1)[1]


def size_of_softmax(x, dim):
    """Returns sizes that bound softmax's rounding errors. exp multiplies the error of its argument x - max, and the sum
    of the exponentials has the errors of its terms."""
    distance, p = (x - x.amax(dim, keepdim=True)).abs(), torch.softmax(x, dim)
    return product(p, 1 + distance + product(p, distance).sum(dim, keepdim=True))


def softmax_terms(call):
    (x, *_), (p,), (g,), dim = call.sample.args, call.outputs, call.grads, dim_of(call)
    c = call.c_of_exp
    if x.numel() == 0 or x.dim() == 0:
        return [Terms(torch.ones_like(x), c)], {0: Terms(g.abs(), c)}
    size = size_of_softmax(x, dim)
    p_moves = call.rounding(p) + c * call.eps * size + call.least
    difference = (g - (g * p).sum(dim, keepdim=True)).abs()
    gradient = p * (g.abs() + (g * p).abs().sum(dim, keepdim=True))
    moves = p_moves * difference + p * (g.abs() * p_moves).sum(dim, keepdim=True)
    # `rounded` bounds the error where exponentials and their products underflow to 0.
    rounded = call.least * (g.abs() + g.abs().sum(dim, keepdim=True))
    return [Terms(size, c, rounded=call.least)], {0: Terms(gradient, c, moves, rounded)}


def softmax_from_saved(call):
    (x, *_), (p,), (g,), dim = call.sample.args, call.outputs, call.grads, dim_of(call)
    dims = dim if x.dim() else ()
    return (torch.softmax(x, dim).detach(),), [p * (g - (g * p).sum(dims, keepdim=True))]


def log_softmax_terms(call):
    (x, *_), (y,), (g,), dim = call.sample.args, call.outputs, call.grads, dim_of(call)
    c = call.c_of_exp
    if x.numel() == 0 or x.dim() == 0:
        return [Terms(torch.ones_like(x), c)], {0: Terms(2 * g.abs(), c)}
    p = torch.softmax(x, dim)
    distance = (x - x.amax(dim, keepdim=True)).abs()
    size = x.abs() + torch.logsumexp(x, dim, keepdim=True).abs() + 1 + product(p, distance).sum(dim, keepdim=True)
    y_moves = call.rounding(y) + c * call.eps * size
    p = torch.exp(y)
    gradient = g.abs() + product(p, 1 + y.abs()) * g.abs().sum(dim, keepdim=True)
    moves = product(p, torch.expm1(y_moves.clamp(max=300))) * g.sum(dim, keepdim=True).abs()
    rounded = call.least * g.abs().sum(dim, keepdim=True)  # for exponentials that underflow to 0
    return [Terms(size, c)], {0: Terms(gradient, c, moves, rounded)}


def log_softmax_from_saved(call):
    (x, *_), (y,), (g,), dim = call.sample.args, call.outputs, call.grads, dim_of(call)
    dims = dim if x.dim() else ()
    return (torch.log_softmax(x, dim).detach(),), [g - torch.exp(y) * g.sum(dims, keepdim=True)]


def spec(name, function, reference, operations, terms, from_saved):
    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        sample_inputs=sample_inputs,
        error_inputs=error_inputs(name),
        bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, operations=operations),
        keeps_strides=True,
        launches=(1, 1),
        terms=terms,
        from_saved=from_saved,
        variants={"columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=3)},
    )


SPEC = spec(
    "softmax",
    extension_cpp.softmax,
    extension_cpp.reference.softmax,
    (5, 4),
    softmax_terms,
    softmax_from_saved,
)
