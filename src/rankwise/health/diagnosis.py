# SPDX-License-Identifier: Apache-2.0
"""The errors for a wait that cannot end: which rank caused it, and what every rank was doing.

Values in, errors and text out.
"""

from __future__ import annotations

import signal
import traceback
from typing import TYPE_CHECKING, Any

from rankwise.errors import (
    CollectiveMismatch,
    NotJoined,
    PeerFailed,
    PeerMissing,
    RankwiseError,
    fold_ranks,
    rank_prefix,
)
from rankwise.health.collective_mismatch import CollectiveCall, advice, calls_differ
from rankwise.health.event_log import ConnectionBroke, Event, Failed, Left, Loss, ProcessEnded, TimedOut

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwise.world.facts import World

Answers = dict[int, dict[str, Any]]
"""What each rank that answered a status poll is doing; ``silent`` if it was only probed from outside."""

LONGEST_TABLE = 40
MOST_STACKS = 8
MOST_HOSTS = 3
LONGEST_LINE = 160
LONGEST_WORDS = 2000


def of_event(world: World, event: Loss) -> RankwiseError:
    """Return the error that an event of the log means for a rank that reads it."""
    match event:
        case Failed():
            return peer_failed(
                world, event.rank, error_type=event.error_type, text=event.text, hostname=event.hostname or None
            )
        case TimedOut():
            return timed_out(world, event)
        case ConnectionBroke():
            return connection_broke(world, event)
        case ProcessEnded():
            return peer_ended(world, event)


def peer_failed(
    world: World, rank: int, *, error_type: str, text: str, hostname: str | None = None, label: str = ""
) -> PeerFailed:
    """Return the error for ranks that did not fail themselves.

    ``label`` is what ``rank`` failed in, if the ranks continue together afterwards; else they have stopped.
    """
    others = "this rank had none" if label else "the other ranks stopped only because of it"
    return PeerFailed(
        f"Rank {rank} failed{f' in {label}' if label else ''}: {error_type}.",
        rank=rank,
        where=f"{rank_prefix(rank, world.world_size, hostname)}, reported on {world}",
        evidence=text.rstrip(),
        do=f"fix the error on rank {rank}; {others}",
    )


def peer_left(world: World, what: str, number: int, event: Left) -> PeerMissing:
    """Return the error for a collective that a rank which has left never reached."""
    rank = event.rank
    code = "" if event.exit_code is None else f" with exit code {event.exit_code}"
    return PeerMissing(
        f"{what} cannot complete: rank {rank} has left{code}.",
        ranks=[rank],
        where=str(world),
        evidence=f"this rank is at collective {number}; rank {rank} left "
        + (f"after collective {event.last}" if event.last is not None else "before it"),
        do="make this call on every rank, not below `if world.rank == 0:`; in a loop, take as many steps on every "
        "rank: iterate over rankwise.DataLoader, and decide whether to skip a step or stop with "
        "rankwise.mean(loss, len(x)), which is the same on every rank",
    )


def timed_out(world: World, event: TimedOut) -> RankwiseError:
    """Return the error for a wait that timed out, from what one rank determined for all."""
    if event.calls:
        calls = {
            rank: CollectiveCall(words, site, hosts.get(str(rank), ""))
            for words, site, ranks, hosts in event.calls
            for rank in ranks
        }
        return calls_differ(calls, world.world_size)
    missing = event.missing
    why = (
        f" waiting for {fold_ranks(missing)}" if missing else ": every rank called it, but the network carries no data"
    )
    return PeerMissing(
        f"{event.what} timed out after {event.waited:.1f} s{why}.",
        ranks=missing,
        where=f"reported on {world}",
        evidence=event.table or None,
        do="make sure the missing rank calls it too; if the wait is intended, increase join(timeout_seconds=...)",
    )


def of_answers(what: str, waited: float, answers: Answers, sequence: int, members: Sequence[int]) -> TimedOut:
    """Return what the answers show about a wait of ``waited`` seconds so far.

    ``answers`` are those of a status poll about the collective's exchange and its ``sequence`` there; ``members`` are
    the ranks that take part in it.
    """
    missing = missing_ranks(answers, sequence, members)
    waiting = [answers[rank] for rank in members if rank in answers and answers[rank].get("waiting")]
    shown = f"{table(answers, len({*answers, *members}))}\n{stacks(answers, missing)}".strip()
    calls: list[list[Any]] = []
    if len(waiting) == len(members) and len({answer["exchange"] for answer in waiting}) > 1:
        calls = calls_of({r: [answers[r]["what"], answers[r]["at"]] for r in members}, answers)
    return TimedOut(what, waited, missing, shown, calls)


