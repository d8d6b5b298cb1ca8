"""Public names: the modules, and convert and revert, which put ops into a model and remove them."""

from . import modules
from .convert import Converted, convert, revert
from .modules import *  # noqa: F403  # modules.__all__ lists the names

__all__ = ["Converted", "convert", "revert", *modules.__all__]
