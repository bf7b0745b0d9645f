# SPDX-License-Identifier: Apache-2.0
"""What to write in place of a wrong name, attribute or argument: the fix of an error that Python itself raised.

A table of what scripts bring from other libraries; else the nearest name, read from the line that failed and what its
names stand for. Called once, for the error that ends a rank. Imports nothing of rankwise.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import linecache
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType, TracebackType

_FIXES = {
    r"Cannot interpret 'torch\.\w+' as a data type": "NumPy does not know torch's dtypes: write tensor.dtype in place "
    "of np.dtype(tensor.dtype).name",
    r"'[\d,-]+' does not appear to be an IPv4 or IPv6 address": "If the address is a list of machines, such as "
    "host[0-1], give the first one: scontrol show hostnames | head -n 1",
}
"""Errors of other libraries that scripts for clusters run into, by a pattern of their text."""

_NAMES = {
    "Accelerator": "rankwise.join(), rankwise.replicate(model) and rankwise.DataLoader(...)",
    "DDP": "rankwise.replicate(model)",
    "DistributedDataParallel": "rankwise.replicate(model)",
    "DistributedSampler": "rankwise.DataLoader(dataset, global_batch_size=...), which divides the samples itself",
    "FSDP": "rankwise.shard(model)",
    "FullyShardedDataParallel": "rankwise.shard(model)",
    "Trainer": "your own loop, with rankwise.join(), rankwise.replicate(model) and rankwise.DataLoader(...)",
    "destroy_process_group": "rankwise.leave()",
    "fully_shard": "rankwise.shard(model)",
    "get_rank": "world.rank, with world = rankwise.join()",
    "get_world_size": "world.world_size, with world = rankwise.join()",
    "init": "world = rankwise.join()",
    "init_process_group": "world = rankwise.join()",
    "local_rank": "world.local_rank, with world = rankwise.join()",
    "rank": "world.rank, with world = rankwise.join()",
    "restore": "rankwise.load(directory, model=model), or restore() of a rankwise.Checkpointer",
    "shutdown": "rankwise.leave()",
    "size": "world.world_size, with world = rankwise.join()",
    "world_size": "world.world_size, with world = rankwise.join()",
}
"""Names of other libraries, and what rankwise has in their place."""

_ATTRIBUTES = {
    ("DataLoader", "set_epoch"): "leave the line out: the loader counts its epochs; with shuffle=True each "
    "has another order",
}
"""Attributes of torch's objects that those of rankwise do not have, by class."""

_UNUSED = "leave it out: parameters that no rank or only some ranks use need no flag"
_ON_DEVICE = "leave it out, and move the model before: model.to(world.device)"
_ARGUMENTS = {
    "device_ids": _ON_DEVICE,
    "find_unused_parameters": _UNUSED,
    "output_device": _ON_DEVICE,
    "static_graph": _UNUSED,
}
"""Arguments of torch's calls that those of rankwise do not have."""


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return what to write in place of a name that rankwise does not have, as the end of a sentence."""
    if name in _NAMES:
        return f"write {_NAMES[name]}"
    nearest = [f"rankwise.{one}" for one in _nearest(name, known)]
    return f"did you mean {_any_of(nearest)}?" if nearest else "dir(rankwise) lists its names"


def fix_of(error: BaseException) -> str | None:
    """Return what to write in place of the line that raised ``error``; ``None`` if unknown."""
    # The error, and what the line names, may be objects of the script's that raise whatever is asked of them.
    with contextlib.suppress(Exception):
        return _fix_of(error)
    return None


def _fix_of(error: BaseException) -> str | None:
    text = str(error)
    found = next((fix for pattern, fix in _FIXES.items() if re.search(pattern, text)), None)
    if found is not None:
        return found
    if isinstance(error, IsADirectoryError) and (Path(str(error.filename)) / "manifest.json").is_file():
        return f"load a checkpoint of rankwise by rankwise.load({str(error.filename)!r}, model=model)"
    if isinstance(error, AttributeError) and "has no attribute" in text:
        return _fix_of_attribute(error)
    return _fix_of_call(error) if isinstance(error, TypeError) else None


def _fix_of_attribute(error: AttributeError) -> str | None:
    """Return the fix for an attribute that an object of rankwise's does not have, or a ``None`` that it holds."""
    owner = error.obj
    if owner is None and (failed := _failed(error)) is not None and isinstance(failed[0], ast.Attribute):
        owner = next((one for one in _values(failed[0].value, failed[1]) if _is_own(one)), None)
    if not _is_own(owner) or inspect.ismodule(owner):
        return None
    name = str(error.name)
    known = _ATTRIBUTES.get((type(owner).__name__, name))
    if known is not None or error.obj is None:
        return known
    public = [one for one in dir(owner) if not one.startswith("_")]
    return f"did you mean {_any_of(nearest)}?" if (nearest := _nearest(name, public)) else f"it has {', '.join(public)}"


