# SPDX-License-Identifier: Apache-2.0
"""How the layers of a model are split for tensor parallelism, as a value; and a plan given by the user, checked.

A pair of linear layers is split so that the features between them stay on their rank: the first by its outputs
("column"), the second by its inputs ("row"). Imported by the rest of this package.
"""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rankwise.errors import ConfigurationError
from rankwise.replicate.blocks import has_forward, matching, near
from rankwise.tensor_parallel.trial import Differs, Split, check_split, follow, is_linear, shape_of
from rankwise.torch_private.modules import TABLES
from rankwise.torch_private.tensors import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

Style: TypeAlias = "str | ParallelStyle"

STYLES = {
    "column": "a Linear split by its outputs; each rank keeps its part of the output",
    "row": "a Linear split by its inputs, which are parts; the output is whole",
    "head": "a Linear split by its outputs, which are then gathered whole",
    "vocab": "an Embedding split by its words; the output is whole",
    "replicate": "whole on every rank",
}


@dataclass
class TensorPlan:
    """The style of each layer that is split."""

    styles: dict[str, Style] = field(default_factory=dict)
    """By name of the module."""
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that count heads, and their values on one rank."""
    whole: dict[str, str] = field(default_factory=dict)
    """Modules that were left whole, and why."""

    def __str__(self) -> str:
        lines = [f"{name}: {style}" for name, style in self.styles.items()]
        lines += [f"{name}: {', '.join(f'{a}={n}' for a, n in counts.items())}" for name, counts in self.heads.items()]
        return "\n".join(lines + [f"{name}: whole, {why}" for name, why in self.whole.items()])


def given_plan(model: nn.Module, given: Mapping[str, Style], tp: int) -> TensorPlan:
    """Return the plan of styles by module name, with ``*`` for any part of a name; later entries win.

    Raises:
        ConfigurationError: no module has a name, a style is unknown or does not fit its module, or ``tp`` ranks cannot
            share a size evenly.
    """
    if not given:
        raise ConfigurationError(
            "The plan of tensor_parallel() splits nothing.",
            do='name the layers to split: plan={"layers.*.up": "column", "layers.*.down": "row"}',
        )
    modules = dict(model.named_modules())
    styles: dict[str, Style] = {}
    for pattern, style in given.items():
        found = matching(pattern, modules) if isinstance(pattern, str) else []
        if not found:
            raise ConfigurationError(
                f"The plan names {pattern!r}, but {type(model).__name__} has no such module.",
                evidence=near(str(pattern), modules),
                do="pass names from model.named_modules(), with * for a part: layers.*.up",
            )
        for name in found:
            _check_style(name, modules[name], style, tp)
            styles[name] = style
    return TensorPlan({name: style for name, style in styles.items() if style != "replicate"})


def _check_style(name: str, module: nn.Module, style: object, tp: int) -> None:
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str) or style not in STYLES:
        raise ConfigurationError(
            f"Unknown style {style!r} of {name} in the plan.",
            evidence="\n".join(f'"{known}": {means}' for known, means in STYLES.items()),
            do="use one of these, or a style of torch.distributed.tensor.parallel",
        )
    if style == "replicate":
        return
    wanted = nn.Embedding if style == "vocab" else nn.Linear
    if not isinstance(module, wanted):
        raise ConfigurationError(
            f'The style "{style}" of {name} requires a {wanted.__name__}, not a {type(module).__name__}.',
            do="pass a style of torch.distributed.tensor.parallel for other layers",
        )
    size, what = 0, ""
    if isinstance(module, nn.Linear) and style in {"column", "row"}:
        size, what = (module.out_features, "outputs") if style == "column" else (module.in_features, "inputs")
    if size % tp:
        raise ConfigurationError(
            f"{name} has {size} {what}, which cannot be divided evenly among {tp} ranks.",
            do=f"use {divisors(size, tp)} ranks along tp, or omit it from the plan",
        )


def tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def split_differently(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the first modules that share a parameter which they would split differently, and their styles."""
    name_of = {module: name for name, module in model.named_modules()}
    dims = {"column": 0, "head": 0, "vocab": 0, "row": 1}
    for places in tied(model):
        sharing = {name_of[module]: styles.get(name_of[module], "replicate") for module, _ in places}
        if len({dims.get(style) if isinstance(style, str) else style for style in sharing.values()}) > 1:
            return sharing
    return {}


