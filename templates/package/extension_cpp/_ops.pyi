"""The types of _ops.py."""

from collections.abc import Sequence

from torch import Tensor
