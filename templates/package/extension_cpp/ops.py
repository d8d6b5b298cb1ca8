"""Registers the fake implementation and the autograd formula of every operator.

This is the table of the operators. The functions are in functional/. registration/entries.py says what an entry is.
"""

from .registration.entries import NO_SECOND, NONE, NOT_DIFFERENTIABLE, WRITES, register  # noqa: F401  # for entries

__all__ = [
    # The public functions. The command `new` adds an op's name here, and its call of register() below this list.
]
