# SPDX-License-Identifier: Apache-2.0
"""Where Python's ``multiprocessing`` keeps its sockets in a rank and in what it starts: in the job's temporary folder.

Workers of loaders pass memory through such sockets. Python removes their folder when its process ends in the ordinary
way; a rank that is killed would leave it. ``tempfile`` and ``TMPDIR``, which a script uses for its own files, stay as
they are. Imported by ``worker``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os

LONGEST_ADDRESS_BYTES = 107
"""Of a socket's address. Source: unix(7)."""
_LONGEST_NAME = "/listener-12345678"
"""As ``multiprocessing.connection`` names a socket."""


def keep_sockets_in(folder: str) -> None:
    """Have this process, and those that ``multiprocessing`` starts from it, keep sockets in ``folder``.

    Nothing changes where the folder's path is too long for the address of a socket.
    Source: Python 3.11 to 3.14's ``multiprocessing.util.get_temp_dir``.
    """
    if len(os.fsencode(folder)) + len(_LONGEST_NAME) <= LONGEST_ADDRESS_BYTES:
        # Inherited by every process, forked or spawned. There is no public way, and a rank can do without.
        with contextlib.suppress(AttributeError):
            multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001