def notice(found: TimedOut) -> str:
    """Return the log message for a wait that has not timed out yet."""
    who = fold_ranks(found.missing) if found.missing else "the network"
    text = f"{found.what} has been waiting for {found.waited:.0f} s, for {who}:\n{found.table}"
    if found.calls:
        do = advice([words for words, *_ in found.calls])
        text += f"\nall ranks are waiting, for different collectives; if this does not end: {do}"
    return text


def calls_of(entries: Mapping[int, Sequence[str]], answers: Answers) -> list[list[Any]]:
    """Return what ranks called, as ``TimedOut.calls``.

    ``entries`` are description and call site of each rank; ``answers`` give the hosts.
    """
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, entry in sorted(entries.items()):
        ranks_of.setdefault(tuple(text[:LONGEST_WORDS] for text in entry), []).append(rank)
    return [
        [words, site, ranks, {str(rank): answers[rank].get("host", "") for rank in ranks[: MOST_HOSTS + 1]}]
        for (words, site), ranks in list(ranks_of.items())[:LONGEST_TABLE]
    ]


def broken(what: str, *, gone: list[int], table: str, departed: Mapping[int, Event], reason: str) -> ConnectionBroke:
    """Return the event of a broken connection; ``departed`` has the last event of each rank known to have exited."""
    have_left = bool(gone) and all(isinstance(departed.get(rank), Left) for rank in gone)
    return ConnectionBroke(what, gone, have_left, table, reason.splitlines()[0])


def connection_broke(world: World, event: ConnectionBroke) -> RankwiseError:
    """Return the error for a broken connection, from what one rank determined for all."""
    gone = event.gone
    if event.have_left:
        return CollectiveMismatch(
            f"{event.what} broke: {fold_ranks(gone)} called something else and left.",
            where=str(world),
            evidence=event.reason,
            do="call the same collectives and backward passes, with the same shapes and dtypes, on every rank",
        )
    if gone:
        who = f"{fold_ranks(gone)} exited without reporting an error"
    else:
        who = "a connection was lost, but every rank is still running"
    return PeerMissing(
        f"{event.what} broke: {who}.",
        ranks=gone,
        where=str(world),
        evidence=f"{event.table}\n{event.reason}".strip(),
        do="look at that rank's own output; a rank killed for memory leaves a line in dmesg",
    )


def peer_ended(world: World, event: ProcessEnded) -> PeerMissing:
    """Return the error for a rank whose process exited for no reported reason."""
    return PeerMissing(
        f"{event.what} cannot complete: rank {event.rank} exited without reporting an error.",
        ranks=[event.rank],
        where=f"reported on {world}",
        evidence=f"its process {event.process} has exited",
        do="look at that rank's own output; a rank killed for memory leaves a line in dmesg",
    )


def store_lost(world: World) -> PeerMissing:
    """Return the error for a job whose store has exited or does not answer."""
    return PeerMissing(
        "The job's store was lost: its launcher, or rank 0 if that serves it, has exited or cannot be reached.",
        ranks=[0],
        where=str(world),
        do="look at the output of rank 0 and of the launcher, and at the network between them and this machine",
    )


def world_left() -> NotJoined:
    """Return the error for a call that needs ranks of a world that has been left."""
    return NotJoined(
        "This needs the other ranks of a world that has been left.",
        do="train a replicated or sharded model before rankwise.leave() or the end of `with rankwise.join():`. "
        "Afterwards, alone or in another world, build a new model and optimizer, and load their state_dicts",
    )


def forked_from(world: World) -> NotJoined:
    """Return the error for a call that needs the ranks of a world in a process forked from one of them."""
    return NotJoined(
        f"This process was forked from rank {world.rank} and is not a rank itself.",
        where=f"a child of {world}",
        do="call functions that need other ranks in the rank's own process; child processes must work without them",
    )


def is_of_a_connection(error: BaseException) -> bool:
    """Return whether this is torch's error for a rank that cannot be reached."""
    words = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in words
        for sign in (
            "gloo/transport",
            "Connection closed by peer",
            "Connection reset by peer",
            "NCCL error",
            "was aborted",
        )
    )


