# SPDX-License-Identifier: Apache-2.0
from torch import nn

from .layers import Scaled


def build(width):
    return nn.Sequential(nn.Linear(2, width), Scaled(width), nn.Linear(width, 1))