def check_tied(model: nn.Module, plan: TensorPlan) -> None:
    """Raise unless every place of a tied parameter is split the same way.

    Raises:
        ConfigurationError: it is split in different ways.
    """
    if sharing := split_differently(model, plan.styles):
        first, second, *_ = sharing
        raise ConfigurationError(
            f"{first} and {second} share a parameter, but the plan splits them differently.",
            evidence="\n".join(f"{name}: {style}" for name, style in sharing.items()),
            do='use matching styles for both, such as "vocab" and "head", or omit both',
        )


def join(name: str, child: str) -> str:
    """Return the full name of a child; the model itself is named by an empty text."""
    return f"{name}.{child}" if name else child


def divisors(size: int, tp: int) -> str:
    """Return, in words, among how many ranks a size can be divided evenly."""
    fitting = [str(n) for n in range(1, max(tp, 2) + 1) if size % n == 0]
    return " or ".join(fitting)


_TRIED_FEATURES = 64
"""The trial has at most so many features between two layers on one rank."""
_MLP_COLUMNS = 2
"""Layers that feed one row: more are the projections of an attention."""
_MOST_COUNTS = 3
"""So many attributes may count heads."""
_UNLIKE = {*TABLES, "layer_idx", "layer_id", "layer_index", "layer_number"}
"""Attributes that differ between identical layers: the index of a layer, as for a cache."""


@dataclass
class _Group:
    """Layers of a module that belong together."""

    columns: tuple[str, ...]
    row: str
    why: str | None = None
    """Why they stay whole."""
    heads: tuple[int, int] = (0, 0)
    """Of an attention that is split: its heads, and its heads of keys and values."""
    counts: dict[str, int] = field(default_factory=dict)
    """Attributes to set, and the heads that they count."""

    @property
    def is_attention(self) -> bool:
        """Return whether its columns are projections."""
        return len(self.columns) > _MLP_COLUMNS


def find_plan(model: nn.Module, tp: int) -> TensorPlan:
    """Return the plan for ``tp`` ranks found by looking at the model, which may be on the meta device.

    Raises:
        ConfigurationError: attention heads cannot be shared by so many ranks, or there is nothing to split.
    """
    plan = TensorPlan()
    known: dict[Hashable, list[_Group] | str] = {}
    attentions: list[tuple[str, _Group]] = []
    for name, owner, names in _owners(model, plan):
        key = _description(owner)
        if key not in known:
            known[key] = _groups(owner, names, tp)
        groups = known[key]
        if isinstance(groups, str):
            plan.whole[name] = groups
            continue
        for group in groups:
            layers = [join(name, one) for one in (*group.columns, group.row)]
            if any(one in plan.styles for one in layers):
                continue
            if group.is_attention:
                attentions.append((name, group))
            if group.why is None:
                plan.styles.update(dict.fromkeys(layers, "column") | {layers[-1]: "row"})
            else:
                plan.whole[name if group.is_attention else layers[-1]] = group.why
    _add_heads(plan, model, attentions, tp)
    _add_vocabulary(plan, model, tp)
    if not plan.styles:
        raise ConfigurationError(
            f"tensor_parallel() recognises no layer of {type(model).__name__} that it can split.",
            evidence="\n".join(f"{name}: {why}" for name, why in plan.whole.items())
            or "no forward of its modules computes the input of one nn.Linear from the output of another",
            do='name them: plan={"layers.*.up": "column", "layers.*.down": "row"}',
        )
    return plan


def _owners(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield modules whose own code calls several linear layers, with the names of these."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            plan.whole[name] = "nn.MultiheadAttention packs its three projections into one"
        elif type(module).forward is nn.Sequential.forward:
            # Its code is known: other layers need not run.
            children = list(module.named_children())
            places = [place for place, (_, child) in enumerate(children) if isinstance(child, nn.Linear)]
            for first, last in itertools.pairwise(places):
                piece = nn.Sequential(OrderedDict(children[first : last + 1]))
                yield name, piece, [children[first][0], children[last][0]]
        elif has_forward(module):
            names = list(_linears(module))
            shapes = [shape_of(module.get_submodule(one)) for one in names]
            if any(outputs == inputs for (outputs, _), (_, inputs) in itertools.permutations(shapes, 2)):
                yield name, module, names


def _linears(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the linear layers that a module's own code calls; those in a ModuleDict are its own too."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            yield join(prefix, name)
        elif not has_forward(child):
            yield from _linears(child, join(prefix, name))


def _groups(owner: nn.Module, names: list[str], tp: int) -> list[_Group] | str:
    """Return the layers that belong together, or why that is unknown."""
    numbers = {name: one for name, one in vars(owner).items() if type(one) is int and one > 0 and name not in _UNLIKE}
    widths = [shape_of(owner.get_submodule(name))[0] for name in names]
    below = {size for module in owner.modules() if isinstance(size := vars(module).get("head_dim"), int)}
    try:
        inputs, feeds = follow(owner, names, [*dict.fromkeys([*_sizes(numbers, widths), *below])])
    except Differs as reason:
        return str(reason)
    groups: list[_Group] = []
    taken: set[str] = set()
    for row, columns in feeds.items():
        if not columns or taken & {row, *columns}:
            continue
        group = _Group(tuple(one for one in names if one in columns), row)
        _try(owner, group, inputs, numbers, tp)
        groups.append(group)
        if group.why is None:
            taken |= {row, *columns}
    if not groups and len(feeds) < len(names):
        return f"its code does not call {next(name for name in names if name not in feeds)}"
    return groups


def _try(owner: nn.Module, group: _Group, inputs: Any, numbers: Mapping[str, int], tp: int) -> None:
    """Note in a group how it is split, or why it is not."""
    layers = [owner.get_submodule(name) for name in (*group.columns, group.row)]
    width = shape_of(layers[-1])[1]
    outs = [shape_of(one)[0] for one in layers[:-1]]
    if not all(map(is_linear, layers)):
        group.why = "its layers do more than nn.Linear"
    elif not group.is_attention and set(outs) == {width}:
        if width % tp:
            group.why = f"{width} inputs cannot be shared by {tp} ranks evenly"
            return
        features = dict.fromkeys((*group.columns, group.row), min(width // tp, _TRIED_FEATURES))
        try:
            check_split(owner, Split(group.columns, group.row, features), inputs)
        except Differs as reason:
            group.why = str(reason)
    elif group.is_attention and width in outs and len({*outs, width}) <= 2:  # noqa: PLR2004 - queries and keys
        _try_heads(owner, group, inputs, numbers, dict(zip(group.columns, outs, strict=True)))
    else:
        group.why = f"its layers have {', '.join(map(str, outs))} outputs, but the next takes {width}"


def _sizes(numbers: Mapping[str, int], widths: list[int]) -> list[int]:
    """Return sizes that heads may have, by a module's attributes: numbers of features, or of heads."""
    found = {*numbers.values()} | {width // one for width in widths for one in numbers.values() if width % one == 0}
    return sorted(one for one in found if any(width % one == 0 for width in widths))


def _try_heads(
    owner: nn.Module, group: _Group, inputs: Any, numbers: Mapping[str, int], outs: Mapping[str, int]
) -> None:
    """Note how an attention is split: the smallest size of heads with which it computes the same in parts."""
    width, keys = max(outs.values()), min(outs.values())
    group.why, has_run = "it says neither how many heads it has nor how large they are", False
    for size in _sizes(numbers, [width, keys]):
        num_heads, num_keys = width // size, keys // size
        if width % size or keys % size or num_heads % num_keys:
            continue
        # One head of keys and values on a rank, with those that share it: sizes that cut a head differ.
        shared = num_heads // num_keys
        features = {name: size * (shared if out == width else 1) for name, out in outs.items()}
        counting = [name for name, one in numbers.items() if one in {num_heads, num_keys}]
        # Code that reshapes its projections by the size of a head needs no count.
        chosen = (
            one for n in range(min(len(counting), _MOST_COUNTS) + 1) for one in itertools.combinations(counting, n)
        )
        for names in chosen:
            counts = {name: shared if numbers[name] == num_heads else 1 for name in names}
            split = Split(group.columns, group.row, features | {group.row: size * shared}, counts, shared)
            try:
                check_split(owner, split, inputs)
            except Differs as reason:
                if reason.has_run or not has_run:
                    group.why, has_run = str(reason), reason.has_run
                continue
            group.why, group.heads = None, (num_heads, num_keys)
            group.counts = {name: numbers[name] for name in names}
            return


def _add_heads(plan: TensorPlan, model: nn.Module, attentions: list[tuple[str, _Group]], tp: int) -> None:
    """Set the heads of one rank. Leave an attention whole if one of its class is: they may pass each other heads."""
    whole = {type(model.get_submodule(name)): name for name, one in attentions if one.why is not None}
    for name, group in attentions:
        module = model.get_submodule(name)
        if group.why is not None:
            continue
        if type(module) in whole:
            plan.whole[name] = f"{whole[type(module)]} of the same class is whole"
            for layer in (*group.columns, group.row):
                del plan.styles[join(name, layer)]
            continue
        num_heads, num_keys = group.heads
        for what, count in (("heads", num_heads), ("heads of keys and values", num_keys)):
            if count % tp:
                raise ConfigurationError(
                    f"{name} ({type(module).__name__}) has {count} {what}, which cannot be divided evenly among {tp} "
                    "ranks.",
                    do=f"use {divisors(num_keys, tp)} ranks along tp, or pass a plan without it: "
                    "plan={...}, with names as plan_of() prints them",
                )
        if group.counts:
            own = {attribute: count // tp for attribute, count in group.counts.items()}
            plan.heads[name] = plan.heads.get(name, {}) | own


def _description(module: nn.Module) -> Hashable:
    """Return what is equal for modules that compute the same: their structure, plain values, and the same objects."""
    found: list[object] = []
    for name, one in module.named_modules(remove_duplicate=False):
        held = {key: value for key, value in vars(one).items() if key not in _UNLIKE}
        tensors = *one.named_parameters("", False, False), *one.named_buffers("", False, False)
        shapes = [(key, str(tensor.shape), tensor.dtype) for key, tensor in tensors]
        found += [
            name,
            type(one),
            shapes,
            {k: sorted(map(str, v)) if isinstance(v, set) else v for k, v in held.items()},
        ]
    leaves, spec = tree_flatten(found)
    plain = bool | int | float | str | torch.dtype | None
    return str(spec), *((type(one), one if isinstance(one, plain) else id(one)) for one in leaves)


# -- vocabulary ----------------------------------------------------------------------------------------


def _add_vocabulary(plan: TensorPlan, model: nn.Module, tp: int) -> None:
    """Split embeddings and the output layers that have as many outputs."""
    packed = {
        one for module in model.modules() if isinstance(module, nn.MultiheadAttention) for one in module.children()
    }
    embeddings = {name: one for name, one in model.named_modules() if isinstance(one, nn.Embedding)}
    for name, head in model.named_modules():
        if not isinstance(head, nn.Linear) or head in packed or name in plan.styles or head.out_features < tp:
            continue
        partners = [one for one, embedding in embeddings.items() if embedding.num_embeddings == head.out_features]
        if not partners:
            continue
        styles = plan.styles | {name: "head"} | dict.fromkeys(partners, "vocab")
        why = next((why for one in (*partners, name) if (why := _why_no_vocabulary(model, one))), None)
        if why is None and (differing := split_differently(model, styles)):
            other = next((one for one in differing if one not in {name, *partners}), name)
            why = f"{other or 'the model itself'} shares a parameter with it"
        if why is not None:
            plan.whole[partners[0]] = why
        else:
            plan.styles.update(styles)


def _why_no_vocabulary(model: nn.Module, name: str) -> str | None:
    layer = model.get_submodule(name)
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq):
        return "an Embedding with max_norm, sparse or scale_grad_by_freq cannot be split"
    *above, last = name.split(".")
    for depth in range(len(above) + 1):
        owner = model.get_submodule(".".join(above[:depth]))
        try:
            source = inspect.getsource(type(owner).forward)
        except (OSError, TypeError):
            continue
        if f".{last}.weight" in source:
            return f"the code of {type(owner).__name__} uses its weight itself"
    return None
