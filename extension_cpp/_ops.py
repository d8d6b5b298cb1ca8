"""The operators as Python functions: what autograd.operators makes of them. _ops.pyi has their types."""

from .registration.autograd import operators

globals().update(vars(operators()))
