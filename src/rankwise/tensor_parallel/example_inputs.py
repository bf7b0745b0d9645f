# SPDX-License-Identifier: Apache-2.0
"""Small inputs that a module's ``forward`` may take, guessed from the names of its parameters and from its layers.

A wrong guess costs nothing: the module raises, and the next one is tried. Used by trial.
"""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH, LENGTH = 2, 5
IMAGE_SIZES = (8, 16, 28, 32, 64, 224)
_ROTATIONS = {"position_embeddings", "rotary", "rope", "rotary_emb", "pos_emb"}
_COSINES = {"cos", "sin", "rope_cos", "rope_sin"}
_COMPLEX = {"freqs_cis", "freqs"}
_NUMBERS = {"position_ids", "positions", "cache_position", "input_pos"}
_OFFSETS = {"start_pos", "offset", "layer_idx"}
_LEFT_OUT = ("past", "cache", "output_", "return_", "need_", "use_", "is_", "training")


def example_inputs(
    module: nn.Module, widths: Sequence[int], head_sizes: Sequence[int]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield positional and keyword arguments for calls of ``module``, likely ones first; all on the CPU, in float64.

    Tensors that an earlier layer may have computed require gradients. The first argument is [batch, length, width] of
    one of ``widths``; further tensors, as attention's keys and values, have any of them too, and rotations of positions
    one of ``head_sizes``.
    """
    generator = torch.Generator("cpu").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.requires_grad_()

    below = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cpu").tril()
    parameters = inspect.signature(module.forward).parameters.values()
    others = [one for one in parameters if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}][1:]
    required = [one for one in others if one.default is one.empty]
    also = [one for one in others if one.default is one.empty or _is_position(one.name)]
    for filled in (required, also) if len(also) > len(required) else (required,):
        has_mask = any("mask" in one.name or "bias" in one.name for one in filled)
        sizes = head_sizes or (2,) if any(_is_position(one.name) for one in filled) else (2,)
        tried = itertools.product(
            [(x, width) for width in widths for x in _first_arguments(module, width, normal)],
            (None, below, ~below) if has_mask else (None,),
            [angle for size in sizes for angle in _angles(normal(LENGTH, size).detach())],
            widths if filled else widths[:1],
        )
        # What has one width is more likely than what has several.
        for (x, _), mask, angle, other in sorted(tried, key=lambda one: one[0][1] != one[3]) if filled else tried:
            given = {one.name: _argument(one.name, normal(BATCH, LENGTH, other), mask, angle) for one in filled}
            by_place = [given.pop(one.name) for one in required if one.kind is one.POSITIONAL_ONLY]
            yield [x, *by_place], given


def _angles(angles: torch.Tensor) -> list[torch.Tensor]:
    half = angles[:, : max(angles.shape[1] // 2, 1)]
    return [angles[None], angles, half[None], half]


def _first_arguments(module: nn.Module, width: int, normal: Any) -> list[torch.Tensor]:
    usual = [normal(BATCH, LENGTH, width), normal(BATCH, width)]
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            top = min(layer.num_embeddings, BATCH * LENGTH)
            return [(torch.arange(BATCH * LENGTH, device="cpu") % top).view(BATCH, LENGTH), *usual]
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            dims = layer.weight.ndim - 2
            sizes = IMAGE_SIZES if dims < 3 else IMAGE_SIZES[:2]  # noqa: PLR2004 - a volume is large soon
            return [*(normal(BATCH, layer.in_channels, *[size] * dims) for size in sizes), *usual]
        if isinstance(layer, nn.Linear):
            if layer.in_features == width:
                return usual
            return [normal(BATCH, LENGTH, layer.in_features), normal(BATCH, layer.in_features), *usual]
    return usual


def _is_position(name: str) -> bool:
    return name in _ROTATIONS | _COSINES | _COMPLEX | _NUMBERS


def _argument(name: str, other: torch.Tensor, mask: torch.Tensor | None, angle: torch.Tensor) -> object:
    if "mask" in name or "bias" in name:
        return mask
    if name in _ROTATIONS:
        return angle.cos(), angle.sin()
    if name in _COSINES:
        return angle.cos() if "cos" in name else angle.sin()
    if name in _COMPLEX:
        turns = angle.reshape(-1, angle.shape[-1])
        return torch.polar(torch.ones_like(turns), turns)
    if name in _NUMBERS:
        return torch.arange(LENGTH, device="cpu")[None]
    if name in _OFFSETS:
        return 0
    return None if name.startswith(_LEFT_OUT) else other
