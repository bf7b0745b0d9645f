# SPDX-License-Identifier: Apache-2.0
"""How an attention module counts its heads, read from its code: whether it still works with some of them. Pure.

Used by plan.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_HEAD_SIZES = ("head_dim", "attention_head_size", "d_head", "dim_head", "head_size", "key_value_proj_dim", "d_kv")
_HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "h", "num_query_heads", "n_local_heads",
)  # fmt: skip
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_WIDTH_POSITION = 2
_SHAPING = {
    "view", "reshape", "unflatten", "expand", "repeat", "repeat_interleave", "repeat_kv", "split_heads", "rearrange",
}  # fmt: skip
_ACROSS = {
    "mean", "sum", "prod", "norm", "normalize", "layer_norm", "rms_norm", "group_norm", "std", "var", "amax", "amin",
    "max", "min", "argmax", "argmin", "topk", "sort", "cumsum", "cumprod", "logsumexp", "einsum", "flip", "roll",
}  # fmt: skip
_OF_KEYS = {"-1", "3"}
"""Dimensions of [batch, heads, queries, keys] that a softmax may be over."""


@dataclass(frozen=True)
class HeadsUse:
    """What splitting an attention by heads needs."""

    num_heads: int
    num_kv_heads: int
    counts: dict[str, int]
    """Attributes that its code counts heads with, and their values."""


def heads_use(module: nn.Module, q_width: int, kv_width: int, out_width: int) -> HeadsUse | str:
    """Return how a module counts heads, or why that is not clear.

    Clear is code that views projections as ``[..., -1, head_dim]``, or as ``[..., num_heads, -1]`` with a count that is
    the module's own, and takes no width from anywhere else.

    Args:
        module: attention with separate projections.
        q_width: outputs of the projection of queries.
        kv_width: outputs of that of keys, and of values.
        out_width: inputs of the projection that comes last.
    """
    numbers = {n: v for n, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool)}
    size = next((numbers[name] for name in _HEAD_SIZES if name in numbers), None)
    count = next((numbers[name] for name in _HEAD_COUNTS if name in numbers), None)
    if size is None and count is None:
        return "it says neither how many heads it has nor how large they are"
    if size is None or size <= 0:
        size = q_width // count if count else 0
    if not size or q_width % size or kv_width % size or out_width != q_width:
        return f"its projections ({q_width}, {kv_width}, {out_width}) are no whole number of heads of {size}"
    num_heads, num_kv_heads = q_width // size, kv_width // size
    used = _read_by_code(module)
    if isinstance(used, str):
        return used
    if why := _why_across_heads(module, {*_HEAD_COUNTS, *_KV_COUNTS} & numbers.keys()):
        return why
    counts: dict[str, int] = {}
    for name in used & numbers.keys():
        value = numbers[name]
        if name in _HEAD_SIZES:
            continue
        if (name in _HEAD_COUNTS and value == num_heads) or (name in _KV_COUNTS and value == num_kv_heads):
            counts[name] = value
        elif value in {q_width, kv_width, num_heads, num_kv_heads} and not _is_ratio(name):
            return f"its code uses self.{name} ({value}), which is as large as what is split"
    return HeadsUse(num_heads, num_kv_heads, counts)


def forward_source(module: nn.Module) -> str:
    """Return the text of a module's ``forward``, or nothing where it cannot be read."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


def name_self(method: ast.FunctionDef) -> None:
    """Have a method call its object ``self``, whatever it does."""
    own = method.args.args[0].arg if method.args.args else "self"
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id == own:
            node.id = "self"


def _is_ratio(name: str) -> bool:
    """Whether a number stays the same for some of the heads: how many queries share a key."""
    return "group" in name or "rep" in name or "layer" in name


def _methods(module: nn.Module) -> list[ast.FunctionDef]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
    methods = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
    for one in methods:
        name_self(one)
    return methods


