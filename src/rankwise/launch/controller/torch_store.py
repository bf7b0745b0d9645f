# SPDX-License-Identifier: Apache-2.0
"""A store for torch's own client at ``MASTER_ADDR`` and ``MASTER_PORT``, for scripts that connect to it themselves.

On one machine only this user's processes reach it. Torch's own server, which accepts everyone, is served only if it
was asked for. rankwise itself uses neither: ranks and launchers use the job's own store. Lives in the launcher that
serves the job. Imported by ``server`` and the launcher's start.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rankwise.launch.messages import TorchStoreAddress
from rankwise.store import opening
from rankwise.store.torch_protocol import serve_this_user

if TYPE_CHECKING:
    from rankwise.launch.options import TorchStoreChoice
    from rankwise.store.client import Store
    from rankwise.store.server import SocketServer


class TorchStores:
    """One store per attempt, so that keys of the previous attempt are not found."""

    def __init__(self, listens_on: str, host: str, choice: TorchStoreChoice, *, on_one_machine: bool) -> None:
        """Open nothing yet.

        ``listens_on`` is the address to open, ``host`` the one that ranks are given; they differ on some networks.
        """
        self._listens_on, self._host = listens_on, host
        self._is_on = choice == "on" or (choice == "auto" and on_one_machine)
        self._is_open = choice == "on"
        self._attempt: int | None = None
        self._served: TorchStoreAddress | None = None
        self._opened: Store | SocketServer | socket.socket | None = None

    def of_attempt(self, attempt: int, world_size: int) -> TorchStoreAddress | None:
        """Return the store of an attempt, opened on first use; ``None`` if none is served.

        A world of one rank gets a free port and no store: processes that this rank starts create their own world,
        at that port or at another one, and their first rank could not serve it if torch were told that a
        launcher does.
        """
        if not self._is_on or attempt == self._attempt:
            return self._served
        self.close()
        self._attempt = attempt
        is_served = world_size > 1 or self._is_open
        if self._is_open:
            self._opened, port = opening.serve(self._listens_on)
        elif is_served:
            self._opened = serve_this_user(self._listens_on)
            port = self._opened.port
        else:
            self._opened = _reserve(self._listens_on)
            port = self._opened.getsockname()[1]
        self._served = TorchStoreAddress(address=(self._host, port), is_served=is_served)
        return self._served

    def close(self) -> None:
        """Close what is open; torch's store is closed with its last reference."""
        opened, self._opened, self._served = self._opened, None, None
        if opened is not None:
            opened.close()


def _reserve(address: str) -> socket.socket:
    """Return a socket that reserves a free port without listening: no other program is assigned it meanwhile.

    Source: on Linux a second socket may bind and listen there if both have SO_REUSEADDR, as torch's store has.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder
