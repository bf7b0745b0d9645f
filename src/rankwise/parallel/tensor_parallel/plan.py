# SPDX-License-Identifier: Apache-2.0
"""How the layers of a model are split for tensor parallelism: found by names and shapes, or given by hand. Pure.

A pair of linear layers is split so that what lies between stays on its rank: the first by its outputs ("column"),
the second by its inputs ("row"). Names and shapes only suggest a pair; it is split where proof finds that the module
computes the same. Used by tensor_parallel.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rankwise.errors import ConfigurationError
from rankwise.parallel.core.blocks import has_forward, matching, near
from rankwise.parallel.tensor_parallel.proof import Proofs, Split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Style: TypeAlias = "str | ParallelStyle"

STYLES = {
    "column": "a Linear split by its outputs; each rank keeps its part of the output",
    "row": "a Linear split by its inputs, which are parts; the output is whole",
    "head": "a Linear split by its outputs, which are then gathered whole",
    "vocab": "an Embedding split by its words; the output is whole",
    "replicate": "whole on every rank",
}

_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("linear1",), "linear2"),
    (("lin1",), "lin2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_ATTENTIONS = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("wq", "wk", "wv"), ("wo",)),
    (("to_q", "to_k", "to_v"), ("to_out",)),
    (("query", "key", "value"), ("out", "output", "proj", "dense", "out_proj")),
    (("q", "k", "v"), ("o", "out", "proj")),
)
_HEAD_SIZES = ("head_dim", "attention_head_size", "d_head", "dim_head", "head_size", "key_value_proj_dim", "d_kv")
_HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "h", "num_query_heads", "n_local_heads",
)  # fmt: skip
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_TRIED_FEATURES = 64
"""At most so many features between two layers are tried on one rank."""
_TRIED_HEADS = 2
"""And so many heads of keys and values."""
_HEADS = {"lm_head", "head", "output", "embed_out", "unembed", "decoder", "out", "to_logits"}


@dataclass
class TensorPlan:
    """Which layer is split how."""

    styles: dict[str, Style] = field(default_factory=dict)
    """By name of the module."""
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that count heads, and what they count on one rank."""
    whole: dict[str, str] = field(default_factory=dict)
    """What was looked at and left whole, and why."""

    def __str__(self) -> str:
        lines = [f"{name}: {style}" for name, style in self.styles.items()]
        lines += [f"{name}: {', '.join(f'{a}={n}' for a, n in counts.items())}" for name, counts in self.heads.items()]
        return "\n".join(lines + [f"{name}: whole, {why}" for name, why in self.whole.items()])


def find_plan(model: nn.Module, tp: int) -> TensorPlan:
    """Return the plan that can be read off the model.

    Args:
        model: any module, also on the meta device.
        tp: how many ranks share a layer.

    Raises:
        ConfigurationError: attention heads cannot be shared by so many ranks, or there is nothing to split.
    """
    plan = TensorPlan()
    proofs = Proofs()
    for name, module in model.named_modules():
        if _is_inside(name, plan.whole):
            continue
        if isinstance(module, nn.MultiheadAttention):
            plan.whole[name] = "nn.MultiheadAttention packs its three projections into one"
        elif isinstance(module, nn.Sequential):
            _add_sequential(plan, proofs, name, module, tp)
        else:
            _add_attention(plan, proofs, name, module, tp)
            _add_mlp(plan, proofs, model, name, tp)
    _leave_siblings_whole(plan, model)
    _add_vocabulary(plan, model, tp)
    if not any(isinstance(style, ParallelStyle) or style != "replicate" for style in plan.styles.values()):
        raise ConfigurationError(
            f"tensor_parallel() recognises no layer of {type(model).__name__} that it can split.",
            evidence="\n".join(f"{name}: {why}" for name, why in plan.whole.items()) or None,
            do='name them: plan={"layers.*.up": "column", "layers.*.down": "row"}',
        )
    return plan


