"""Runs a function when a module is imported, or at once if the module is already imported.

The package registers its rules with torch.distributed.tensor in this way, without importing it for all users.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence


class Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find one module, and makes its loader call a function after the module's own code."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: importlib.abc.Loader) -> None:
        load = loader.exec_module

        def load_and_run(module: types.ModuleType) -> None:
            load(module)
            try:
                self.function()
            except Exception as error:  # the user's import of the other module must not fail because of this package
                warnings.warn(f"extension_cpp: what follows the import of {self.name} failed: {error}", stacklevel=2)

        loader.exec_module = load_and_run  # type: ignore[method-assign]  # for this object only


def after_import(name: str, function: Callable[[], None]) -> None:
    """Calls function() now if the module is imported, or otherwise as soon as it is. A second call for the same module
    replaces the function of the first, because this package may be imported again."""
    is_earlier = [type(finder).__module__ == __name__ and vars(finder).get("name") == name for finder in sys.meta_path]
    sys.meta_path[:] = [finder for finder, earlier in zip(sys.meta_path, is_earlier, strict=True) if not earlier]
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, Finder(name, function))
