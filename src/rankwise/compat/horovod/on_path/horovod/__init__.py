# SPDX-License-Identifier: Apache-2.0
"""``horovod``, where a program has asked for rankwise to stand in for it."""

from __future__ import annotations

import sys

from rankwise.compat.horovod.alias import register

register(sys.modules[__name__])
