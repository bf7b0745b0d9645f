# SPDX-License-Identifier: Apache-2.0
"""``import rankwise.compat.horovod.as_horovod``: from this line on ``import horovod`` gives rankwise's.

The one line for a script that otherwise stays as it is, under any launcher. Importing anything else changes nothing.
"""

from __future__ import annotations

from rankwise.compat.horovod.alias import provide

provide()
