"""What a `forward` method computes, read from its source, where it is no more than an MLP could be.

Attribute names prove nothing: a class with `gate_proj`, `up_proj` and `down_proj` may normalise or scale in
between. So the method itself is read. Assignments and one return, made of calls with one argument and of
products, become one expression; anything else is not understood, and None is the answer.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Input:
    """The argument of `forward`."""


@dataclass(frozen=True)
class Call:
    """`self.path(argument)`."""

    path: str
    argument: "Expression"


@dataclass(frozen=True)
class Function:
    """A function found in the module's globals, called with one argument and constant keywords."""

    function: Callable[..., Any]
    keywords: tuple[tuple[str, Any], ...]
    argument: "Expression"


@dataclass(frozen=True)
class Product:
    left: "Expression"
    right: "Expression"


Expression = Input | Call | Function | Product


class _NotUnderstood(Exception):
    pass


@functools.lru_cache(maxsize=256)
def expression_of(forward: Callable[..., Any]) -> Expression | None:
    """The one expression that `forward(self, x)` returns, or None."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__closure__:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
        return _Reader(forward.__globals__).read(tree)
    except (OSError, TypeError, SyntaxError, IndexError, _NotUnderstood):
        return None


class _Reader:
    def __init__(self, outside: Mapping[str, Any]) -> None:
        self.outside = outside
        self.names: dict[str, Expression] = {}
        self.self_name = ""

    def read(self, method: ast.stmt) -> Expression:
        if not isinstance(method, ast.FunctionDef) or method.decorator_list:
            raise _NotUnderstood
        every = method.args
        if len(every.args) != 2 or every.posonlyargs or every.kwonlyargs or every.vararg or every.kwarg:
            raise _NotUnderstood
        self.self_name = every.args[0].arg
        self.names[every.args[1].arg] = Input()
        for statement in method.body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._expression(statement.value)
            self._statement(statement)
        raise _NotUnderstood

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != self.self_name:
                self.names[name] = self._expression(value)
            case _:
                raise _NotUnderstood

    def _expression(self, node: ast.expr) -> Expression:
        match node:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return Product(self._expression(left), self._expression(right))
            case ast.Call(func=function, args=[argument], keywords=keywords):
                return self._call(function, self._expression(argument), keywords)
        raise _NotUnderstood

    def _call(self, function: ast.expr, argument: Expression, keywords: list[ast.keyword]) -> Expression:
        root, *path = _dotted(function)
        if root == self.self_name:
            if keywords or not path:
                raise _NotUnderstood
            return Call(".".join(path), argument)
        if root in self.names or root not in self.outside:
            raise _NotUnderstood
        target = self.outside[root]
        for name in path:
            target = getattr(target, name, None)
        constants = tuple((each.arg or "", _constant(each.value)) for each in keywords)
        if not callable(target):
            raise _NotUnderstood
        return Function(target, constants, argument)


def _dotted(node: ast.expr) -> list[str]:
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_dotted(value), name]
    raise _NotUnderstood


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    raise _NotUnderstood
