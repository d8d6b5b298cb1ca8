"""Tests that results have the bits in recorded_bits.json, which were recorded on CPUs with FMA and on some GPUs.

`python -m tests.test_recorded_bits cpu` (or cuda) records the bits of this machine in recorded_bits.json. A change of
bits needs a line in CHANGELOG.md. Patch releases change no bits. An op is recorded when it is released.
linear_cross_entropy is left out, because its bits are those of PyTorch's matrix products.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import extension_cpp
from tests.checks import random_grad, run
from tests.opspec import OpSpec, all_specs

FILE = Path(__file__).with_name("recorded_bits.json")
RECORD: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text())
SPECS = [spec for spec in all_specs() if not spec.has_products]
SHAPES = [(5, 300), (3, 9001)]


def make_exact(device: str, dtype: torch.dtype):
    """Returns make(shape). It makes multiples of 1/16 up to 4: exact in every dtype, and equal in every PyTorch."""
    generator = torch.Generator().manual_seed(1)

    def make(shape: Sequence[int]) -> Tensor:
        drawn = torch.randint(-64, 65, tuple(shape), generator=generator, device="cpu") / 16
        return drawn.to(device, dtype).requires_grad_()

    return make


def digest(spec: OpSpec, dtype: torch.dtype, device: str) -> str:
    """Returns a hash of the results and gradients of the op's samples."""
    made = hashlib.sha256()
    for shape in SHAPES:
        for sample in spec.sample_inputs(make_exact(device, dtype), shape):
            # A recurrence's factors are PyTorch's sigmoid, whose last bits differ between CPUs.
            if device == "cpu" and spec.name == "linear_recurrence":
                for x in sample.args:
                    if isinstance(x, Tensor) and x.is_floating_point():
                        x.data.copy_((256 * x.data).round() / 256)
            for _, x in run(spec.function, sample, random_grad()).tensors():
                made.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def processor(device: str) -> str:
    """Returns the key of this processor in recorded_bits.json. Processors with the same key must have the same bits."""
    if device == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    level = ctypes.CDLL(extension_cpp.LIBRARY).extension_cpp_cpu_level
    level.restype = ctypes.c_char_p
    return "CPU without FMA" if level() == b"baseline" else "CPU with FMA"


def bits(spec: OpSpec, device: str) -> dict[str, str]:
    return {str(dtype).removeprefix("torch."): digest(spec, dtype, device) for dtype in spec.dtypes}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.name in RECORD["CPU with FMA"]], ids=str)
def test_bits_are_as_recorded(spec: OpSpec, device: str) -> None:
    if processor(device) not in RECORD:
        pytest.skip(f"no bits are recorded for {processor(device)}")
    recorded = RECORD[processor(device)][spec.name]
    assert bits(spec, device) == recorded, "if they shall change: record them anew, and write a line of CHANGELOG.md"


def main(device: str) -> None:
    RECORD[processor(device)] = {spec.name: bits(spec, device) for spec in SPECS}
    FILE.write_text(json.dumps(RECORD, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
