# SPDX-License-Identifier: Apache-2.0
"""Every message between a job's controller and its agents, a launcher and its fork server, ``--hosts`` and its hosts.

The whole protocol: frozen values, and one place that converts them to JSON and back. Nothing else is
accepted; an error names the sender. Opens no connection. Imported by both ends of each.
"""

from __future__ import annotations

import json
import socket
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rankwise.errors import ConfigurationError, LaunchError, RankwiseError
from rankwise.launch.options import LaunchOptions  # noqa: TC001 - looked up when a message is decoded
from rankwise.launch.report.failure import FailedAttempt, Failure  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

PURPOSE = "agent"
"""The purpose of an agent's connection to the port that also serves the job's store."""
LARGEST_MESSAGE_BYTES = 1 << 24
LARGEST_PACKET_BYTES = 1 << 17
"""Of a message with descriptors, within one machine."""
LONGEST_QUOTE = 80
"""How much of a malformed message an error shows."""


class MessageError(LaunchError):
    """A message is not one of those in this file."""


# -- from an agent to the controller -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine's launcher, as it introduces itself."""

    node_id: str
    """Different for each launcher process."""
    hostname: str
    num_ranks: int
    node_rank: int | None = None
    """The number it was given, if any."""
    serves: bool = False
    """Whether it serves the others; it is then the first if no numbers were given."""
    job: dict[str, str] = field(default_factory=dict[str, str])
    """What must be the same on all machines: the script, the versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first message of an agent."""

    node: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStarting:
    """A launcher has started, and sends its hello over another connection once it has imported torch."""

    hostname: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The sender is alive; both ends send it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailed:
    """A rank has failed."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDeparted:
    """A rank has exited without an error while others run."""

    attempt: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnds:
    """How the ranks of one machine exited."""

    failures: tuple[Failure, ...] = ()
    ends: dict[int, str] = field(default_factory=dict[int, str])
    """Of each rank, in short."""
    stderr_tails: dict[int, tuple[str, ...]] = field(default_factory=dict[int, "tuple[str, ...]"])
    """The last lines of the ranks that failed."""
    log_paths: dict[int, str] = field(default_factory=dict[int, str])
    has_stopped: bool = False
    """Whether a rank saved and stopped because it was asked to."""
    is_alone: bool = False
    """Whether rank 0 took an optimizer step without having joined its peers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksEnded:
    """All ranks of a machine have exited, and everything they had started."""

    attempt: int
    report: RankEnds


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStop:
    """The ranks of the job must save at their next step and exit; the controller sends it for a rank without peers."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLeaves:
    """A signal ended this machine's launcher, which has terminated its ranks."""

    signal: str
    exit_code: int
    ends_job: bool


Question = Literal["stacks", "steps"]
"""Where ranks are, or how fast they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectRequest:
    """A user asked about the ranks on one machine: the others must inspect theirs."""

    question: Question
    number: int
    """The number of the request on its node; the answer repeats it."""
    attempt: int
    """A machine that is in another one does not answer."""
    asker: str = ""
    """Node that receives the answer; filled in by the controller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectAnswer:
    """What the ranks of one machine are doing."""

    question: Question
    number: int
    asker: str
    node_rank: int
    """Of the machine that answers."""
    answers: dict[int, dict[str, Any]]
    """By rank."""


# -- from the controller to an agent -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchStoreAddress:
    """Where torch's store of one attempt is."""

    address: tuple[str, int]
    is_served: bool
    """Whether it is already served; otherwise the port is reserved for a script that serves it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartAttempt:
    """Start the ranks of an attempt: which ones they are on this machine."""

    run_id: str
    attempt: int
    first_rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    ranks_per_node: str
    """In Slurm's form, such as ``8(x1250)``: every machine is told of all."""
    hostnames: tuple[str, ...] = ()
    """Of all machines; in a large job only the one that serves it is told."""
    torch_store: TorchStoreAddress | None = None
    """Torch's store, for scripts that use it; ``None`` if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAttempt:
    """End the ranks of an attempt; for ``settle_seconds`` they may still exit by themselves."""

    attempt: int
    settle_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRank:
    """End one rank, without which the others continue."""

    attempt: int
    rank: int
    settle_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksDeparted:
    """These ranks of the job have exited without an error."""

    attempt: int
    runs: tuple[tuple[int, int], ...]
    """The first and the last of each run of consecutive ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowText:
    """Show complete lines to the user."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFailure:
    """Show the user how an attempt failed."""

    failed: FailedAttempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """This machine cannot take part: a controller's answer to an agent, or a host's to ``--hosts``."""

    what: str
    where: str = ""
    evidence: str
    advice: str
    is_mistake: bool = True
    """Whether it is a ``ConfigurationError``, rather than a ``LaunchError``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Introduce yourself again a little later: a conflicting machine may be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndJob:
    """The job is over."""

    exit_code: int
    what: str = ""
    """The text for the user; empty if everything has been reported."""
    evidence: str = ""
    advice: str = ""


