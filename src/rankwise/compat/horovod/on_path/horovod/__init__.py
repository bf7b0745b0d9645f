# SPDX-License-Identifier: Apache-2.0
"""The package ``horovod`` of programs that have requested the alias."""

from __future__ import annotations

import sys

try:
    from rankwise.compat.horovod.alias import register
except ModuleNotFoundError as error:
    message = (
        f"rankwise stands in for Horovod here, and this Python lacks {error.name}: install it for {sys.executable}, "
        f"or start the command without rankwise for its own Horovod"
    )
    raise ImportError(message, name="horovod") from None

register(sys.modules[__name__])
