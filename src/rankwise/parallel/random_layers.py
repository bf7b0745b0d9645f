# SPDX-License-Identifier: Apache-2.0
"""Layers that draw random numbers where nobody sees it: each rank draws its own. Used by randomness."""

from __future__ import annotations

from torch import nn

from rankwise.log import warn
from rankwise.torch_private.compiler import OWN_RANDOMNESS_OFF

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def warn_of_dropout(model: nn.Module) -> None:
    """Say that the result depends on the number of ranks where a layer of ``model`` in training drops something."""
    names = [name or type(module).__name__ for name, module in model.named_modules() if _drops(module)]
    if names:
        draws = "draws its own mask" if len(names) == 1 else f"and {len(names) - 1} more layers draw their own masks"
        warn(
            f"{names[0]} {draws} on each rank (dropout) in compiled code or fused kernels, so that a run on "
            "another number of ranks differs from this one as a run with another seed does; compiled code draws as one "
            f"rank does with {OWN_RANDOMNESS_OFF} = True"
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