def _fix_of_call(error: TypeError) -> str | None:
    """Return the fix for a call of rankwise's, if Python refused its arguments."""
    failed = _failed(error)
    if failed is None:
        return None
    node, frame = failed
    if not isinstance(node, ast.Call) or _is_named_own(frame.f_globals.get("__name__")):
        return None
    written = ast.unparse(node.func)
    values = _values(node.func, frame)
    text = str(error)
    if text.endswith("object is not callable"):
        is_field = len(values) > 1 and _is_own(values[-2]) and not inspect.ismodule(values[-2])
        return f"write {written}, without parentheses" if is_field else None
    if not values or not _is_own(values[-1]) or "argument" not in text:
        return None
    parameters = list(inspect.signature(values[-1]).parameters.values())
    form = f"{written}({', '.join(map(_as_written, parameters))})"
    if unexpected := re.search(r"unexpected keyword argument '(\w+)'", text):
        name = unexpected[1]
        if name in _ARGUMENTS:
            return _ARGUMENTS[name]
        nearest = _nearest(name, [one.name for one in parameters])
        return f"did you mean {_any_of(nearest)}? The call is {form}" if nearest else f"the call is {form}"
    if "positional argument" in text and any(one.kind is one.VAR_KEYWORD for one in parameters):
        num_unnamed = sum(one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD} for one in parameters)
        names = [f"{one.id}={one.id}" if isinstance(one, ast.Name) else "name=..." for one in node.args[num_unnamed:]]
        words = [*map(ast.unparse, node.args[:num_unnamed]), *names, *map(ast.unparse, node.keywords)]
        return f"name each object: {written}({', '.join(words)})"
    return f"write {form}"


def _as_written(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return f"{parameter.name}=..." if parameter.kind is parameter.KEYWORD_ONLY else parameter.name


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three names that contain ``name``, or are like it."""
    known = list(known)
    parts = sorted((one for one in known if name.lower() in one.lower().split("_")), key=len)
    return list(dict.fromkeys([*parts, *difflib.get_close_matches(name, known, n=1)]))[:3]


def _any_of(names: list[str]) -> str:
    return " or ".join(names)


# -- the line that failed --------------------------------------------------------------------------------------


def _failed(error: BaseException) -> tuple[ast.expr, FrameType] | None:
    """Return the expression that raised ``error``, from the source of its innermost frame."""
    trace = None
    for each in _traces(error):
        if each.tb_frame.f_globals.get("__name__") != "contextlib":  # which calls what a context manager is made of
            trace = each
    if trace is None:
        return None
    frame = trace.tb_frame
    (place,) = traceback.extract_tb(trace)
    first, last, start, end = place.lineno, place.end_lineno, place.colno, place.end_colno
    if first is None or last is None or start is None or end is None:
        return None
    # Columns count bytes.
    lines = [line.encode() for line in linecache.getlines(place.filename, frame.f_globals)[first - 1 : last]]
    source = b"".join([*lines[:-1], lines[-1][:end]])[start:] if lines else b""
    try:
        return ast.parse(source.decode(), mode="eval").body, frame
    except (SyntaxError, UnicodeDecodeError):
        return None


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _values(node: ast.expr, frame: FrameType) -> list[Any]:
    """Return what each part of ``a.b.c`` stands for, as far as that runs no code of the script's."""
    if isinstance(node, ast.Name):
        scope = frame.f_locals if node.id in frame.f_locals else frame.f_globals
        return [scope[node.id]] if node.id in scope else []
    if not isinstance(node, ast.Attribute) or not (values := _values(node.value, frame)):
        return []
    owner = values[-1]
    if isinstance(inspect.getattr_static(owner, node.attr, None), property):
        return []
    if inspect.ismodule(owner) or _is_own(owner):
        return [*values, getattr(owner, node.attr, None)]
    fields = getattr(owner, "__dict__", {})
    return [*values, fields[node.attr]] if node.attr in fields else []


def _is_own(value: object) -> bool:
    """Return whether ``value`` is a module, a function, a class or an object of rankwise's."""
    return _is_named_own(value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None))


def _is_named_own(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "rankwise"
