# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.dataset.vision`` is torchvision.datasets here; importing it raises an error that says so."""

from rankwise.compat.megengine.alias import refused

_INSTEAD = "torchvision.datasets, or megengine.data.dataset.ArrayDataset of the arrays"
raise refused("megengine.data.dataset", "vision", (), _INSTEAD)