def _why_across_heads(module: nn.Module, counts: set[str]) -> str | None:
    """Return what works on all heads, or may; ``None`` where each head is on its own as far as can be read."""
    for method in _methods(module):
        above = {child: node for node in ast.walk(method) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(method):
            if isinstance(node, ast.Call) and (why := _why_across(node)):
                return why
            if isinstance(node, ast.Attribute) and node.attr in counts and ast.unparse(node.value) == "self":
                if not _only_shapes(node, above, method):
                    return f"its code uses {ast.unparse(node)} for more than the shape of what is split"
            elif (of := _measured(node)) is not None and not _is_in_heads(of, node, method):
                return f"its code uses {ast.unparse(node)}, perhaps the width of what is split"
    return None


def _why_across(call: ast.Call) -> str | None:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if called in _ACROSS:
        return f"its code calls {called}(), which may work on several heads"
    if called == "softmax":
        is_method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in {
            "F", "torch", "nn.functional", "torch.nn.functional", "functional",
        }  # fmt: skip
        place = 0 if is_method else 1
        dims = [ast.unparse(one.value) for one in call.keywords if one.arg == "dim"]
        dims += [ast.unparse(one) for one in call.args[place : place + 1]]
        if not dims or dims[0] not in _OF_KEYS:
            return "its code takes a softmax of something else than the last dimension"
    return None


def _only_shapes(node: ast.AST, above: dict[ast.AST, ast.AST], method: ast.FunctionDef) -> bool:
    """Return whether a count of heads only goes into the shapes of views."""
    inside: ast.AST | None = above.get(node)
    while isinstance(inside, ast.Tuple | ast.List | ast.Starred | ast.BinOp | ast.keyword):
        inside = above.get(inside)
    if isinstance(inside, ast.Call):
        called = inside.func.attr if isinstance(inside.func, ast.Attribute) else ast.unparse(inside.func)
        return called in _SHAPING
    if not isinstance(inside, ast.Assign) or not isinstance(inside.targets[0], ast.Name):
        return False
    name = inside.targets[0].id
    uses = [one for one in ast.walk(method) if isinstance(one, ast.Name) and one.id == name]
    return all(_only_shapes(one, above, method) for one in uses if isinstance(one.ctx, ast.Load))


def _measured(node: ast.AST) -> ast.expr | None:
    """Return what ``x.shape[-1]`` or ``x.size(-1)`` take the last dimension of, perhaps that of projections."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return node.value.value if ast.unparse(node.slice) in {"-1", "2"} else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return node.func.value if [ast.unparse(one) for one in node.args] in (["-1"], ["2"]) else None
    return None


def _is_in_heads(of: ast.expr, at: ast.AST, method: ast.FunctionDef) -> bool:
    """Return whether a name was last given something viewed in heads, before it is used."""
    text = ast.unparse(of)
    line = getattr(at, "lineno", 0)
    given = [
        one.value
        for one in ast.walk(method)
        if isinstance(one, ast.Assign)
        and one.lineno < line
        and any(isinstance(n, ast.Name) and n.id == text for target in one.targets for n in ast.walk(target))
    ]
    latest = max(given, key=lambda one: one.lineno, default=None)
    return latest is not None and any(
        isinstance(one, ast.Attribute) and one.attr in _SHAPING for one in ast.walk(latest)
    )


def _read_by_code(module: nn.Module) -> set[str] | str:
    """Return the attributes of ``self`` that the methods of a class read, or what makes them unclear."""
    names: set[str] = set()
    try:
        methods = _methods(module)
    except (OSError, TypeError, SyntaxError):
        return "the source of its class cannot be read"
    if not any(one.name == "forward" for one in methods):
        return "its class inherits forward"
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.config":
                if node.attr in {*_HEAD_COUNTS, *_KV_COUNTS, "hidden_size", "n_embd", "d_model"}:
                    return f"its code uses self.config.{node.attr}, which is of the whole layer"
            elif width := _unpacked_width(node):
                loads = [n for n in ast.walk(method) if isinstance(n, ast.Name) and n.id == width]
                if any(isinstance(n.ctx, ast.Load) for n in loads):
                    return f"its code uses the width {width} of its input for what is split"
    return names


def _unpacked_width(node: ast.AST) -> str | None:
    """Return the name that ``b, t, c = x.shape`` or ``x.size()`` gives to the width."""
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
        return None
    text = ast.unparse(node.value)
    names = node.targets[0].elts
    if not text.endswith((".shape", ".size()")) or len(names) <= _WIDTH_POSITION:
        return None
    last = names[-1]
    return last.id if isinstance(last, ast.Name) and last.id != "_" else None
