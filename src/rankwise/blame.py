# SPDX-License-Identifier: Apache-2.0
"""What is said when a wait cannot end: which rank is to blame, and what every rank was doing.

Values in, errors and text out. Imported by watch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.errors import (
    CollectiveMismatch,
    PeerFailed,
    PeerMissing,
    RankwiseError,
    fold_ranks,
    fold_values,
    rank_prefix,
)

if TYPE_CHECKING:
    from rankwise.world import World

Event = dict[str, Any]
Answers = dict[int, dict[str, Any]]
"""What each rank that answered a roll call is doing."""


def peer_failed(world: World, event: Event) -> PeerFailed:
    """Return the error for the ranks that only hear of a failure."""
    host = event.get("hostname") or None
    return PeerFailed(
        f"Rank {event['rank']} failed: {event['error_type']}.",
        rank=event["rank"],
        where=f"{rank_prefix(event['rank'], world.world_size, host)}, reported on {world}",
        evidence=event["text"].rstrip(),
        do=f"mend the error of rank {event['rank']}; the other ranks only stopped because of it",
    )


def peer_left(world: World, what: str, number: int, event: Event) -> PeerMissing:
    """Return the error for a collective whose number a rank that has left never came to."""
    rank = event["rank"]
    code = "" if event["exit_code"] is None else f" with exit code {event['exit_code']}"
    return PeerMissing(
        f"{what} cannot complete: rank {rank} has left{code}.",
        ranks=[rank],
        where=str(world),
        evidence=f"this rank is at collective {number}; rank {rank} left "
        + (f"after collective {event['last']}" if event.get("last") is not None else "before it"),
        do="let every rank run the same number of steps and leave together; "
        "with an uneven number of batches per rank, iterate over rankwise.DataLoader",
    )


def verdict(world: World, event: Event) -> RankwiseError:
    """Return the error for a wait that took too long, from what one rank found out for all."""
    if event["mismatch"]:
        return CollectiveMismatch(
            "Ranks called different collectives.",
            where=f"reported on {world}",
            evidence=event["table"],
            do="call the same collectives in the same order on every rank",
        )
    missing = event["missing"]
    who = fold_ranks(missing) if missing else "no rank; the network carries nothing"
    return PeerMissing(
        f"{event['what']} waited {event['waited']:.1f} s in vain. Missing: {who}.",
        ranks=missing,
        where=f"reported on {world}",
        evidence=event["table"] or None,
        do="let the missing rank reach it too; where the wait is meant, join(timeout_seconds=...) is the limit",
    )


def broken(world: World, what: str, *, gone: list[int], table: str, departed: dict[int, Event], reason: str) -> Event:
    """Return the event that tells all ranks of a connection that broke without anybody saying why.

    Args:
        world: this rank's.
        what: the collective.
        gone: the ranks that are not there any more.
        table: what the others are doing.
        departed: the last event of each rank that is known to have ended.
        reason: torch's words, or the kernel's.
    """
    return {
        "kind": "broken",
        "rank": world.rank,
        "what": what,
        "gone": gone,
        "have_left": bool(gone) and all(departed.get(rank, {}).get("kind") == "left" for rank in gone),
        "table": table,
        "reason": reason.splitlines()[0],
    }


def connection_broke(world: World, event: Event) -> RankwiseError:
    """Return the error for a broken connection, from what one rank found out for all."""
    gone = event["gone"]
    if event["have_left"]:
        return CollectiveMismatch(
            f"{event['what']} broke: {fold_ranks(gone)} took part in something else and left.",
            where=str(world),
            evidence=event["reason"],
            do="call the same collectives and backwards, with the same shapes and dtypes, on every rank",
        )
    if gone:
        who = f"{fold_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone without a word"
    else:
        who = "a connection was lost, and every rank is still there"
    return PeerMissing(
        f"{event['what']} broke: {who}.",
        ranks=gone,
        where=str(world),
        evidence=f"{event['table']}\n{event['reason']}".strip(),
        do="look at that rank's own output; a rank killed for memory leaves a line in dmesg",
    )


def peer_ended(world: World, event: Event) -> PeerMissing:
    """Return the error for a rank whose process ended without anybody saying why."""
    return PeerMissing(
        f"{event['what']} cannot complete: rank {event['rank']} is gone without a word.",
        ranks=[event["rank"]],
        where=f"reported on {world}",
        evidence=f"its process, number {event['process']}, has ended",
        do="look at that rank's own output; a rank killed for memory leaves a line in dmesg",
    )


def store_lost(world: World) -> PeerMissing:
    """Return the error for a job whose store has ended."""
    return PeerMissing(
        "The job's store is gone: its launcher, or rank 0 where that serves it, has ended.",
        ranks=[0],
        where=str(world),
        do="look at the output of rank 0 and of the launcher",
    )


def missing_ranks(answers: Answers, number: int, world_size: int) -> list[int]:
    """Return the ranks that have not come to the collective of this number."""
    return [
        rank
        for rank in range(world_size)
        if rank not in answers
        or (answers[rank]["number"] is None and answers[rank]["last"] < number)
        or (answers[rank]["number"] or number) < number
    ]


def situations(answers: Answers, world_size: int) -> str:
    """Return what every rank was doing, equal ranks folded."""
    return fold_values({rank: _situation(answers.get(rank)) for rank in range(world_size)})


def _situation(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "no answer (stopped, dead or cut off)"
    if answer["number"] is not None:
        return f"waiting in {answer['what']} (collective {answer['number']})"
    return f"running {answer['at']} after collective {answer['last']}"
