"""The operators as Python functions: what autograd.operators makes of them. _ops.pyi has their types."""

from extension_cpp.autograd import operators

globals().update(vars(operators("extension_cpp")))
