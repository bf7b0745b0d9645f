# SPDX-License-Identifier: Apache-2.0
"""Embeddings and output layers of one vocabulary, split by its words. Used by found_plan."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

from rankwise.parallel.tensor_parallel.plan import is_inside, tied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.parallel.tensor_parallel.plan import TensorPlan

_OUTPUT_NAMES = {"lm_head", "head", "output", "embed_out", "unembed", "decoder", "out", "to_logits"}


def add_vocabulary(plan: TensorPlan, model: nn.Module, tp: int) -> None:
    """Split embeddings and the output layers that have as many outputs."""
    embeddings = {
        n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and not is_inside(n, plan.whole)
    }
    for name, head in _output_layers(model):
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
        plan.styles.update(dict.fromkeys(partners, "vocab"))


def _output_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in _OUTPUT_NAMES:
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
    """Return the source of a module's ``forward``, or an empty string if it cannot be read."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


def _why_not_tied(model: nn.Module, names: set[str]) -> str | None:
    """Return which module that stays whole shares a parameter with these layers."""
    name_of = {module: name for name, module in model.named_modules()}
    for places in tied(model):
        sharing = [name_of[module] for module, _ in places]
        others = [one for one in sharing if one not in names]
        if others and len(others) < len(sharing):
            return f"{others[0] or 'the model itself'} shares a parameter with it"
    return None
