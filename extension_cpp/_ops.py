"""Holds a Python function for each operator, made by calls.operators(). _ops.pyi has the functions' types."""

from .registration.calls import operators

globals().update(vars(operators()))