# -- between a launcher and its fork server ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """Fork a rank: everything that differs between ranks. Sent with its three standard streams."""

    rank: int
    attempt: int
    variables: dict[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalRank:
    """Send a signal to a rank's process."""

    rank: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearRanks:
    """Kill all ranks, with everything they have started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksCleared:
    """No rank is left, nor anything it has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStarted:
    """A rank's process has started."""

    rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNotStarted:
    """The machine does not allow another process."""

    rank: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExited:
    """A rank's process has exited."""

    rank: int
    attempt: int
    exit_code: int
    """Negative for a signal."""
    time: float
    """When, in seconds since the epoch."""


# -- between ``--hosts`` and one host ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HostHere:
    """A host's first message: it can run rankwise."""

    rankwise: str
    """Its version."""
    address: str
    """The address at which other machines reach it, as far as it knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCommand:
    """What every rank of every host runs, as typed: only the hosts resolve it."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """What a host must run."""

    folder: str
    """The working directory."""
    command: RemoteCommand
    options: LaunchOptions
    """The options of this host. Their rendezvous is the second host, in whose network the first listens; no port."""
    secret: str = field(repr=False)
    """The job's secret: generated for it, never in a file or in a process's arguments."""
    variables: dict[str, str]
    """Environment variables that are passed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """From a host: it is ready to start. To a host: all are ready, and it must start its launcher."""

    rendezvous: tuple[str, int] | None
    """Where the job is served; ``None`` from a host that does not serve it, and if there is only one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalHost:
    """Send a host's launcher a signal. It ends with an :class:`EndJob` or a :class:`Refuse`."""

    signal: str


FromAgent = Hello | NodeStarting | RankFailed | RankDeparted | RanksEnded | NodeLeaves
ToAgent = StartAttempt | StopAttempt | StopRank | RanksDeparted | ShowText | ReportFailure | Refuse | Wait | EndJob
BothWays = Heartbeat | RequestStop | InspectRequest | InspectAnswer
BetweenHosts = HostHere | HostSpec | Ready | SignalHost
ToForkServer = RankStart | SignalRank | ClearRanks
FromForkServer = RanksCleared | RankStarted | RankNotStarted | RankExited
Message = FromAgent | ToAgent | BothWays | BetweenHosts | ToForkServer | FromForkServer

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
"""The message classes by name."""


def refusal(error: RankwiseError) -> Refuse:
    """Return the message that a machine cannot take part because of ``error``."""
    return Refuse(
        what=error.what,
        where=error.where or "",
        evidence=error.evidence or "",
        advice=error.do or "",
        is_mistake=isinstance(error, ConfigurationError),
    )


def error_of(refused: Refuse) -> ConfigurationError | LaunchError:
    """Return the error that :func:`refusal` was given."""
    kind = ConfigurationError if refused.is_mistake else LaunchError
    return kind(refused.what, where=refused.where or None, evidence=refused.evidence or None, do=refused.advice or None)


def encode(message: Message) -> bytes:
    """Return a message as JSON, on one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes, sender: str) -> Message:
    """Return the message that :func:`encode` was given.

    Args:
        data: the received bytes.
        sender: the process that sent it, for the error.

    Raises:
        MessageError: it is not a message of this file.
    """
    try:
        told = json.loads(data)
        if not isinstance(told, dict) or told.get("kind") not in _KINDS:
            raise ValueError("unknown message")  # noqa: TRY301 - shown below
        return value_of(_KINDS[told.pop("kind")], told)
    except (ValueError, TypeError, RecursionError) as error:
        shown = data[:LONGEST_QUOTE].decode(errors="replace")
        raise MessageError(
            f"{sender} sent a message that this version of rankwise does not know.",
            evidence=f"{error}: {shown}{'...' if len(data) > LONGEST_QUOTE else ''}",
            do="install the same version of rankwise on every machine: python -m pip show rankwise",
        ) from None


def send_packet(to: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet, with descriptors that remain open here; several processes may do so over one socket."""
    socket.send_fds(to, [data], list(descriptors))


def receive_packet(source: socket.socket, most_descriptors: int = 0) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors; empty if all processes at the other end have exited."""
    try:
        data, descriptors, _, _ = socket.recv_fds(
            source, LARGEST_PACKET_BYTES, most_descriptors, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return b"", []
    return data, descriptors


@cache
def _kinds_of(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def value_of(kind: type[T], told: dict[str, Any]) -> T:
    """Return a value of a dataclass from what ``asdict`` and JSON made of one.

    A machine with a later version may send more fields, which are rejected.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    known: dict[str, Field[Any]] = {one.name: one for one in fields(kind)}
    missing = [
        one.name
        for one in known.values()
        if one.name not in told and one.default is MISSING and one.default_factory is MISSING
    ]
    unknown = [] if kind in {Node, HostHere} else sorted(told.keys() - known)
    if missing or unknown:
        words = ", ".join([*(f"no {name}" for name in missing), *(f"unknown {name}" for name in unknown)])
        raise ValueError(words)
    return kind(**{name: _value(_kinds_of(kind)[name], told[name], name) for name in known if name in told})


def _value(kind: Any, told: Any, name: str) -> Any:
    """Return a value of JSON as the type that a field has."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Literal and told in inner):
        return told
    if origin in {Union, UnionType}:
        wanted = [one for one in inner if one is not NoneType]
        return None if told is None and len(wanted) < len(inner) else _value(wanted[0], told, name)
    if origin is dict and isinstance(told, dict):
        return {(int(key) if inner[0] is int else key): _value(inner[1], value, name) for key, value in told.items()}
    if origin is tuple and isinstance(told, list):
        kinds = [inner[0]] * len(told) if inner[1:] == (Ellipsis,) else inner
        if len(kinds) == len(told):
            return tuple(_value(one, value, name) for one, value in zip(kinds, told, strict=True))
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(told, dict):
        return value_of(kind, told)
    if kind is float and isinstance(told, int | float) and not isinstance(told, bool):
        return float(told)
    if kind in {bool, int, str} and type(told) is kind:
        return told
    message = f"{name} is {str(told)[:LONGEST_QUOTE]!r}"
    raise ValueError(message)
