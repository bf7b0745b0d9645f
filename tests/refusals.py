# SPDX-License-Identifier: Apache-2.0
"""What strategies say on a torch that lacks calls they need: a test that fails so there has nothing to prove."""

from __future__ import annotations

import re

from rankwise.world import torch_versions

ADDED_IN_2_13 = r"which torch \S+ does not have; it was added in torch 2\.13\."
REFUSED = {
    r"rankwise\.(pipeline|tensor_parallel)\(\) needs torch 2\.11 or newer, but torch \S+ is installed\.": (2, 11),
    rf"rankwise\.shard\(\) needs \S+, {ADDED_IN_2_13}": (2, 13),
    rf"The schedule \w+_zero_bubble needs .+, {ADDED_IN_2_13}": (2, 13),
}
"""Each refusal, and the first torch on which it is a mistake."""


def is_refusal(text: str) -> bool:
    """Return whether a refusal is in what a test failed with, and the torch that is installed is as old as it says."""
    return any(not torch_versions.is_at_least(first) and re.search(words, text) for words, first in REFUSED.items())
