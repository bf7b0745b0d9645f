# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.transform.vision`` is torchvision.transforms here, and importing it says so."""

from rankwise.compat.megengine.not_offered import refused

_INSTEAD = "torchvision.transforms.v2, in the apply() of a subclass of megengine.data.transform.Transform"
raise refused("megengine.data.transform", "vision", {"vision": _INSTEAD}, ())
