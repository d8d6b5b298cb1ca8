"""Implements the operators on DTensors. Importing this package registers a rule for every operator, and attaches the
package to autograd.py, whose functions call it for DTensors. The import of torch.distributed.tensor imports it."""

import sys

from torch.distributed.tensor import DTensor as DTensor

from ..registration import autograd
from . import sharded_loss as sharded_loss
from .sharding import agreed as agreed
from .sharding import on_mesh as on_mesh

autograd.distributed = sys.modules[__name__]
