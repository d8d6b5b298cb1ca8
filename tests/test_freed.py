"""Tests that operators raise an error for a tensor whose storage was freed. These are the operators that the samples in
tests/battery do not call; tests/battery/test_freed.py tests all others."""

import torch

from tests.battery.test_freed import check_refused, freed, sentence_of, with_one_freed
from tests.checks import maker


def test_freed_arguments_of_operators_that_write(device: str) -> None:
    ops = torch.ops.extension_cpp
    make = maker(device, torch.float32)
    a, b, out = (make((3, 5)).detach() for _ in range(3))
    check_refused(ops.muladd.out, [a, b, 2.0], {"out": freed(out, 3)}, sentence_of("muladd", "out"))
    for i, given in with_one_freed([a, b]):
        check_refused(ops.muladd.out, [*given, 2.0], {"out": out}, sentence_of("muladd", "ab"[i]))
    target, weight, scale = torch.zeros(3, dtype=torch.int64, device=device), make((5,)).detach(), make((1,)).detach()
    chunk, names = [a, target, weight, -100, 0.0, 0.0, None, scale], ["logits", "target", "weight"]
    for i, given in with_one_freed(chunk):
        name = names[i] if i < len(names) else "scale"
        check_refused(ops.cross_entropy_chunk, given, {}, sentence_of("cross_entropy_chunk", name))
    for i, given in with_one_freed([a, scale]):
        check_refused(ops.cross_entropy_scale, given, {}, sentence_of("cross_entropy_scale", ("x", "factor")[i]))


def test_tensors_of_any_shape_can_be_freed(device: str) -> None:
    for shape in ((), (0,), (0, 0, 5), (3, 0), (2, 3)):
        x = freed(torch.empty(shape, device=device), 3)
        assert x.shape == shape and x.untyped_storage().nbytes() == 0
