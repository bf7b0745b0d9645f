# SPDX-License-Identifier: Apache-2.0
"""The models that training steps are measured on, each with the shape of one rank's batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


def many_small() -> tuple[nn.Module, tuple[int, ...]]:
    """Return 60 linear layers of 64 by 64: 1 MB of gradients in 120 tensors."""
    layers = [nn.Linear(64, 64) for _ in range(60)]
    for layer in layers:
        # torch's own start lets the gradients of so many layers fade to numbers that processors are slow with.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())]), (32, 64)


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    """Return 6 linear layers of 1024 by 1024: 25 MB of gradients."""
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())]), (64, 1024)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    """Return 4 encoder layers of width 256: 13 MB of gradients; a batch is [batch, seq, hidden]."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 4), (8, 64, 256)


def unet() -> tuple[nn.Module, tuple[int, ...]]:
    """Return the net of examples/unet3d.py: 19 MB of gradients, a batch of two crops."""
    from monai.networks.nets import UNet  # noqa: PLC0415 - takes seconds to import, for this model only

    net = UNet(3, in_channels=1, out_channels=1, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2)
    return net, (2, 1, 32, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "60 small layers": many_small,
    "wide MLP": wide,
    "transformer": transformer,
}
ALL_MODELS = {**MODELS, "MONAI 3D UNet": unet}
