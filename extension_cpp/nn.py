"""Holds the public names: the modules, and convert and revert, which put the ops into a model and take them out."""

from . import modules
from .convert import Converted, convert, revert
from .modules import *  # noqa: F403  # modules.__all__ lists the names

__all__ = ["Converted", "convert", "revert", *modules.__all__]
