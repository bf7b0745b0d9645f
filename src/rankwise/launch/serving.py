# SPDX-License-Identifier: Apache-2.0
"""Serves a job: its store and its coordinator, on one port, to those who know its secret.

Lives in the launcher of one machine, in a thread of its own. Decides nothing itself. Imported by the launcher's
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankwise.launch.event_logs import EventLogs
from rankwise.launch.failure import Failure
from rankwise.launch.link import LARGEST_MESSAGE_BYTES, PURPOSE
from rankwise.launch.nodes import introduced
from rankwise.store import keys
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import NUMBER, read_frame

if TYPE_CHECKING:
    import socket
    from asyncio import StreamReader, StreamWriter

    from rankwise.launch.coordinator import Coordinator
    from rankwise.launch.torch_store import TorchStores

TICK_SECONDS = 0.25
FAREWELL_SECONDS = 2.0
"""How long the machines have to hear the last word."""


class JobServer:
    """The serving end of a job, from its first machine's coming to its end."""

    def __init__(
        self, listener: socket.socket, secret: bytes, coordinator: Coordinator, torch_stores: TorchStores
    ) -> None:
        self._coordinator = coordinator
        self._torch_stores = torch_stores
        self._keys = keys.Keys()
        self._logs: EventLogs | None = None
        self._writers: dict[str, StreamWriter] = {}
        self._gone: asyncio.Event | None = None
        self._server = AuthenticatedServer(
            listener, secret, {keys.PURPOSE: self._keys.handle, PURPOSE: self._serve_agent}
        )
        self._server.start()
        self._ticking = asyncio.run_coroutine_threadsafe(self._tick(), self._server.loop)

    def close(self) -> None:
        """Stop serving, once the machines have heard the last word."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._all_gone(), self._server.loop).result(deadline - time.monotonic())
        self._ticking.cancel()
        self._server.close()
        self._torch_stores.close()

    # -- on the loop -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._tell_who_may_go()
            self._coordinator.tick(time.monotonic())
            for node_id in list(self._writers):
                self._send(node_id, {"do": "alive"})
            self._flush()
            await asyncio.sleep(TICK_SECONDS)

    async def _all_gone(self) -> None:
        if self._writers:
            self._gone = asyncio.Event()
            await self._gone.wait()

    async def _serve_agent(self, reader: StreamReader, writer: StreamWriter) -> None:
        hello = json.loads(await read_frame(reader, LARGEST_MESSAGE_BYTES))
        node = introduced(hello["node"])
        self._writers[node.node_id] = writer
        self._tell_who_may_go()
        try:
            self._coordinator.come(node, time.monotonic())
            self._flush()
            while True:
                message = json.loads(await read_frame(reader, LARGEST_MESSAGE_BYTES))
                self._obey(node.node_id, message)
                self._flush()
        except OSError:
            pass
        finally:
            # It may have come anew over another connection meanwhile.
            if self._writers.get(node.node_id) is writer:
                del self._writers[node.node_id]
                self._tell_who_may_go()
                self._coordinator.go(node.node_id, time.monotonic(), "is gone: its launcher has ended")
                self._flush()
                if self._gone is not None and not self._writers:
                    self._gone.set()

    def _tell_who_may_go(self) -> None:
        """Have the coordinator know what ranks have declared in the store, before it hears of anything else."""
        attempt = self._coordinator.attempt
        if attempt is not None:
            logs = self._logs_of(attempt)
            logs.follow()
            self._coordinator.may_lose(attempt, logs.expendable())

    def _logs_of(self, attempt: int) -> EventLogs:
        if self._logs is None or self._logs.attempt != attempt:
            self._logs = EventLogs(self._keys, attempt)
        return self._logs

    def _obey(self, node_id: str, message: dict[str, Any]) -> None:
        self._tell_who_may_go()
        coordinator, now = self._coordinator, time.monotonic()
        coordinator.hear(node_id, now)
        do = message["do"]
        if do == "fail":
            coordinator.fail(node_id, message["attempt"], Failure(**message["failure"]))
        elif do == "left":
            coordinator.depart(message["attempt"], message["rank"])
        elif do == "end":
            coordinator.end(node_id, message["attempt"], message["report"], now)
        elif do == "ask_to_stop":
            coordinator.ask_to_stop(message["reason"])
        elif do == "ask":
            for other in self._writers.keys() - {node_id}:
                self._send(other, {**message["message"], "asker": node_id})
        elif do == "answer":
            self._send(message["to"], message["message"])
        elif do == "leave":
            coordinator.leave(node_id, message["signal"], message["exit_code"], now, ends_job=message["ends_job"])

    def _flush(self) -> None:
        messages, events = self._coordinator.take()
        for number, event in events:
            self._logs_of(number).post(event)
        for node_id, message in messages:
            if message["do"] == "drop":
                writer = self._writers.get(node_id)
                if writer is not None:
                    writer.transport.abort()
                continue
            if message["do"] == "start":
                self._keys.delete_prefix(f"attempt/{message['attempt'] - 1}/")
                master = self._torch_stores.of_attempt(message["attempt"], message["world_size"])
                message["master"] = None if master is None else asdict(master)
            self._send(node_id, message)

    def _send(self, node_id: str, message: dict[str, Any]) -> None:
        writer = self._writers.get(node_id)
        if writer is not None and not writer.is_closing():
            data = json.dumps(message).encode()
            # Not waiting for the machine to read: one that is cut off must not hold up the others.
            writer.write(NUMBER.pack(len(data)) + data)
