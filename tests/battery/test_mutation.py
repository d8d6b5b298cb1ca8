"""Tests operators that write into their arguments: version counters, overlapping memory, layouts, and CUDA graphs."""

import re

import pytest
import torch

from tests.battery import SPECS
from tests.checks import maker
from tests.opspec import OpSpec, Sample, as_tuple

WRITING = [spec for spec in SPECS if spec.mutates]
every_writing_op = pytest.mark.parametrize("spec", WRITING, ids=str)


def written(spec: OpSpec, sample: Sample) -> dict[str, torch.Tensor]:
    """Returns the sample's arguments that the op writes, by their name."""
    return {name: sample.args[spec.names.index(name)] for name in spec.mutates}


@every_writing_op
def test_every_written_argument_counts_a_version(spec: OpSpec, device: str) -> None:
    """A call increases the version counter of each argument that it writes, for autograd, and no other one."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (5, 33)):
        before = [x._version if isinstance(x, torch.Tensor) else 0 for x in sample.args]
        spec.in_place(*sample.args, **sample.kwargs)
        counted = {name: x._version for name, x in written(spec, sample).items()}
        assert all(version > 0 for version in counted.values()), counted
        changed = [x for x, old in zip(sample.args, before, strict=True) if getattr(x, "_version", 0) != old]
        assert len(changed) == len(counted)


@every_writing_op
def test_other_arguments_and_gaps_are_not_written(spec: OpSpec, device: str) -> None:
    """An op writes the same values into a non-contiguous argument as into a contiguous one, and not into gaps."""
    for layout in ("sliced", "padded", "offset", "transposed"):
        given = spec.sample_inputs(maker(device, torch.float32, layout=layout), (6, 33))
        for sample, usual in zip(given, spec.sample_inputs(maker(device, torch.float32), (6, 33)), strict=True):
            spec.in_place(*sample.args, **sample.kwargs)
            results = as_tuple(spec.function(*usual.args, **usual.kwargs))[-len(spec.mutates) :]
            for (name, x), expected in zip(written(spec, sample).items(), results, strict=True):
                assert torch.equal(x, expected), f"{name}, {layout}"
                storage = torch.empty(0, dtype=x.dtype, device=device).set_(x.untyped_storage())
                count = storage.numel() - x.numel()
                assert (storage == 7).sum() >= count, f"{name}, {layout}: written between its elements"


@every_writing_op
def test_memory_that_overlaps_is_refused(spec: OpSpec, device: str) -> None:
    """A call raises an error if a written argument shares memory with itself or with another argument."""
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (5, 33))))
    for name, x in written(spec, sample).items():
        place = spec.names.index(name)
        args = [*sample.args[:place], x[:1].expand(x.shape), *sample.args[place + 1 :]]
        with pytest.raises(RuntimeError, match=f"expected {re.escape(name)} without internal overlap"):
            spec.in_place(*args, **sample.kwargs)
        for other, y in enumerate(sample.args):
            if other == place or not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
                continue
            memory = x.new_ones(x.numel() + 1)
            args = [*sample.args]
            args[place], args[other] = memory[1:].view(x.shape), memory[:-1].view(x.shape)
            with pytest.raises(RuntimeError, match="they overlap in part"):
                spec.in_place(*args, **sample.kwargs)
            assert (memory == 1).all()


@every_writing_op
def test_arguments_that_require_grad_are_refused(spec: OpSpec, device: str) -> None:
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (5, 33))))
    args = [x.clone().requires_grad_() if x is sample.args[0] else x for x in sample.args]
    with pytest.raises(RuntimeError, match=r"requires? grad"):
        spec.in_place(*args, **sample.kwargs)


@every_writing_op
def test_a_replayed_cuda_graph_writes_again(spec: OpSpec, device: str) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (512, 1024))))
    before = {name: x.clone() for name, x in written(spec, sample).items()}
    expected = as_tuple(spec.function(*sample.args, **sample.kwargs))[-len(spec.mutates) :]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spec.in_place(*sample.args, **sample.kwargs)
    for name, x in written(spec, sample).items():
        x.copy_(before[name])
    graph.replay()
    for x, value in zip(written(spec, sample).values(), expected, strict=True):
        assert torch.equal(x, value)
