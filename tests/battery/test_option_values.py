"""Tests numeric options at the limits of the dtypes: a fake accepts and refuses the same values as the kernel."""

import math
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.battery import calls_of_every_order, every_dtype, every_op, fake_mode, with_overloads
from tests.checks import as_tuple, maker
from tests.opspec import DTYPES, OpSpec

# The largest and the smallest normal number of each dtype, and numbers that fit into one dtype but not another. For
# example, 1e5 overflows float16, whose kernels take a softcap as float32.
LIMITS = [limit for dtype in DTYPES for limit in (torch.finfo(dtype).max, torch.finfo(dtype).tiny)]
VALUES = [*LIMITS, 1e5, 1e-40, 1e-310, 0.0, 1.0, -0.5, math.inf, math.nan]


def outcome(op: Any, args: tuple[Any, ...]) -> Any:
    """Returns shapes, dtypes and strides of the results, or the message of the error."""
    try:
        return [(tuple(x.shape), x.dtype, x.stride()) for x in as_tuple(op(*args))]
    except RuntimeError as error:
        return str(error)


@every_op
@every_dtype
def test_fakes_take_the_values_that_kernels_take(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Fakes accept the same values as kernels for each number of each operator, backward included, in each dtype. The
    no-grad overloads, whose checks are the same, are tested with float16 alone."""
    seen: set[tuple[str, str]] = set()
    for sample in spec.sample_inputs(maker(device, dtype), (3, 5)):
        for called, given, _ in calls_of_every_order(spec, sample, "contiguous").made:
            arguments = called._schema.arguments
            args = [*tree_map_only(torch.Tensor, torch.Tensor.detach, given)]
            args += [argument.default_value for argument in arguments[len(args) :]]
            mode = fake_mode(spec)
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            for i, argument in enumerate(arguments):
                key = called._schema.name, argument.name
                if str(argument.type) not in ("float", "Optional[float]") or key in seen:
                    continue
                seen.add(key)
                for op in with_overloads(called) if dtype is torch.float16 else (called,):
                    for value in VALUES:
                        real = outcome(op, (*args[:i], value, *args[i + 1 :]))
                        with mode:
                            fake = outcome(op, (*fakes[:i], value, *fakes[i + 1 :]))
                        if spec.unknown_sizes:  # a fake cannot know a shape that depends on values
                            fake, real = (x if isinstance(x, str) else "no error" for x in (fake, real))
                        assert fake == real, f"{op} {argument.name}={value}: the fake {fake}, the kernel {real}"
    schema = getattr(torch.ops.extension_cpp, spec.name).default._schema
    names = {each.name for each in schema.arguments if str(each.type) in ("float", "Optional[float]")}
    assert {name for op, name in seen if op == schema.name} == names
