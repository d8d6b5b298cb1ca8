"""make bench: prints the time of each op beside its reference in plain PyTorch, and their quotient.

The inputs are those of the op's spec (tests/specs/), with the shape and the dtype of the options. A figure is a median.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from tests.opspec import Sample, all_specs


def microseconds(function: Callable[..., object], sample: Sample) -> float:
    """Returns the median time of a call. Timer waits for the GPU."""
    names = {"function": function, "args": sample.args, "kwargs": sample.kwargs}
    timer = Timer("function(*args, **kwargs)", globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.5).median) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", type=int, nargs="+", default=[2048, 2048])
    options = parser.parse_args()

    def make(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, device=options.device, dtype=getattr(torch, options.dtype))

    print(f"{options.device}, {options.dtype}, {options.shape}: microseconds a call\n")
    print(f"{'op':<30}{'op':>12}{'PyTorch':>12}{'quotient':>12}")
    for spec in all_specs():
        sample = spec.bench.sample(make, tuple(options.shape))
        try:
            plain = microseconds(spec.reference, sample)
        except NotImplementedError as error:
            print(f"{spec.name:<30}{error}")
            continue
        own = microseconds(spec.function, sample)
        print(f"{spec.name:<30}{own:>12.1f}{plain:>12.1f}{plain / own:>12.2f}")


if __name__ == "__main__":
    main()
