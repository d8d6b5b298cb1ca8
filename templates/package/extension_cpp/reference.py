"""Every op in plain PyTorch, with the same signature. It documents the op, and its tests compare with it in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor
