# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.transform.vision`` is torchvision.transforms here; importing it raises an error that says so."""

from rankwise.compat.megengine.alias import refused
from rankwise.compat.megengine.data.transform import IMAGE_TRANSFORMS

raise refused("megengine.data.transform", "vision", (), IMAGE_TRANSFORMS)
