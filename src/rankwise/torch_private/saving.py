# SPDX-License-Identifier: Apache-2.0
"""Which files torch.save opens: through its own C++ writer, which Python does not see."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def on_save(notify: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``notify`` with the path of each file that torch.save opens by name; return a function that stops this."""
    writer = torch.serialization._open_zipfile_writer_file  # noqa: SLF001
    opens = writer.__init__

    @wraps(opens)
    def noted(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        notify(name)
        opens(self, name, *args, **kwargs)

    def stop() -> None:
        writer.__init__ = opens

    writer.__init__ = noted
    return stop
