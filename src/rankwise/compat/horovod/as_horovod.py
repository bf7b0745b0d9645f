# SPDX-License-Identifier: Apache-2.0
"""``import rankwise.compat.horovod.as_horovod``: from this line on ``import horovod`` gives rankwise's.

The only line that a script needs, under any launcher. Importing any other module changes nothing.
"""

from __future__ import annotations

from rankwise.compat.horovod.alias import provide

provide()
