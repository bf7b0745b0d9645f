# SPDX-License-Identifier: Apache-2.0
"""The modules of a model that are never split between devices or ranks: its blocks. And modules by names with ``*``.

Changes nothing. Used by every strategy that splits a model.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    Kept = str | type[nn.Module]
    """A name or a class of modules."""


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_COMBINING_CALLS = {"add", "cat", "concat", "concatenate", "stack", "mul", "matmul", "bmm", "einsum", "lerp"}


def blocks(model: nn.Module, keep_whole: Kept | Iterable[Kept] = ()) -> list[str]:
    """Return the names of the modules that are never split, in the order in which they were registered.

    Together they hold every parameter of the model, but for what an open module holds itself (a ``pos_embed`` of the
    root). Open, that is, free to be split, are

    - the root,
    - plain containers: ``Sequential``, ``ModuleList``, ``ModuleDict``, also subclasses without a ``forward``,
    - a module that holds a container of blocks, as a ``LlamaModel`` holds its ``layers``, and one that only hands
      values from one layer of its container to the next, unless it is itself an item of a container.

    Everything else is a block: each item of a container (a ``Bottleneck``, a decoder layer), whose parts work on the
    same values and would send them back and forth, and each single layer.

    Args:
        model: any module, also on the meta device.
        keep_whole: classes and names of modules that are blocks too. What a transformers model lists as
            ``_no_split_modules`` need not be repeated.

    Returns:
        Names as in ``model.named_modules()``. ``[""]`` where the model is one layer, or kept whole.

    Raises:
        ConfigurationError: ``keep_whole`` names something that the model does not have.
    """
    return list(reasons(model, keep_whole))


def block_of(name: str, names: Iterable[str]) -> str | None:
    """Return which of the blocks ``names`` a module or parameter is, or lies in."""
    return next((block for block in names if block in {"", name} or name.startswith(f"{block}.")), None)


def reasons(model: nn.Module, keep_whole: Kept | Iterable[Kept] = ()) -> dict[str, str]:
    """Return every block with why it is not split, as :func:`blocks` orders them."""
    kept = _kept(keep_whole)
    names = {one for one in kept if isinstance(one, str)}
    check_names(model, names)
    classes = tuple(one for one in kept if not isinstance(one, str))
    for kind in classes:
        if not any(isinstance(module, kind) for module in model.modules()):
            raise ConfigurationError(
                f"keep_whole names the class {kind.__name__}, but the model has no module of this class.",
                do="name a class of a module of this model, or the module itself",
            )
    no_split = {str(word) for module in model.modules() for word in getattr(module, "_no_split_modules", None) or ()}
    found: dict[str, str] = {}
    seen: set[nn.Module] = set()
    # No function that calls itself: it would keep the model until the garbage collector comes.
    waiting: list[tuple[nn.Module, str, str | None]] = [(model, "", None)]
    while waiting:
        module, name, container = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        why = None
        if name in names or isinstance(module, classes):
            why = "named by keep_whole"
        elif type(module).__name__ in no_split:
            why = f"{type(module).__name__} is one of the model's _no_split_modules"
        elif not is_plain_container(module) and (name or not list(module.children())):
            why = _why_whole(module, container)
        if why is not None:
            found[name] = why
            seen.update(module.modules())
            continue
        inside = (name or "the model") if is_plain_container(module) else None
        children = [(child, f"{name}.{part}" if name else part, inside) for part, child in module.named_children()]
        waiting += reversed(children)
    return found


def _kept(keep_whole: Kept | Iterable[Kept]) -> tuple[Kept, ...]:
    """Return what ``keep_whole`` names, one by one.

    Raises:
        ConfigurationError: it holds something that is neither a name nor a class of modules.
    """
    kept = (keep_whole,) if isinstance(keep_whole, str | type | nn.Module) else keep_whole
    kept = tuple(kept) if isinstance(kept, Iterable) else (kept,)
    for one in kept:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            what = f"a {type(one).__name__}" if isinstance(one, nn.Module) else repr(one)
            raise ConfigurationError(
                f"keep_whole must contain names or classes of modules, got {what}.",
                do='use names from model.named_modules(), or pass their class: keep_whole=["layers.0", Block]',
            )
    return kept


def is_plain_container(module: nn.Module) -> bool:
    """Return whether a module only lists others, and hands values from one to the next if anything."""
    own = type(module).forward
    return isinstance(module, _CONTAINERS) and own in {kind.forward for kind in _CONTAINERS}


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called. ``ModuleList`` and ``ParameterList``, for two, cannot."""
    return type(module).forward is not nn.Module.forward


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Raise unless the model has a module of each of the names.

    Raises:
        ConfigurationError: it has not; the near ones are listed.
    """
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"{type(model).__name__} has no module named {name!r}.",
                evidence=near(name, known),
                do="correct the name",
            )


def near(name: str, known: Iterable[str]) -> str:
    """Return, as a line for an error, which known names are most like one that is not."""
    names = [one for one in known if one]
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    # What somebody wrote without its prefix ("fc1" for "head.fc1") is not close as text.
    last = name.rpartition(".")[2]
    close += [one for one in names if one.rpartition(".")[2] == last and one not in close][:4]
    if close:
        return "near it: " + ", ".join(close)
    return "it has " + ", ".join(names[:8]) + (f", ... ({len(names) - 8} more)" if len(names) > 8 else "")  # noqa: PLR2004 - enough to know the model by


def _why_whole(module: nn.Module, container: str | None) -> str | None:
    """Return why a module that is neither the root nor a plain container is a block; ``None`` where it is open."""
    kind = type(module).__name__
    children = list(module.children())
    if not children:
        return f"{kind} is a single layer"
    if container is not None:
        return f"{kind} is one of the blocks of {container}"
    inner = [below for child in children for below in child.modules() if is_plain_container(below)]
    if any(list(item.children()) and not is_plain_container(item) for below in inner for item in below.children()):
        return None
    if not inner:
        return f"{kind} holds no container of blocks"
    return None if _only_hands_on(module) else f"{kind} combines values of its submodules"


def _only_hands_on(module: nn.Module) -> bool:
    """Return whether ``forward`` combines nothing itself, as a residual block would, as far as its source tells."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    return not any(
        isinstance(node, ast.BinOp | ast.AugAssign)
        or (isinstance(node, ast.Attribute) and node.attr.rstrip("_") in _COMBINING_CALLS)
        for node in ast.walk(tree)
    )


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern stands for: ``layers.*`` is each layer, and nothing within one."""
    return [name for name in names if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)]
