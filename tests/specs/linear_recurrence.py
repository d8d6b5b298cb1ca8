import torch

from tests import loops
from tests.judge import of_absolute_values, run_with
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms

LONGEST = 1100  # elements along dim: the reference is a slow loop; tests/test_scan.py has more


def factors(make, shape):
    """Returns a tensor of factors between 0 and 1. The sigmoid covers the whole storage, so that any layout works."""
    a = make(shape)
    memory = torch.empty(0, dtype=a.dtype, device=a.device).set_(a.untyped_storage())
    memory.sigmoid_()
    return a


def sample_inputs(make, shape):
    if len(shape) == 0:
        yield Sample((factors(make, shape), make(shape), make(shape)), {"dim": -1})
        return
    if shape[-1] <= LONGEST:
        yield Sample((factors(make, shape), make(shape)), {"dim": -1})
    if len(shape) == 1 or shape[-2] > LONGEST:
        return
    without = (*shape[:-2], shape[-1])
    yield Sample((factors(make, shape), make(shape), make(without)), {"reverse": True})
    yield Sample((factors(make, shape[-1:]), make(shape), make(without)))
    if shape[-1] <= LONGEST:
        yield Sample((factors(make, (*shape[:-1], 1)), make(shape), make(shape[:-1])), {"dim": -1, "reverse": True})


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::linear_recurrence: expected"
    dtypes = "b to be float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), x.int()), f"{op} {dtypes}, but got int32")
    yield ErrorSample((x, x.cfloat()), f"{op} {dtypes}, but got complex64")
    yield ErrorSample((x.double(), x), f"{op} a to be float32 like b, but got float64")
    yield ErrorSample((x, x, x[0].double()), f"{op} h0 to be float32 like b, but got float64")
    shape = f"{op} a of a shape that broadcasts to [2, 3], that of b, but got"
    yield ErrorSample((x[:, :2], x), f"{shape} [2, 2]")
    yield ErrorSample((x[None], x), f"{shape} [1, 2, 3]")
    yield ErrorSample((x, x[0]), f"{op} a of a shape that broadcasts to [3], that of b, but got [2, 3]")
    h0 = f"{op} h0 of shape [3], that of b without dim, but got"
    yield ErrorSample((x, x, x[0, :2]), f"{h0} [2]")
    yield ErrorSample((x, x, x), f"{h0} [2, 3]")
    yield ErrorSample((x, x), f"{op} dim in [-2, 1], but got 2", {"dim": 2})
    yield ErrorSample((x[0], x[0]), f"{op} dim in [-1, 0], but got -2")
    if device != "cpu":
        yield ErrorSample((x.cpu(), x), f"{op} a on {x.device} like b, but got cpu")
        yield ErrorSample((x, x, x[0].cpu()), f"{op} h0 on {x.device} like b, but got cpu")


C = 16


def before(h, call, h0):
    """Returns the state that each factor multiplies: the states shifted by one step, with h0 first."""
    b, options = call.sample.args[1], call.sample.kwargs
    if b.dim() == 0:
        return torch.zeros_like(b) if h0 is None else h0
    dim, reverse = options.get("dim", -2), options.get("reverse", False)
    steps = b.shape[dim]
    first = b.new_zeros(b.shape) if h0 is None else h0.unsqueeze(dim).expand(b.shape)
    first = first.narrow(dim, 0, min(steps, 1))
    rest = h.narrow(dim, min(steps, 1) if reverse else 0, max(steps - 1, 0))
    return torch.cat([rest, first] if reverse else [first, rest], dim)


def terms(call):
    """Bounds the rounding errors. Each step rounds a product and a sum, and a tree rounds partial results. The gradient
    of a factor reads the rounded h. Where the factor broadcasts, products are rounded before they are summed."""
    (a, _, h0), size = (*call.sample.args, None)[:3], of_absolute_values(loops.linear_recurrence, call)
    (h,), (of_a, of_b, *of_h0) = size.outputs, size.gradients
    h_moves = call.rounding(call.outputs[0]) + C * call.eps * h
    moves = before(h_moves, call, None)
    moves = torch.where(moves == torch.inf, moves, of_b * moves)
    products = of_b * before(h, call, None if h0 is None else h0.abs())
    rounds = call.rounding(products) if a.shape != h.shape else torch.zeros_like(h)
    sizes = {i: Terms(x, C) for i, x in enumerate((of_a, of_b, *of_h0))}
    return [Terms(h, C)], sizes | {0: Terms(of_a, C, moves.sum_to_size(a.shape), rounds.sum_to_size(a.shape))}


def from_saved(call):
    """Computes the gradients from the rounded states that the op returned."""
    tensors = [x.detach().requires_grad_() for x in call.sample.args if x is not None]
    exact = run_with(loops.linear_recurrence, Sample(tuple(tensors), call.sample.kwargs), call.grads)
    h_before = before(call.outputs[0], call, tensors[2] if len(tensors) > 2 else None)
    exact.gradients[0] = (exact.gradients[1] * h_before).sum_to_size(tensors[0].shape)
    return exact.outputs, [exact.gradients[i] for i in call.leaf_numbers()]


def with_options(make, shape, chosen):
    options = {"dim": -2, **chosen}
    dim = options["dim"] % len(shape)
    of_a = {"one": (1,), "of the last dimension": shape[-1:], "of the others": (*shape[:-1], 1)}
    a = factors(make, of_a[options.pop("a")] if "a" in options else shape)
    lines = (*shape[:dim], *shape[dim + 1 :])
    h0 = (make(lines),) if options.pop("h0", False) else ()
    return Sample((a, make(shape), *h0), options)


SPEC = OpSpec(
    name="linear_recurrence",
    options=Options(
        {
            "a": ("one", "of the last dimension", "of the others"),
            "h0": (True,),
            "dim": (0, -1),
            "reverse": (True,),
        },
        with_options,
    ),
    by_hand=loops.linear_recurrence,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((factors(make, shape), make(shape)), {"dim": -1}),
        forward=3,
        backward=5,
        operations=(2, 3),
    ),
    keeps_strides=False,  # the result has the strides of b, which is the second input
    launches=(1, 1),
    terms=terms,
    from_saved=from_saved,
    unseen=12,  # hidden in the gradient of a broadcast factor, which sums products that were rounded to a half type
    infinities_may_be_nan=True,
    variants={
        "columns": Bench(
            lambda make, shape: Sample((factors(make, shape), make(shape)), {"dim": 0}), forward=3, backward=5
        )
    },
)
