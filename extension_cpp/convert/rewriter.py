"""Finds, in the syntax tree of a forward, code that the ops can run, and replaces it, as a part of nn.convert.

The code has one of three forms, and is replaced by a call of a method of the module:

* a gated product: ``act(gate) * up``, where act is a module (``self.act_fn``) or torch.nn.functional's silu or gelu,
  together with the module that takes the product (``self.down_proj(act(gate) * up)``);
* a residual addition and the norm of its sum: ``s = residual + x`` followed by ``self.norm(s)``, or
  ``self.norm(residual + x)``, together with the dropout of x if it comes just before;
* the call of a function with "rotary" or "rope" in its name, with q, k, cos and sin, or with x, cos and sin.

For any arguments the methods (forwards.py) compute what the replaced code computed, so that a rewritten forward has the
original's results. Its arguments, results and other calls do not change.
"""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from .activations import KNOWN

# The prefix of the methods that a rewritten forward calls. It keeps them apart from the methods of the model's class.
PREFIX = "_extension_cpp_"


SIMPLE = (ast.Assign, ast.Return, ast.Expr)  # statements whose expressions run once, in order


class Site(NamedTuple):
    """An expression in a forward that the call of an op may replace."""

    kind: str  # "gated", "add_norm", "dropout", "rotary"
    name: str  # the name of the module in self, or of the function as the forward writes it
    options: tuple[tuple[str, Any], ...] = ()  # constant keyword arguments of the function
    arguments: int = 4  # tensors of a "rotary" call: 4 (q, k, cos, sin), 3 (x, cos, sin), or 0 if it is not replaced


FUNCTIONAL_DROPOUT = Site("dropout", "")  # stands for every torch.nn.functional.dropout of a forward


