"""Tests that fakes accept and reject the same values of numeric options as the kernels do, near the dtypes' limits."""

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from extension_cpp.registration.calls import by_position
from tests.battery import calls_of_every_order, every_dtype, every_op, fake_mode, with_overloads
from tests.checks import as_tuple, maker
from tests.opspec import DTYPES, OpSpec

# Values of numeric options: each dtype's largest and smallest normal number, numbers in the range of some dtypes only,
# and special values. Float16 kernels, for example, take 1e5, which overflows float16, as float32.
LIMITS = [limit for dtype in DTYPES for limit in (torch.finfo(dtype).max, torch.finfo(dtype).tiny)]
VALUES = [*LIMITS, 1e5, 1e-40, 1e-310, 0.0, 1.0, -0.5, math.inf, math.nan]


def outcome(op: Any, args: tuple[Any, ...]) -> Any:
    """Calls the operator. Returns the shapes, dtypes and strides of its results, or the message of a RuntimeError."""
    try:
        results = tree_leaves(as_tuple(by_position(op)(*args)))
        return [(tuple(x.shape), x.dtype, x.stride()) for x in results]
    except RuntimeError as error:
        return str(error)


@every_op
@every_dtype
def test_fakes_take_the_values_that_kernels_take(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """For each numeric argument of each operator of the op, also of backward, the fake accepts and rejects the same
    values as the kernel. The no-grad overloads have the same checks and are tested in float16 only."""
    seen: set[tuple[str, str]] = set()
    for sample in spec.sample_inputs(maker(device, dtype), (3, 5)):
        for called, given, keywords in calls_of_every_order(spec, sample, "contiguous").made:
            arguments = called._schema.arguments
            args = [*tree_map_only(torch.Tensor, torch.Tensor.detach, given)]
            args += [keywords.get(argument.name, argument.default_value) for argument in arguments[len(args) :]]
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
                        if spec.unknown_sizes:  # a fake does not know a shape that depends on values
                            fake, real = (x if isinstance(x, str) else "no error" for x in (fake, real))
                        assert fake == real, f"{op} {argument.name}={value}: the fake {fake}, the kernel {real}"
    schema = getattr(torch.ops.extension_cpp, spec.name).default._schema
    names = {each.name for each in schema.arguments if str(each.type) in ("float", "Optional[float]")}
    assert {name for op, name in seen if op == schema.name} == names
