# SPDX-License-Identifier: Apache-2.0
"""A stranger at the door of a store, and the secret that it does not hold."""

from __future__ import annotations

import socket

from rankwise.store.wire import HANDSHAKE_FRAME_BYTES, parse_hello, receive_frame

SECRET = b"correct horse battery staple"
LOOPBACK = "127.0.0.1"


def greet(port: int) -> tuple[socket.socket, bytes]:
    """Connect as a stranger, and return the server's nonce."""
    stranger = socket.create_connection((LOOPBACK, port), 10)
    return stranger, parse_hello(receive_frame(stranger, HANDSHAKE_FRAME_BYTES))[0]
