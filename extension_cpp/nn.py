"""extension_cpp.nn as users know it: the modules, and convert and revert, which put them into a model and out again."""

from . import modules
from .convert import Converted, convert, revert
from .modules import *  # noqa: F403  # modules.__all__ lists the names

__all__ = ["Converted", "convert", "revert", *modules.__all__]
