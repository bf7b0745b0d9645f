# SPDX-License-Identifier: Apache-2.0
"""Whether code works on single elements only between two layers of an MLP, read from its text. Pure.

Each rank has a part of what lies between: a softmax, a norm or a mean over it would be of the part. Used by plan.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from rankwise.parallel.tensor_parallel.attention_code import name_self
from rankwise.torch_private.modules import runs_torch_feed_forward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Each works on single elements and holds nothing to train.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip
_NAMES = (
    "relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign",
    "sigmoid", "logsigmoid", "tanh", "hardtanh", "hardswish", "hardsigmoid", "dropout", "square", "abs", "exp", "clamp",
)  # fmt: skip
_FUNCTIONS = {
    id(getattr(place, name)) for place in (torch, functional) for name in _NAMES if callable(getattr(place, name, None))
}
_METHODS = {*_NAMES, "to", "float", "double", "half", "bfloat16", "type_as", "contiguous", "clone", "pow"}
_KINDS = {"dtype", "device"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_ENCODER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class _Unclear(Exception):
    """Why it is not clear."""


def is_linear(module: object) -> bool:
    """Return whether a module calculates as ``nn.Linear`` does, and has no parameters of its own (an adapter's)."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    )


def is_elementwise(found: object) -> bool:
    """Return whether a module or function works on single elements, and holds nothing to train."""
    if isinstance(found, nn.Sequential):
        return type(found) is nn.Sequential and all(is_elementwise(one) for one in found)
    if isinstance(found, nn.Module):
        known = isinstance(found, ELEMENTWISE) or type(found).__module__ == "transformers.activations"
        return known and not any(True for _ in found.parameters())
    return id(found) in _FUNCTIONS


def why_not_elementwise(owner: nn.Module, firsts: Sequence[str], last: str) -> str | None:
    """Return what is unclear about how code uses a pair of layers; ``None`` where it is clear.

    Clear is ``last(f(first(x)))`` with an ``f`` that works on single elements; with several first ones, ``f`` of them.

    Args:
        owner: whose methods call the layers.
        firsts: the first layers, as those methods write them: ``self.fc1``, ``self.mlp['fc1']``.
        last: the last one.
    """
    for kind in _ENCODER_LAYERS:
        if isinstance(owner, kind) and type(owner).forward is kind.forward and runs_torch_feed_forward(owner, kind):
            return None if is_elementwise(owner.activation) else "its activation is not known to be elementwise"
    if "forward" in vars(owner):
        return "its forward was replaced"
    called: set[str] = set()
    try:
        for method in _methods(type(owner)):
            _MethodReader(owner, method, firsts, last, called).read()
    except _Unclear as reason:
        return str(reason)
    missing = next((one for one in (*firsts, last) if one not in called), None)
    return None if missing is None else f"its code does not call {missing}"


def _methods(kind: type) -> list[FunctionType]:
    found = {name: getattr(kind, name) for one in kind.__mro__ if one not in nn.Module.__mro__ for name in vars(one)}
    return [one for name, one in found.items() if isinstance(one, FunctionType) and name != "__init__"]


class _MethodReader:
    """One method, statement by statement: which of its names hold a part of what lies between."""

    def __init__(
        self, owner: nn.Module, method: FunctionType, firsts: Sequence[str], last: str, called: set[str]
    ) -> None:
        self._owner = owner
        self._method = method
        self._firsts = firsts
        self._last = last
        self._layers = {*firsts, last}
        self._called = called
        self._is_part: dict[str, bool | None] = {}
        """By name of a variable; ``None`` where that depends."""

    def read(self) -> None:
        """Raise unless it is clear."""
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self._method)))
        except (OSError, TypeError, SyntaxError):
            raise _Unclear("the source of its class cannot be read") from None
        definition = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        name_self(definition)
        if any(ast.unparse(node) in self._layers for node in ast.walk(definition) if isinstance(node, ast.expr)):
            self._statements(definition.body)

    def _statements(self, body: Sequence[ast.stmt]) -> None:
        for one in body:
            self._statement(one)

    def _statement(self, one: ast.stmt) -> None:
        match one:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.AugAssign(target=target, op=op, value=value):
                self._keep(target, self._combined(target, op, value))
            case ast.Expr(value=value):
                self._holds_part(value)
            case ast.If(test=test, body=body, orelse=other):
                self._refuse_part(test)
                self._either(body, other)
            case ast.With(items=items, body=body):
                for item in items:
                    self._refuse_part(item.context_expr)
                self._statements(body)
            case ast.Return(value=ast.expr() as value):
                self._refuse_part(value)
            case _:
                self._refuse_inside(one)

    def _either(self, body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> None:
        before = dict(self._is_part)
        ends: list[dict[str, bool | None]] = []
        for branch in (body, other):
            self._is_part = dict(before)
            self._statements(branch)
            if not (branch and isinstance(branch[-1], ast.Return | ast.Raise)):
                ends.append(self._is_part)
        first, *rest = ends or [before]
        for end in rest:
            first = {
                name: first.get(name, False) if first.get(name, False) == end.get(name, False) else None
                for name in first | end
            }
        self._is_part = first

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            held = [self._holds_part(one) for one in value.elts]
            for one, is_part in zip(target.elts, held, strict=True):
                self._keep(one, is_part)
        else:
            self._keep(target, self._holds_part(value))

    def _keep(self, target: ast.expr, is_part: bool) -> None:  # noqa: FBT001
        if isinstance(target, ast.Name):
            self._is_part[target.id] = is_part
        elif is_part:
            raise _Unclear(f"its code keeps what lies between in {ast.unparse(target)}")
        else:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self._is_part[node.id] = False

    def _refuse_part(self, node: ast.expr) -> None:
        if self._holds_part(node):
            raise _Unclear(f"its code uses what lies between in {_short(node)}")

    def _refuse_inside(self, node: ast.AST) -> None:
        """Raise if anything below has to do with the layers, and forget the names that are set there."""
        for below in ast.walk(node):
            is_layer = isinstance(below, ast.expr) and ast.unparse(below) in self._layers
            if is_layer or (isinstance(below, ast.Name) and self._is_part.get(below.id, False) is not False):
                raise _Unclear(f"its code uses {ast.unparse(below)} in {_short(node)}")

    def _holds_part(self, node: ast.expr) -> bool:  # noqa: C901, PLR0912 - one case per kind of expression
        """Return whether an expression is a part of what lies between."""
        text = ast.unparse(node)
        match node:
            case ast.Name(id=name):
                is_part = self._is_part.get(name, False)
                if is_part is None:
                    raise _Unclear(f"{name} is a part of what lies between in some cases only")
                return is_part
            case ast.Call():
                return self._call(node)
            case ast.Attribute(value=value, attr=attr):
                if attr in _KINDS:
                    return False
                if any(text == layer or text.startswith(f"{layer}.") for layer in self._layers):
                    raise _Unclear(f"its code uses {text} itself")
                self._refuse_part(value)
                return False
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(left, op, right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._holds_part(operand)
            case ast.IfExp(test=test, body=body, orelse=other):
                self._refuse_part(test)
                is_part = self._holds_part(body)
                if self._holds_part(other) != is_part:
                    raise _Unclear(f"{_short(node)} is a part of what lies between in some cases only")
                return is_part
            case ast.Lambda() | ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp() | ast.NamedExpr():
                self._refuse_inside(node)
                return False
            case _:
                if text in self._layers:
                    raise _Unclear(f"its code uses {text} itself")
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._refuse_part(child)
                    else:
                        self._refuse_inside(child)
                return False

    def _call(self, node: ast.Call) -> bool:
        called = ast.unparse(node.func)
        if called in {"isinstance", "hasattr"}:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        held = [self._holds_part(one) for one in given]
        if called in self._layers:
            self._called.add(called)
            if len(held) != 1 or node.keywords or held[0] != (called == self._last):
                raise _Unclear(f"its code does not hand {called} one value, of the kind that it takes in a pair")
            return called in self._firsts
        is_method = isinstance(node.func, ast.Attribute) and self._stands_for(node.func) is None
        if isinstance(node.func, ast.Attribute) and is_method and self._holds_part(node.func.value):
            if node.func.attr not in _METHODS or any(held):
                raise _Unclear(f"its code calls {node.func.attr}() of what lies between")
            return True
        if not any(held):
            return False
        if not held[0] or any(held[1:]) or not is_elementwise(self._stands_for(node.func)):
            raise _Unclear(f"its code passes what lies between to {called}()")
        return True

    def _stands_for(self, node: ast.expr) -> object:
        """Return what a dotted name stands for, from the owner or the globals of the method; ``None`` elsewhere."""
        if isinstance(node, ast.Attribute):
            base = self._stands_for(node.value)
            return None if base is None else getattr(base, node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self._is_part:
            return None
        if node.id == "self":
            return self._owner
        names: Mapping[str, object] = inspect.unwrap(self._method).__globals__
        return names.get(node.id)

    def _combined(self, left: ast.expr, op: ast.operator, right: ast.expr) -> bool:
        sides = [self._holds_part(left), self._holds_part(right)]
        if not any(sides):
            return False
        numbers = [isinstance(self._number(one), int | float) for one in (left, right)]
        is_power = isinstance(op, ast.Pow) and sides[0] and numbers[1]
        if is_power or (isinstance(op, _OPERATORS) and all(a or b for a, b in zip(sides, numbers, strict=True))):
            return True
        raise _Unclear(f"its code combines what lies between with something else: {_short(left)}, {_short(right)}")

    def _number(self, node: ast.expr) -> object:
        return node.value if isinstance(node, ast.Constant) else self._stands_for(node)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - a line is enough
