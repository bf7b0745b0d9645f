# SPDX-License-Identifier: Apache-2.0
"""The port that a job is served on: chosen by the system, or given in the rendezvous.

A port is bound at once and kept, never picked first and bound later. Imported by ``rendezvous``.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.store import wire

if TYPE_CHECKING:
    import socket

ANY = 0
"""Makes the system choose a free port."""


def listen(address: str, port: int, node_rank: int | None) -> socket.socket | None:
    """Listen on a port of this machine; return ``None`` if another launcher here already does so for the job.

    Args:
        address: of this machine.
        port: as given in the rendezvous, or ``ANY``.
        node_rank: number that this machine was given.

    Raises:
        ConfigurationError: the port cannot be used, or is in use although this is node 0.
    """
    try:
        return wire.listen(address, port)
    except ConfigurationError as error:
        if port == ANY:
            raise error.supplement(do="pass another network: --interface NAME") from error.__cause__
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
        # A second launcher on the machine of the first: the one that listens serves the job.
        if node_rank is None:
            return None
        raise ConfigurationError(
            f"Port {port} of {address} is in use, but node 0 must serve the job there.",
            do="pass another --rendezvous port on every machine or, if another launcher is node 0, another "
            f"--node-rank. To see what listens there: ss -ltnp 'sport = :{port}'",
        ) from error