def given_plan(model: nn.Module, given: Mapping[str, Style], tp: int) -> TensorPlan:
    """Return the plan that the user wrote.

    Args:
        model: any module.
        given: styles by name of the module, with ``*`` for any part of a name; later ones win.
        tp: how many ranks share a layer.

    Raises:
        ConfigurationError: a name that no module has, an unknown style, a style that a module cannot have, or a size
            that the ranks cannot share evenly.
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


def tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def check_tied(model: nn.Module, plan: TensorPlan) -> None:
    """Raise unless every place of a tied parameter is split the same way.

    Raises:
        ConfigurationError: one is split and another is not, or otherwise.
    """
    name_of = {module: name for name, module in model.named_modules()}
    dims = {"column": 0, "head": 0, "vocab": 0, "row": 1}
    for places in tied(model):
        names = [name_of[module] for module, _ in places]
        styles = [plan.styles.get(name, "replicate") for name in names]
        if len({dims.get(style) if isinstance(style, str) else style for style in styles}) > 1:
            raise ConfigurationError(
                f"{names[0]} and {names[1]} share a parameter, but the plan splits them differently.",
                evidence="\n".join(f"{name}: {style}" for name, style in zip(names, styles, strict=True)),
                do='use matching styles for both, such as "vocab" and "head", or omit both',
            )


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
            do=f"use {_divisors(size, tp)} ranks along tp, or omit it from the plan",
        )


def _add_mlp(plan: TensorPlan, proofs: Proofs, model: nn.Module, name: str, tp: int) -> None:
    module = model.get_submodule(name)
    layers = {child: one for child, one in module.named_children() if isinstance(one, nn.Linear)}
    for firsts, last in _MLPS:
        if not layers.keys() >= {*firsts, last} or _join(name, last) in plan.styles:
            continue
        width = layers[last].in_features
        if any(layers[one].out_features != width for one in firsts):
            continue
        if width % tp:
            plan.whole.setdefault(_join(name, last), f"{width} inputs cannot be shared by {tp} ranks evenly")
            return
        why = _why_no_pair(proofs, model, name, firsts, last, tp=tp)
        if why is None:
            plan.styles |= {_join(name, one): "column" for one in firsts} | {_join(name, last): "row"}
        else:
            plan.whole.setdefault(name, why)
        return


def _why_no_pair(
    proofs: Proofs, model: nn.Module, name: str, firsts: tuple[str, ...], last: str, *, tp: int
) -> str | None:
    # A ModuleDict: whoever holds it calls its layers.
    above = name
    while above and not has_forward(model.get_submodule(above)):
        above = above.rpartition(".")[0]
    owner = model.get_submodule(above)
    if not has_forward(owner):
        return "no code of its own calls its layers"
    within = name[len(above) :].strip(".")
    return _why_not_split(proofs, owner, [_join(within, one) for one in firsts], _join(within, last), tp)


def _why_not_split(proofs: Proofs, owner: nn.Module, columns: list[str], row: str, tp: int) -> str | None:
    layers = [owner.get_submodule(one) for one in (*columns, row)]
    if not all(is_linear(one) for one in layers):
        return "its layers do more than nn.Linear"
    width = int(layers[-1].in_features)  # type: ignore[arg-type]
    features = dict.fromkeys((*columns, row), min(width // tp, _TRIED_FEATURES))
    return proofs.why_not(owner, Split(tuple(columns), row, tp, features))


def is_linear(module: object) -> bool:
    """Return whether a module calculates as ``nn.Linear`` does, and has no parameters of its own (an adapter's)."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    )


def _add_sequential(plan: TensorPlan, proofs: Proofs, name: str, module: nn.Sequential, tp: int) -> None:
    if type(module).forward is not nn.Sequential.forward:
        return
    children = list(module.named_children())
    first: int | None = None
    for place, (child, layer) in enumerate(children):
        if not isinstance(layer, nn.Linear) or not is_linear(layer):
            continue
        if first is not None:
            column, width = children[first][0], int(children[first][1].out_features)  # type: ignore[arg-type]
            piece = nn.Sequential(OrderedDict(children[first : place + 1]))
            if width == layer.in_features and width % tp == 0:
                why = _why_not_split(proofs, piece, [column], child, tp)
            else:
                why = f"{width} outputs over {tp} ranks"
            if why is None:
                plan.styles |= {_join(name, column): "column", _join(name, child): "row"}
                first = None
                continue
            plan.whole[_join(name, column)] = why
        first = place


@dataclass(frozen=True)
class _Heads:
    """How many heads an attention has, and the attributes that count them."""

    size: int
    queries: int
    keys: int
    query_counts: tuple[str, ...]
    key_counts: tuple[str, ...]


def _heads_of(module: nn.Module, q_width: int, kv_width: int, out_width: int) -> _Heads | str:
    """Return the heads that attributes of a module and the widths of its projections say, or why they do not."""
    numbers = {name: one for name, one in vars(module).items() if isinstance(one, int) and not isinstance(one, bool)}
    size = next((numbers[name] for name in _HEAD_SIZES if name in numbers), None)
    count = next((numbers[name] for name in _HEAD_COUNTS if name in numbers), None)
    if size is None and count is None:
        return "it says neither how many heads it has nor how large they are"
    if size is None or size <= 0:
        size = q_width // count if count else 0
    if not size or q_width % size or kv_width % size or out_width != q_width:
        return f"its projections ({q_width}, {kv_width}, {out_width}) are no whole number of heads of {size}"
    queries, keys = q_width // size, kv_width // size
    return _Heads(
        size,
        queries,
        keys,
        tuple(name for name in _HEAD_COUNTS if numbers.get(name) == queries),
        tuple(name for name in _KV_COUNTS if numbers.get(name) == keys),
    )


def _add_attention(plan: TensorPlan, proofs: Proofs, name: str, module: nn.Module, tp: int) -> None:
    layers = {child: one for child, one in module.named_children() if isinstance(one, nn.Linear)}
    for projections, outs in _ATTENTIONS:
        out = next((one for one in outs if one in layers), None)
        if out is None or not layers.keys() >= {*projections}:
            continue
        if not all(is_linear(layers[one]) for one in (*projections, out)):
            plan.whole[name] = "its layers do more than nn.Linear"
            return
        q, k, v = (layers[one].out_features for one in projections)
        heads = _heads_of(module, q, k, layers[out].in_features) if k == v else "its keys are not as wide as its values"
        if isinstance(heads, str):
            plan.whole[name] = heads
            return
        is_even = heads.queries % tp == heads.keys % tp == 0
        # Where ranks cannot share the heads, that is the error only if the attention could be split otherwise.
        counts = _counts_of_part(proofs, module, projections, out, heads, tp=tp if is_even else heads.keys)
        if isinstance(counts, str):
            plan.whole[name] = counts
            return
        if not is_even:
            _refuse_uneven_heads(name, module, heads, tp)
        plan.styles |= {_join(name, one): "column" for one in projections} | {_join(name, out): "row"}
        if counts:
            plan.heads[name] = counts
        return


def _counts_of_part(
    proofs: Proofs, module: nn.Module, projections: tuple[str, ...], out: str, heads: _Heads, *, tp: int
) -> dict[str, int] | str:
    """Return the attributes that must count the heads of one rank, or why an attention cannot be split."""
    if heads.queries % heads.keys:
        return f"its {heads.queries} heads do not share {heads.keys} heads of keys and values evenly"
    keys = min(heads.keys // tp, _TRIED_HEADS)
    queries = keys * (heads.queries // heads.keys)
    widths = (queries, keys, keys, queries)
    features = {one: heads.size * n for one, n in zip((*projections, out), widths, strict=True)}
    tried = dict.fromkeys(heads.query_counts, queries) | dict.fromkeys(heads.key_counts, keys)
    why: str | None = None
    # Code that views its projections by the size of a head needs no count.
    for counts in ({}, tried) if tried else ({},):
        why = proofs.why_not(module, Split(projections, out, tp, features, counts, queries, heads.size))
        if why is None:
            of_rank = dict.fromkeys(heads.query_counts, heads.queries // tp)
            of_rank |= dict.fromkeys(heads.key_counts, heads.keys // tp)
            return of_rank if counts else {}
    return str(why)


def _leave_siblings_whole(plan: TensorPlan, model: nn.Module) -> None:
    """Leave an attention whole where another of its class is: they may hand one another what is of heads."""
    classes = {type(model.get_submodule(name)): name for name in plan.whole}
    for name, module in model.named_modules():
        split = [_join(name, child) for child, _ in module.named_children() if _join(name, child) in plan.styles]
        other = classes.get(type(module))
        if other is not None and name not in plan.whole and _is_attention(module) and split:
            plan.whole[name] = f"{other} of the same class is whole"
            plan.heads.pop(name, None)
            for one in split:
                del plan.styles[one]


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return any(all(one in children for one in projections) for projections, _ in _ATTENTIONS)


def _refuse_uneven_heads(name: str, module: nn.Module, heads: _Heads, tp: int) -> None:
    for what, count in (("heads", heads.queries), ("heads of keys and values", heads.keys)):
        if count % tp:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) has {count} {what}, which cannot be divided evenly among {tp} "
                "ranks.",
                do=f"use {_divisors(heads.keys, tp)} ranks along tp, or pass a plan without it: "
                "plan={...}, with names as plan_of() prints them",
            )


def _add_vocabulary(plan: TensorPlan, model: nn.Module, tp: int) -> None:
    """Split embeddings that have a head of as many outputs, and the heads."""
    embeddings = {
        n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and not _is_inside(n, plan.whole)
    }
    for name, head in _heads(model):
        if name in plan.styles or head.out_features < tp:
            continue
        partners = [n for n, one in embeddings.items() if one.num_embeddings == head.out_features]
        if not partners:
            continue
        why = next((why for one in partners if (why := _why_no_vocabulary(model, one, embeddings[one]))), None)
        why = why or _why_not_tied(model, {name, *partners})
        if why is not None:
            plan.whole[partners[0]] = why
            continue
        plan.styles[name] = "head"
        plan.styles |= dict.fromkeys(partners, "vocab")


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in _HEADS:
            yield name, module


def _why_no_vocabulary(model: nn.Module, name: str, embedding: nn.Embedding) -> str | None:
    if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        return "an Embedding with max_norm, sparse or scale_grad_by_freq cannot be split"
    parent, _, last = name.rpartition(".")
    above = [parent.rsplit(".", cut)[0] if cut else parent for cut in range(parent.count(".") + 1)]
    for owner in {"", *above}:
        if f".{last}.weight" in _forward_source(model.get_submodule(owner)):
            return f"the code of {type(model.get_submodule(owner)).__name__} uses its weight itself"
    return None


def _forward_source(module: nn.Module) -> str:
    """Return the text of a module's ``forward``, or nothing where it cannot be read."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


def _why_not_tied(model: nn.Module, names: set[str]) -> str | None:
    """Return which parameter of these layers others share, that stay whole."""
    name_of = {module: name for name, module in model.named_modules()}
    for places in tied(model):
        sharing = [name_of[module] for module, _ in places]
        others = [one for one in sharing if one not in names]
        if others and len(others) < len(sharing):
            return f"{others[0] or 'the model itself'} shares a parameter with it"
    return None


def _is_inside(name: str, wholes: Mapping[str, str]) -> bool:
    return any(name.startswith(f"{whole}.") for whole in wholes)


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _divisors(size: int, tp: int) -> str:
    fitting = [str(n) for n in range(1, max(tp, 2) + 1) if size % n == 0]
    return " or ".join(fitting)
