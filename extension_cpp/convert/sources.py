"""Reads the source of a forward, and compiles what rewriter.py makes of it, as a part of nn.convert.

The source is used only if it compiles to exactly the code that runs. The new function has the original's globals (not a
copy of them), defaults, decorators and line numbers. So later patches of these globals work, and tracebacks are right.
"""

import __future__

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

from .formulas import Unfit
from .rewriter import FUNCTIONAL_DROPOUT, Rewriter, Site

FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@functools.cache
def sites_of(forward: Callable[..., Any]) -> tuple[Site, ...]:
    """Returns all expressions in a forward that the call of an op may replace."""
    found = _definition(forward)
    sites: dict[Site, None] = {}

    def note(site: Site) -> bool:
        sites[site] = None
        return False

    rewriter = Rewriter(inspect.unwrap(forward), found, note)
    rewriter.rewrite()
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call) and len(node.args) == 1]
    dropouts = [Site("dropout", name) for node in calls if (name := rewriter.child(node.func)) is not None]
    return (*sites, *dropouts, FUNCTIONAL_DROPOUT)


def rewritten(forward: Callable[..., Any], sites: frozenset[Site]) -> Callable[..., Any]:
    """Returns the forward with these sites replaced, and with the original's decorators."""
    found = _definition(forward)
    inner: Any = inspect.unwrap(forward)
    Rewriter(inner, found, sites.__contains__).rewrite()
    names = ("co_name", "co_qualname") if hasattr(inner.__code__, "co_qualname") else ("co_name",)  # Python 3.11
    code = _compile(found, inner.__code__).replace(**{name: getattr(inner.__code__, name) for name in names})
    new = types.FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__)
    return _decorated(forward, inner, _dressed(new, inner))


def _dressed(new: Any, old: Any) -> Any:
    """Copies everything except the code from old to new, and returns new, which gets no __wrapped__."""
    names = ("__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__")
    del functools.update_wrapper(new, old, names).__wrapped__
    return new


def _decorated(outer: Any, inner: Any, new: Any) -> Any:
    """Applies copies of the decorators to `new`. A decorator must be a function made by functools.wraps, whose closure
    holds the function that it calls."""
    if outer is inner:
        return new
    wrapped = outer.__wrapped__
    new = _decorated(wrapped, inner, new)
    cells = list(getattr(outer, "__closure__", None) or ())
    held = [index for index, cell in enumerate(cells) if cell.cell_contents is wrapped]
    if not isinstance(outer, types.FunctionType) or len(held) != 1:
        raise Unfit("its forward has a decorator of an unknown form")
    cells[held[0]] = types.CellType(new)
    made = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    made = _dressed(made, outer)
    made.__wrapped__ = new
    return made


# ---- source and code ----


def _definition(forward: Callable[..., Any]) -> ast.FunctionDef:
    """Returns the syntax tree of a forward. Raises Unfit if its source does not compile to the code that runs."""
    inner: Any = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType):
        raise Unfit("its forward is not a plain function")
    if inner.__code__.co_freevars:
        raise Unfit("its forward holds variables of what is around it")
    try:
        lines, first = inspect.getsourcelines(inner.__code__)
        tree = ast.parse("if True:\n" + "".join(lines))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unfit("the source of its forward is not there") from error
    definition = tree.body[0].body[0]  # type: ignore[attr-defined]  # the body of the `if`
    if not isinstance(definition, ast.FunctionDef):
        raise Unfit("its forward is not a plain function")
    ast.increment_lineno(tree, first - 2)
    if not _are_equal(_compile(definition, inner.__code__), inner.__code__):
        raise Unfit("the source of its forward is not that of the code that runs")
    return definition


def _compile(definition: ast.FunctionDef, original: types.CodeType) -> types.CodeType:
    module = ast.fix_missing_locations(ast.Module([*_imports(original.co_filename), definition], []))
    flags = original.co_flags & FUTURES
    code = compile(module, original.co_filename, "exec", flags, dont_inherit=True)
    return next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == definition.name)


@functools.cache
def _imports(filename: str) -> tuple[ast.stmt, ...]:
    """Returns the imports of a source file. They are compiled with a forward, because Python compiles `name.f()` to
    other code if `name` is imported in the same source."""
    left: list[Any] = list(ast.parse("".join(linecache.getlines(filename))).body)
    found: list[ast.stmt] = []
    while left:
        statement = left.pop(0)
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and getattr(statement, "module", None) != "__future__":
            found.append(statement)
        elif isinstance(statement, (ast.If, ast.Try)):
            left += [*statement.body, *statement.orelse, *getattr(statement, "finalbody", [])]
            left += [each for handler in getattr(statement, "handlers", []) for each in handler.body]
    return tuple(found)


def _are_equal(a: types.CodeType, b: types.CodeType) -> bool:
    """Returns whether two code objects are equal, except for file and line numbers."""
    parts = ("co_code", "co_names", "co_varnames", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")
    if any(getattr(a, part) != getattr(b, part) for part in parts) or len(a.co_consts) != len(b.co_consts):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(
        _are_equal(x, y)
        if isinstance(x, types.CodeType) and isinstance(y, types.CodeType)
        else type(x) is type(y) and (x == y or isinstance(x, str))  # strings may differ, as docstrings do
        for x, y in pairs
    )
