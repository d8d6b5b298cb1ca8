"""nn.convert: gives the parts of a model for which there are faster ops a forward that calls them."""

from .conversion import Converted, convert, revert

__all__ = ["Converted", "convert", "revert"]
