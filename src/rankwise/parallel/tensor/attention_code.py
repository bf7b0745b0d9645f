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


def _is_ratio(name: str) -> bool:
    """Whether a number stays the same for some of the heads: how many queries share a key."""
    return "group" in name or "rep" in name or "layer" in name


def _read_by_code(module: nn.Module) -> set[str] | str:
    """Return the attributes of ``self`` that the methods of a class read, or what makes them unclear."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
    except (OSError, TypeError, SyntaxError):
        return "the source of its class cannot be read"
    names: set[str] = set()
    methods = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
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
