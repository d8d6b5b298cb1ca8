"""Tests rotary_embedding on rows of every even width. On the CPU the tail of a half row has 1 to 31 elements, which
AVX-512 loads with masks. Tails of 8 and 16 elements after 32 (rows of 80 and 96 columns) are loaded in half vectors."""

import pytest
import torch

from tests.checks import check, maker
from tests.opspec import DTYPES, Sample
from tests.specs.rotary_embedding import SPEC, factors


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_even_width(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    """Results are right if all columns are rotated, by factors of x's dtype, and if three columns are not rotated. In
    the second case the factors of half types are float32."""
    make = maker(device, dtype)
    for rotated in range(2, 132, 2):
        cos, sin = factors(make, (3, rotated))
        for rest, wide in ((0, False), (3, dtype.itemsize == 2)):
            q, k = make((2, 3, rotated + rest)), make((1, 3, rotated + rest))
            given = (cos.float(), sin.float()) if wide else (cos, sin)
            check(SPEC, Sample((q, k, *given), {"interleaved": interleaved}), what=f"{rotated} of {rotated + rest}")
