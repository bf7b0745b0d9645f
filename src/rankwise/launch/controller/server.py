# SPDX-License-Identifier: Apache-2.0
"""Serves a job: its store and its coordinator, on one port, to processes that hold its secret.

Writes into the store what the ranks of an attempt must know, and opens a store for torch's own client. Runs in the
launcher of one machine, in a separate thread. Decides nothing itself. Imported by the launcher's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from asyncio import StreamWriter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.health.event_log import (
    EXPENDABLE_KEY,
    MOST_REPORTED,
    WORLDS_KEY,
    Event,
    Failed,
    Left,
    post,
    post_departure,
    world_prefix,
)
from rankwise.launch.controller.coordinator import WATCHER, Coordinator, Disconnect
from rankwise.launch.controller.link import HEARTBEAT_SECONDS, LocalLink
from rankwise.launch.fork_server.torch_env import TORCH_PREFIX, torch_rank_key
from rankwise.launch.messages import (
    LARGEST_MESSAGE_BYTES,
    PURPOSE,
    Heartbeat,
    Hello,
    InspectAnswer,
    InspectRequest,
    Message,
    MessageError,
    Node,
    NodeLeaves,
    NodeStarting,
    RankDeparted,
    RankFailed,
    RanksEnded,
    RequestStop,
    StartAttempt,
    TorchStoreAddress,
    decode,
    encode,
    refusal,
)
from rankwise.store import keys, opening
from rankwise.store.bootstrap import ARRIVED_KEY, ENDED, conclude, rank_address_key
from rankwise.store.server import AuthenticatedServer
from rankwise.store.torch_protocol import serve_this_user
from rankwise.store.wire import frame, read_frame

if TYPE_CHECKING:
    from asyncio import StreamReader
    from collections.abc import Callable, Sequence

    from rankwise.launch.options import TorchStoreChoice
    from rankwise.store.client import Store
    from rankwise.store.keys import Keys
    from rankwise.store.server import SocketServer

TICK_SECONDS = 0.25
HEARTBEAT_TICKS = round(HEARTBEAT_SECONDS / TICK_SECONDS)
LAUNCHER_EXITED = "was lost: its launcher has exited"
FAREWELL_SECONDS = 2.0
GARBAGE_THRESHOLDS = (50_000, 20, 20)
"""Of Python's collector in the serving process: with its own, looking for cycles among thousands of connections, which
live as long as the job, takes a third of the time in which ten thousand ranks join."""
"""How long the machines may take to receive the last message."""


class JobServer:
    """The server of a job, from its first machine to its end."""

    def __init__(
        self, listener: socket.socket, secret: bytes, coordinator: Coordinator, torch_stores: TorchStores
    ) -> None:
        self._coordinator = coordinator
        self._torch_stores = torch_stores
        self._keys = keys.Keys()
        self._of_attempt: AttemptKeys | None = None
        self._agents: dict[str, StreamWriter | LocalLink] = {}
        self._left: asyncio.Event | None = None
        self._server = AuthenticatedServer(
            listener, secret, {PURPOSE: self._serve_agent}, {keys.PURPOSE: self._keys.serve}
        )
        self._server.start()
        self._ticking = asyncio.run_coroutine_threadsafe(self._tick(), self._server.loop)

    def close(self) -> None:
        """Stop serving, once the machines have received the last message."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._all_left(), self._server.loop).result(deadline - time.monotonic())
        self._ticking.cancel()
        self._server.close()
        self._torch_stores.close()

    def connect(self, hello: Hello) -> LocalLink:
        """Return the link of the agent in this process."""
        node_id = hello.node.node_id

        def run(action: Callable[..., None], *args: object) -> None:
            try:
                action(*args)
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent must not wait for an answer
                link.break_off(f"{type(error).__name__}: {error}")

        def leave() -> None:
            self._leave(node_id, link, LAUNCHER_EXITED)
            # Here, where messages are delivered: the descriptors may be reused right after.
            link.release()

        link = LocalLink(
            send=lambda message: self._submit(run, self._handle, node_id, message),
            leave=lambda: self._submit(leave),
        )
        self._submit(run, self._join, hello.node, link)
        return link

    def watch(self) -> LocalLink:
        """Return a link of this process, which is no machine of the job: receives what all machines are shown."""

        def leave() -> None:
            self._leave(WATCHER, link, LAUNCHER_EXITED)
            link.release()

        link = LocalLink(
            send=lambda message: self._submit(self._handle, WATCHER, message),
            leave=lambda: self._submit(leave),
        )
        self._submit(self._agents.__setitem__, WATCHER, link)
        return link

    def _submit(self, action: Callable[..., None], *args: object) -> None:
        """Have the serving thread run an action, in the order of these calls."""
        # Already closed: the job is over.
        with contextlib.suppress(RuntimeError):
            self._server.loop.call_soon_threadsafe(action, *args)

    # -- on the loop -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        heartbeat = frame(encode(Heartbeat()))
        for number in itertools.count():
            self._read_declarations()
            for node_id, agent in list(self._agents.items()):
                if isinstance(agent, LocalLink):
                    self._coordinator.heartbeat(node_id, time.monotonic())
                elif number % HEARTBEAT_TICKS == 0 and not agent.is_closing():
                    agent.write(heartbeat)
            self._coordinator.tick(time.monotonic())
            self._flush()
            await asyncio.sleep(TICK_SECONDS)

    async def _all_left(self) -> None:
        if self._agents:
            self._left = asyncio.Event()
            await self._left.wait()

    async def _serve_agent(self, reader: StreamReader, writer: StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        try:
            hello = decode(await read_frame(reader, LARGEST_MESSAGE_BYTES), f"the launcher at {host} port {port}")
        except MessageError as error:
            writer.write(frame(encode(refusal(error))))
            return
        if isinstance(hello, NodeStarting):
            self._coordinator.node_starting(hello.hostname, time.monotonic())
            self._flush()
        if not isinstance(hello, Hello):
            return
        node, why = hello.node, LAUNCHER_EXITED
        try:
            self._join(node, writer)
            while True:
                self._handle(node.node_id, decode(await read_frame(reader, LARGEST_MESSAGE_BYTES), node.hostname))
        except OSError:
            pass
        except MessageError as error:
            why = f"was lost: {error}"
        finally:
            self._leave(node.node_id, writer, why)

    def _join(self, node: Node, agent: StreamWriter | LocalLink) -> None:
        self._agents[node.node_id] = agent
        self._read_declarations()
        self._coordinator.node_joined(node, time.monotonic())
        self._flush()

    def _leave(self, node_id: str, agent: StreamWriter | LocalLink, why: str) -> None:
        # It may have rejoined over another connection meanwhile.
        if self._agents.get(node_id) is not agent:
            return
        del self._agents[node_id]
        self._read_declarations()
        self._coordinator.node_lost(node_id, time.monotonic(), why)
        self._flush()
        if self._left is not None and not self._agents:
            self._left.set()

    def _read_declarations(self) -> None:
        """Read what ranks have declared in the store, before the coordinator handles other events."""
        attempt = self._coordinator.attempt
        if attempt is not None:
            of_attempt = self._keys_of(attempt)
            of_attempt.follow()
            self._coordinator.set_optional_ranks(attempt, of_attempt.optional_ranks())

    def _keys_of(self, attempt: int) -> AttemptKeys:
        if self._of_attempt is None or self._of_attempt.attempt != attempt:
            self._of_attempt = AttemptKeys(self._keys, attempt, self._coordinator.world_size)
        return self._of_attempt

    def _handle(self, node_id: str, message: Message) -> None:
        self._read_declarations()
        coordinator, now = self._coordinator, time.monotonic()
        coordinator.heartbeat(node_id, now)
        match message:
            case RankFailed():
                coordinator.rank_failed(node_id, message.attempt, message.failure)
            case RankDeparted():
                coordinator.rank_departed(message.attempt, message.rank)
                if coordinator.attempt == message.attempt:
                    self._keys_of(message.attempt).note_ended(message.rank)
            case RanksEnded():
                coordinator.ranks_ended(node_id, message.attempt, message.report, now)
            case RequestStop():
                coordinator.request_stop(message.reason)
            case NodeLeaves():
                coordinator.node_leaves(node_id, message.signal, message.exit_code, now, ends_job=message.ends_job)
            case InspectRequest():
                for other in self._agents.keys() - {node_id}:
                    self._send(other, replace(message, asker=node_id))
            case InspectAnswer():
                self._send(message.asker, message)
            case _:
                pass
        self._flush()

    def _flush(self) -> None:
        messages, events = self._coordinator.take_output()
        for number, event in events:
            self._keys_of(number).post(event)
        encoded: dict[int, bytes] = {}  # A message to many machines is one object.
        for node_id, message in messages:
            if isinstance(message, Disconnect):
                agent = self._agents.get(node_id)
                if isinstance(agent, StreamWriter):
                    agent.transport.abort()
            elif isinstance(message, StartAttempt):
                self._keys.delete_prefix(f"attempt/{message.attempt - 1}/")
                torch_store = self._torch_stores.of_attempt(message.attempt, message.world_size)
                self._send(node_id, replace(message, torch_store=torch_store))
            else:
                self._send(node_id, message, encoded)

    def _send(self, node_id: str, message: Message, encoded: dict[int, bytes] | None = None) -> None:
        """Send a message without waiting for the machine to read: one that is cut off must not hold up the others.

        ``encoded`` keeps its bytes for other machines.
        """
        agent = self._agents.get(node_id)
        if isinstance(agent, LocalLink):
            agent.deliver(message)
        elif agent is not None and not agent.is_closing():
            data = None if encoded is None else encoded.get(id(message))
            if data is None:
                data = frame(encode(message))
            if encoded is not None:
                encoded[id(message)] = data
            agent.write(data)


# -- what ranks read in the store ---------------------------------------------------------------------------


class AttemptKeys:
    """The keys of one attempt among those of the job, in each world that its ranks have joined.

    Events in the ranks' event logs, and marks that end waiting for ranks that have exited before they joined. Ranks
    that leave a world and join another begin a new log.
    """

    def __init__(self, of_job: Keys, attempt: int, world_size: int) -> None:
        self.attempt = attempt
        self._world_size = world_size
        self._keys = of_job
        self._prefix = f"attempt/{attempt}/"
        self._next_events = [1]
        """For each world, a number below which its log is full."""
        self._posted: list[_Posted] = []
        self._num_failed = 0
        self._ended: list[int] = []

    def post(self, event: Event) -> None:
        """Notify the ranks of the attempt of an event, whichever world they are in."""
        self.follow()
        is_failure = isinstance(event, Failed)
        is_of_optional = is_failure and event.rank in self.optional_ranks()
        # The rank may have left before, or was killed while it recorded its departure.
        posted = _Posted(event, for_all=is_of_optional, again=is_failure and self._num_failed < MOST_REPORTED)
        self._num_failed += is_failure and not is_of_optional
        self._posted.append(posted)
        for number in range(len(self._next_events)):
            self._post(number, posted)

    def _post(self, number: int, posted: _Posted) -> None:
        keys, first, event = _WorldKeys(self._keys, self._prefix_of(number)), self._next_events[number], posted.event
        if isinstance(event, Left | Failed):
            self._next_events[number] = post_departure(
                keys, event, self._world_size, first, for_all=posted.for_all, again=posted.again or posted.for_all
            )
        else:
            self._next_events[number] = post(keys, event, first) + 1

    def note_ended(self, rank: int) -> None:
        """Record that a rank has exited without an error."""
        self.follow()
        self._ended.append(rank)
        if not self._keys.check([self._prefix + torch_rank_key(rank)]):
            why = f"rank {rank} exited without an error before it called init_process_group()"
            self._keys.give_up(self._prefix + TORCH_PREFIX, rank, why)
        for number in range(len(self._next_events)):
            self._mark(number, rank)

    def follow(self) -> None:
        """Repeat earlier events and marks for ranks that have joined another world, where they apply as well."""
        for number in range(len(self._next_events), self._num_rejoined() + 1):
            self._next_events.append(1)
            for posted in self._posted:
                self._post(number, posted)
            for rank in self._ended:
                self._mark(number, rank)

    def optional_ranks(self) -> list[int]:
        """Return the ranks without which their newest world continues, as its ranks have declared."""
        declared = self._keys.peek(self._prefix_of(self._num_rejoined()) + EXPENDABLE_KEY)
        return [] if declared is None else json.loads(declared)

    def _mark(self, number: int, rank: int) -> None:
        # A rank that has joined has an address there already, and keeps it.
        keys = _WorldKeys(self._keys, self._prefix_of(number))
        if keys.set_if_absent(rank_address_key(rank), ENDED) and keys.add(ARRIVED_KEY, 1) == self._world_size:
            conclude(keys, self._world_size)

    def _num_rejoined(self) -> int:
        return int(self._keys.peek(self._prefix + WORLDS_KEY) or 0)

    def _prefix_of(self, number: int) -> str:
        return f"{self._prefix}{world_prefix(number)}/" if number else self._prefix


@dataclass(frozen=True, slots=True)
class _Posted:
    """An event, and which ranks read it: see :func:`rankwise.health.event_log.post_departure`."""

    event: Event
    for_all: bool
    again: bool


class _WorldKeys:
    """The keys of one world, as functions that ranks call use them too."""

    def __init__(self, of_job: Keys, prefix: str) -> None:
        self._keys = of_job
        self._prefix = prefix

    def set_if_absent(self, key: str, value: str) -> bool:
        key, data = self._prefix + key, value.encode()
        return not self._keys.check([key]) and self._keys.compare_set(key, b"", data) == data

    def add(self, key: str, number: int) -> int:
        return self._keys.add(self._prefix + key, number)

    def set(self, key: str, value: str) -> None:
        self._keys.set(self._prefix + key, value.encode())

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return self._keys.values([self._prefix + key for key in keys])


# -- torch's own store --------------------------------------------------------------------------------------


class TorchStores:
    """A store for torch's own client at ``MASTER_ADDR`` and ``MASTER_PORT``, for scripts that connect to it themselves.

    One per attempt, so that keys of the previous attempt are not found. On one machine only this user's processes reach
    it. Torch's own server, which accepts everyone, is served only if it was asked for. rankwise itself uses neither.
    """

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