class Rewriter(ast.NodeTransformer):
    """Finds the sites in a forward, and replaces those for which `wants` is true."""

    def __init__(self, function: Any, definition: ast.FunctionDef, wants: Callable[[Site], bool]) -> None:
        self.function, self.definition, self.wants = function, definition, wants
        arguments = [*definition.args.posonlyargs, *definition.args.args]
        self.self_name = arguments[0].arg if arguments else ""
        uses = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
        self.uses = Counter((type(node.ctx), node.id) for node in uses)
        self.temporaries = 0

    def rewrite(self) -> None:
        self.definition.body = self.block(self.definition.body)

    # -- forms --

    def child(self, node: ast.AST) -> str | None:
        """Returns NAME if the node is self.NAME."""
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.self_name
        return node.attr if own else None  # type: ignore[attr-defined]  # own: it is an ast.Attribute

    def child_call(self, node: ast.AST) -> str | None:
        """Returns NAME if the node is self.NAME(x)."""
        return self.child(node.func) if _has_one_argument(node) and not node.keywords else None

    def value(self, node: ast.AST) -> Any:
        """Returns the object that a global name, or an attribute of one (nn.functional.silu), refers to, or None."""
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.function.__code__.co_varnames:
            return None
        return self.function.__globals__.get(node.id)

    def activation(self, node: Any) -> tuple[ast.expr, ast.expr] | None:
        """Returns act and x of a call act(x) whose product may be replaced. act is self.NAME or a function's name."""
        if not _has_one_argument(node):
            return None
        if (child := self.child_call(node)) is not None:
            return (node.func, node.args[0]) if self.wants(Site("gated", child)) else None
        function, options = self.value(node.func), _constants(node.keywords)
        if function is None or options is None:
            return None
        for name, known in KNOWN.items():
            is_named = dict(options) == known.options or (not options and name == known.function)
            if is_named and function is getattr(torch.nn.functional, known.function):
                wants = self.wants(Site("gated", name, (("function", True),)))
                return (ast.Constant(name), node.args[0]) if wants else None
        return None

    def dropout(self, node: Any) -> tuple[ast.expr, ast.expr] | None:
        """Returns the dropout, self.NAME or (p, training) of torch.nn.functional.dropout, and its input x."""
        if not _has_one_argument(node):
            return None
        if (child := self.child_call(node)) is not None:
            return (node.func, node.args[0]) if self.wants(Site("dropout", child)) else None
        given = {each.arg: each.value for each in node.keywords}
        if given.keys() != {"p", "training"} or self.value(node.func) is not torch.nn.functional.dropout:
            return None
        if not self.wants(FUNCTIONAL_DROPOUT):
            return None
        return ast.Tuple([given["p"], given["training"]], ast.Load()), node.args[0]

    def call(self, method: str, *arguments: ast.expr) -> ast.Call:
        function = ast.Attribute(ast.Name(self.self_name, ast.Load()), PREFIX + method, ast.Load())
        return ast.Call(function, list(arguments), [])

    def add_norm(self, norm: ast.expr, total: ast.BinOp, before: list[ast.stmt], target: str | None) -> ast.Call:
        """Makes the call that replaces norm(total). It also replaces a dropout in total, or one whose result the
        statement just before assigns to ``target``, and which total adds."""
        for x, residual in _operands(total, ast.Add):
            if (drawn := self.dropout(x)) is not None:
                return self.call("add_norm", norm, drawn[1], residual, drawn[0])
        last: Any = before[-1] if before and target is not None and _assigned(before[-1]) == target else None
        for x, residual in _operands(total, ast.Add) if last is not None else ():
            alone = _is_name(x, target) and not any(_is_name(each, target) for each in ast.walk(residual))
            if alone and (drawn := self.dropout(last.value)) is not None:
                before.pop()
                return self.call("add_norm", norm, drawn[1], residual, drawn[0])
        return self.call("add_norm", norm, total.left, total.right)

    # -- expressions --

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        for one, other in _operands(node, ast.Mult):
            if (found := self.activation(one)) is not None:
                return self.call("gated", *found, other)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if self.child_call(node) is not None:
            (product,) = node.args
            if isinstance(product, ast.Call) and self.child(product.func) == f"{PREFIX}gated":
                return self.call("gated_linear", node.func, *product.args)
        function = self.value(node.func)
        if not callable(function) or isinstance(function, type):
            return node
        name = ast.unparse(node.func)
        word = name.split(".")[-1].lower().replace("proper", "")  # "property" also contains "rope"
        if not ("rotary" in word or "rope" in word):
            return node
        options, count = _constants(node.keywords), len(node.args)
        if options is None or count not in (3, 4) or any(isinstance(each, ast.Starred) for each in node.args):
            if count + len(node.keywords) > 1:
                self.wants(Site("rotary", name, (), 0))
            return node
        if not self.wants(Site("rotary", name, options, count)):
            return node
        call = self.call("rotary", node.func, *node.args)
        call.keywords = node.keywords
        return call

    # -- statements --

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        left: list[Any] = list(statements)
        while left:
            statement = left.pop(0)
            total = _total(statement)
            if total is not None and (
                self.sum_then_norm(total, statement, left, done) or self.sum_then_if(total, statement, left, done)
            ):
                continue
            self.forward_activation(statement, left)
            self.norm_of_sum(statement, done)
            for field in ("body", "orelse", "finalbody"):
                if isinstance(getattr(statement, field, None), list):
                    setattr(statement, field, self.block(getattr(statement, field)))
            if not hasattr(statement, "body"):
                self.visit(statement)
            done.append(statement)
        return done

    def child_calls(self, statement: ast.stmt, kinds: tuple[type, ...] = SIMPLE) -> Iterator[tuple[str, Any]]:
        """Yields the calls self.NAME(x) in a statement of one of these kinds, each with its NAME."""
        for node in ast.walk(statement) if isinstance(statement, kinds) else ():
            if (name := self.child_call(node)) is not None:
                yield name, node

    def norm_behind(self, total: str, left: list[Any], kinds: tuple[type, ...] = SIMPLE) -> tuple[int, ast.Call | None]:
        """Looks for self.NORM(s) in the next statement of these kinds after a sum s. Returns how many statements come
        before that one (1 if there is `residual = s`, else 0), and the call self.NORM(s) if it may be replaced."""
        alias = _assigned(left[0]) if left and _is_name(getattr(left[0], "value", None), total) else None
        at = 0 if alias is None else 1
        for name, node in self.child_calls(left[at], kinds) if len(left) > at else ():
            of_sum = _is_name(node.args[0], total, alias) and _runs_first(node, left[at])
            if of_sum and self.wants(Site("add_norm", name)):
                return at, node
        return at, None

    def sum_then_norm(self, total: str, statement: Any, left: list[ast.stmt], done: list[ast.stmt]) -> bool:
        """Replaces `s = a + b`, perhaps `residual = s`, and then a statement with self.NORM(s). `total` is s."""
        at, norm = self.norm_behind(total, left)
        if norm is None:
            return False
        self.temporaries += 1
        normed = f"{PREFIX}normed_{self.temporaries}"
        call = self.add_norm(norm.func, statement.value, done, total)
        both = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(total, ast.Store())], ast.Store())
        self.visit(call)
        done += [ast.copy_location(ast.Assign([both], call), statement), *left[:at]]
        del left[:at]
        left[0] = _Replaced(norm, ast.Name(normed, ast.Load())).visit(left[0])
        return True

    def sum_then_if(self, total: str, statement: ast.stmt, left: list[ast.stmt], done: list[ast.stmt]) -> bool:
        """Replaces `s = a + b`, `if x is not None: ...`, and self.NORM(s) (GPT-2): both branches get a sum and norm."""
        if not left or not isinstance(left[0], ast.If) or left[0].orelse or not _is_none_test(left[0].test, total):
            return False
        at, norm = self.norm_behind(total, left[1:], (ast.Assign,))
        if norm is None:
            return False
        branch, tail = left[0], left[1 : at + 2]
        without = [copy.deepcopy(each) for each in (statement, *tail)]
        before = [done.pop()] if done and _assigned(done[-1]) == total else []  # this statement may be the dropout
        branch.body = self.block([*copy.deepcopy(before), statement, *branch.body, *tail])
        branch.orelse = self.block([*before, *without])
        done.append(branch)
        del left[: at + 2]
        return True

    def norm_of_sum(self, statement: ast.stmt, done: list[ast.stmt]) -> None:
        """Replaces each self.NORM(a + b) in a simple statement (BERT)."""
        for name, node in self.child_calls(statement):
            if _operands(node.args[0], ast.Add) and self.wants(Site("add_norm", name)):
                target = _assigned(statement) if getattr(statement, "value", None) is node else None
                call = self.add_norm(node.func, node.args[0], done, target)
                _Replaced(node, ast.Subscript(call, ast.Constant(0), ast.Load())).visit(statement)

    def forward_activation(self, statement: Any, left: list[ast.stmt]) -> None:
        """Replaces g = act(x), whose only use is a product in one of the next statements (T5)."""
        name = _assigned(statement)
        if name is None or self.uses[ast.Store, name] != 1 or self.uses[ast.Load, name] != 1:
            return
        for later in left[:3]:
            if not isinstance(later, (ast.Assign, ast.Return)):
                return
            for node in ast.walk(later):
                for one, other in _operands(node, ast.Mult):
                    if _is_name(one, name):
                        if (found := self.activation(statement.value)) is not None:
                            statement.value = found[1]
                            call = self.call("gated", found[0], one, other)
                            _Replaced(node, call).visit(later)
                        return


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _assigned(statement: ast.stmt) -> str | None:
    """Returns NAME if the statement is `NAME = ...`."""
    match statement:
        case ast.Assign([ast.Name(name)]):
            return name
    return None


