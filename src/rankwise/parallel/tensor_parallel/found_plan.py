# SPDX-License-Identifier: Apache-2.0
"""The plan that is found for a model: names and shapes suggest pairs of layers, and proof accepts or refuses them.

Used by tensor_parallel.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rankwise.errors import ConfigurationError
from rankwise.parallel.core.blocks import has_forward
from rankwise.parallel.tensor_parallel.plan import TensorPlan, divisors, is_inside, join
from rankwise.parallel.tensor_parallel.proof import Proofs
from rankwise.parallel.tensor_parallel.trial import Split
from rankwise.parallel.tensor_parallel.vocabulary import add_vocabulary

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
"""The trial has at most so many features between two layers on one rank."""
_TRIED_HEADS = 2
"""And so many heads of keys and values."""


def find_plan(model: nn.Module, tp: int) -> TensorPlan:
    """Return the plan for ``tp`` ranks found by looking at the model, which may be on the meta device.

    Raises:
        ConfigurationError: attention heads cannot be shared by so many ranks, or there is nothing to split.
    """
    plan = TensorPlan()
    proofs = Proofs()
    for name, module in model.named_modules():
        if is_inside(name, plan.whole):
            continue
        if isinstance(module, nn.MultiheadAttention):
            plan.whole[name] = "nn.MultiheadAttention packs its three projections into one"
        elif isinstance(module, nn.Sequential):
            _add_sequential(plan, proofs, name, module, tp)
        else:
            _add_attention(plan, proofs, name, module, tp)
            _add_mlp(plan, proofs, model, name, tp)
    _leave_siblings_whole(plan, model)
    add_vocabulary(plan, model, tp)
    if not any(isinstance(style, ParallelStyle) or style != "replicate" for style in plan.styles.values()):
        raise ConfigurationError(
            f"tensor_parallel() recognises no layer of {type(model).__name__} that it can split.",
            evidence="\n".join(f"{name}: {why}" for name, why in plan.whole.items()) or None,
            do='name them: plan={"layers.*.up": "column", "layers.*.down": "row"}',
        )
    return plan


def _add_mlp(plan: TensorPlan, proofs: Proofs, model: nn.Module, name: str, tp: int) -> None:
    module = model.get_submodule(name)
    layers = {child: one for child, one in module.named_children() if isinstance(one, nn.Linear)}
    for firsts, last in _MLPS:
        if not layers.keys() >= {*firsts, last} or join(name, last) in plan.styles:
            continue
        width = layers[last].in_features
        if any(layers[one].out_features != width for one in firsts):
            continue
        if width % tp:
            plan.whole.setdefault(join(name, last), f"{width} inputs cannot be shared by {tp} ranks evenly")
            return
        why = _why_no_pair(proofs, model, name, firsts, last, tp=tp)
        if why is None:
            plan.styles.update({join(name, one): "column" for one in firsts} | {join(name, last): "row"})
        else:
            plan.whole.setdefault(name, why)
        return


def _why_no_pair(
    proofs: Proofs, model: nn.Module, name: str, firsts: tuple[str, ...], last: str, *, tp: int
) -> str | None:
    # The layers of a ModuleDict are called by the module that contains it.
    above = name
    while above and not has_forward(model.get_submodule(above)):
        above = above.rpartition(".")[0]
    owner = model.get_submodule(above)
    if not has_forward(owner):
        return "no code of its own calls its layers"
    within = name[len(above) :].strip(".")
    return _why_not_split(proofs, owner, [join(within, one) for one in firsts], join(within, last), tp)


def _why_not_split(proofs: Proofs, owner: nn.Module, columns: list[str], row: str, tp: int) -> str | None:
    layers = [owner.get_submodule(one) for one in (*columns, row)]
    if not all(is_linear(one) for one in layers):
        return "its layers do more than nn.Linear"
    width = int(layers[-1].in_features)  # type: ignore[arg-type]
    features = dict.fromkeys((*columns, row), min(width // tp, _TRIED_FEATURES))
    return proofs.why_not(owner, Split(tuple(columns), row, tp, features))


def is_linear(module: object) -> bool:
    """Return whether a module computes as ``nn.Linear`` does, and has no other parameters (as an adapter has)."""
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
                plan.styles.update({join(name, column): "column", join(name, child): "row"})
                first = None
                continue
            plan.whole[join(name, column)] = why
        first = place


@dataclass(frozen=True)
class _AttentionHeads:
    """The number of heads of an attention, and the attributes that count them."""

    size: int
    queries: int
    keys: int
    query_counts: tuple[str, ...]
    key_counts: tuple[str, ...]


def _heads_of(module: nn.Module, q_width: int, kv_width: int, out_width: int) -> _AttentionHeads | str:
    """Return the heads by a module's attributes and the widths of its projections, or why they are unknown."""
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
    return _AttentionHeads(
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
        # Heads that ranks cannot share evenly are an error only if the attention can be split at all.
        counts = _counts_of_part(proofs, module, projections, out, heads, tp=tp if is_even else heads.keys)
        if isinstance(counts, str):
            plan.whole[name] = counts
            return
        if not is_even:
            _refuse_uneven_heads(name, module, heads, tp)
        plan.styles.update({join(name, one): "column" for one in projections} | {join(name, out): "row"})
        if counts:
            plan.heads[name] = counts
        return


def _counts_of_part(
    proofs: Proofs, module: nn.Module, projections: tuple[str, ...], out: str, heads: _AttentionHeads, *, tp: int
) -> dict[str, int] | str:
    """Return the attributes that must be set to the heads of one rank, or why an attention cannot be split."""
    if heads.queries % heads.keys:
        return f"its {heads.queries} heads do not share {heads.keys} heads of keys and values evenly"
    keys = min(heads.keys // tp, _TRIED_HEADS)
    queries = keys * (heads.queries // heads.keys)
    widths = (queries, keys, keys, queries)
    features = {one: heads.size * n for one, n in zip((*projections, out), widths, strict=True)}
    tried = dict.fromkeys(heads.query_counts, queries) | dict.fromkeys(heads.key_counts, keys)
    why: str | None = None
    # Code that reshapes its projections by the size of a head needs no count.
    for counts in ({}, tried) if tried else ({},):
        why = proofs.why_not(module, Split(projections, out, tp, features, counts, queries, heads.size))
        if why is None:
            of_rank = dict.fromkeys(heads.query_counts, heads.queries // tp)
            of_rank |= dict.fromkeys(heads.key_counts, heads.keys // tp)
            return of_rank if counts else {}
    return str(why)


def _leave_siblings_whole(plan: TensorPlan, model: nn.Module) -> None:
    """Leave an attention whole if another of its class is whole: they may pass each other tensors with heads."""
    classes = {type(model.get_submodule(name)): name for name in plan.whole}
    for name, module in model.named_modules():
        split = [join(name, child) for child, _ in module.named_children() if join(name, child) in plan.styles]
        other = classes.get(type(module))
        if other is not None and name not in plan.whole and _is_attention(module) and split:
            plan.whole[name] = f"{other} of the same class is whole"
            plan.heads.pop(name, None)
            for one in split:
                del plan.styles[one]


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return any(all(one in children for one in projections) for projections, _ in _ATTENTIONS)


def _refuse_uneven_heads(name: str, module: nn.Module, heads: _AttentionHeads, tp: int) -> None:
    for what, count in (("heads", heads.queries), ("heads of keys and values", heads.keys)):
        if count % tp:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) has {count} {what}, which cannot be divided evenly among {tp} "
                "ranks.",
                do=f"use {divisors(heads.keys, tp)} ranks along tp, or pass a plan without it: "
                "plan={...}, with names as plan_of() prints them",
            )
