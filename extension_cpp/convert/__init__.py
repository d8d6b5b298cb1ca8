"""Implements nn.convert, which gives the modules of a model a forward that calls faster ops."""

from .conversion import Converted, convert, revert

__all__ = ["Converted", "convert", "revert"]