def is_of_a_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, which may interrupt any code of the rank.

    Torch's handler raises a RuntimeError in a rank whose loader worker was killed.
    """
    handlers = {
        getattr(getattr(handler, "__func__", handler), "__code__", None)
        for handler in map(signal.getsignal, signal.valid_signals())
    } - {None}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in handlers for frame, _ in frames)


def missing_ranks(answers: Answers, sequence: int, members: Sequence[int]) -> list[int]:
    """Return the ranks that have not reached the collective of this number in its exchange."""
    return [rank for rank in members if rank not in answers or answers[rank].get("count", sequence - 1) < sequence]


def unanswered(answers: Answers, ranks: Iterable[int]) -> list[int]:
    """Return those of ``ranks`` that have not answered themselves, even if others have probed them."""
    return [rank for rank in ranks if "count" not in answers.get(rank, {})]


def first_difference(answers: Answers) -> int | None:
    """Return the number of the first collective, within the exchange asked about, that differs between ranks."""
    words: dict[str, set[int]] = {}
    for answer in answers.values():
        for sequence, digest in answer.get("digests", {}).items():
            words.setdefault(str(sequence), set()).add(digest)
    return min((int(sequence) for sequence, digests in words.items() if len(digests) > 1), default=None)


def table(answers: Answers, world_size: int = 0, *, among: Iterable[int] | None = None) -> str:
    """Return what every rank was doing, or those of ``among``: ranks that do the same share a line."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank in range(world_size) if among is None else sorted(among):
        ranks_of.setdefault(_doing(answers.get(rank)), []).append(rank)
    rows = [("rank", "host", "step", "collective", "at", "for")]
    for (step, doing, at, why), ranks in list(ranks_of.items())[:LONGEST_TABLE]:
        known = [answers[rank] for rank in ranks if rank in answers]
        rows.append((fold_ranks(ranks), _hosts(known), step, doing, at, why or _seconds(known)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(ranks_of) > LONGEST_TABLE:
        lines.append(f"and {len(ranks_of) - LONGEST_TABLE} more lines")
    return "\n".join(lines)


def stacks(answers: Answers, ranks: Iterable[int], *, is_wanted_of_all: bool = False, most: int = MOST_STACKS) -> str:
    """Return the known Python stacks of ``ranks``, innermost line last: each once, at most ``most`` of them.

    The stacks of ranks that wait in a collective are left out, unless ``is_wanted_of_all``.
    """
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        answer = answers.get(rank, {})
        stack = answer.get("stack")
        # The collective that a rank waits in is in the table.
        if stack and (is_wanted_of_all or not answer.get("waiting")):
            ranks_of.setdefault(tuple(stack), []).append(rank)
    lines: list[str] = []
    for stack, holders in list(ranks_of.items())[:most]:
        lines.append(f"stack of {fold_ranks(holders)}, innermost line last:")
        lines += [f"  {frame[:LONGEST_LINE]}" for frame in stack]
    if len(ranks_of) > most:
        lines.append(f"and {len(ranks_of) - most} more stacks")
    return "\n".join(lines)


def _doing(answer: dict[str, Any] | None) -> tuple[str, str, str, str]:
    """Return step, collective and call site of a rank, and what is known if it does not answer."""
    if answer is None:
        return "-", "no answer", "-", "stopped, dead or unreachable"
    if "silent" in answer:
        return "-", "no answer", "-", answer["silent"]
    what = str(answer["what"])[:LONGEST_LINE]
    if answer["what"] is None:
        doing = "none yet"
    elif answer["waiting"]:
        doing = f"waiting in {what}"
    else:
        doing = f"{'after' if answer['is_over'] else 'while sending'} {what}"
    return str(answer["step"]), doing, answer["at"], ""


def _hosts(answers: Sequence[dict[str, Any]]) -> str:
    hosts = sorted({answer["host"] for answer in answers if answer.get("host")})
    return ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts)} hosts"


def _seconds(answers: Sequence[dict[str, Any]]) -> str:
    """Return how long ranks have been in their collective; if they are in none, how long since the last one ended."""
    found = sorted(answer["seconds"] for answer in answers if "seconds" in answer)
    if not found:
        return "-"
    low, high = (f"{seconds:.1f}" if found[-1] < 10 else f"{seconds:.0f}" for seconds in (found[0], found[-1]))  # noqa: PLR2004 - digits
    return f"{high} s" if low == high else f"{low}-{high} s"