def _operands(node: ast.AST, operator: type[ast.operator]) -> tuple[tuple[ast.expr, ast.expr], ...]:
    """Returns the two operands of a sum (ast.Add) or product (ast.Mult), in both orders, or () for another node."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        return (node.left, node.right), (node.right, node.left)
    return ()


def _total(statement: Any) -> str | None:
    """Returns NAME if the statement is `NAME = a + b`."""
    name = _assigned(statement)
    return name if name is not None and _operands(statement.value, ast.Add) else None


def _has_one_argument(node: ast.AST) -> TypeGuard[ast.Call]:
    """Returns whether a node is a call with one positional argument, and possibly keyword arguments."""
    return isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)


def _is_name(node: ast.AST | None, *names: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _runs_first(call: ast.Call, statement: ast.stmt) -> bool:
    """Returns whether this call runs before all other calls in its statement."""
    place = (call.lineno, call.col_offset)
    others = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
    return all(call in ast.walk(each) or (each.lineno, each.col_offset) > place for each in others)


def _is_none_test(node: ast.AST, total: str) -> bool:
    """Returns whether a node is `x is None` or `x is not None`, where x is another variable than `total`."""
    match node:
        case ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot()], [ast.Constant()]):
            return name != total
    return False


def _constants(keywords: list[ast.keyword]) -> tuple[tuple[str, Any], ...] | None:
    if any(each.arg is None or not isinstance(each.value, ast.Constant) for each in keywords):
        return None
    return tuple((each.arg, each.value.value) for each in keywords)  # type: ignore[attr-defined, misc]  # constants
