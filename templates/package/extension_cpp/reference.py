"""Defines every op in plain PyTorch, with the op's signature. The tests compare the ops with these in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor
