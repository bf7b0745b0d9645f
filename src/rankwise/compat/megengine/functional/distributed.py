# SPDX-License-Identifier: Apache-2.0
"""``megengine.functional.distributed``: the collectives of ``megengine.distributed.functional``."""

from rankwise.compat.megengine.distributed.functional import *  # noqa: F403 - the same under both names
