# SPDX-License-Identifier: Apache-2.0
"""What a person is shown of a failed attempt: who failed first, how the others ended, the error, what to write instead.

Values in, text out; the advice is a table of errors that scripts written for other tools are known for. Imported by
the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks, rank_prefix
from rankwise.world.device.kinds import ASK_FIRST, MISSING_GPU

if TYPE_CHECKING:
    from rankwise.launch.report.failure import FailedAttempt

LONGEST_BRIEF = 300
"""How much is shown of the message of a rank that failed after the first."""
_NO_NCCL = (
    'NCCL is for GPUs, and this rank sees none: write init_process_group(backend="gloo"), leave the backend out '
    "(torch takes the one that fits), or call rankwise.join(), which chooses by the device"
)
_NO_GPU = (
    f"this rank sees no GPU: {ASK_FIRST}, or use the device that "
    "rankwise.join() decides: `world = rankwise.join(); model.to(world.device)`"
)
_NO_GROUP = (
    "call torch.distributed.init_process_group() before this line; under `rankwise run` it needs no arguments. Or call "
    "rankwise.join(), with rankwise.DataLoader in place of the sampler and rankwise.replicate(model) of the wrapper"
)
_TWICE = (
    "call init_process_group() once per process, and guard a second call by torch.distributed.is_initialized(); "
    "rankwise.join() has opened it already where the script calls that"
)
_UNUSED = (
    "some parameters had no part in the loss: rankwise.replicate(model) needs no flag for that; with "
    "DistributedDataParallel pass find_unused_parameters=True"
)
_PORT_TAKEN = (
    "another process holds the port that the script names: leave init_method out, since `rankwise run` has a port of "
    "its own that init_process_group() finds; a script that starts its own processes runs under `rankwise run -n 1`, "
    "and names a free port in init_method or MASTER_PORT"
)
_HOROVOD = (
    "rankwise has Horovod's calls: start the script by `rankwise horovodrun -np 4 python train.py`, with not a line "
    "changed, or write import rankwise.compat.horovod as hvd"
)
_MEGENGINE = (
    "rankwise has MegEngine's calls for several ranks, on torch's tensors and modules: start the script by "
    "`rankwise run -n 4 -m rankwise.compat.megengine train.py`, or write "
    "import rankwise.compat.megengine.distributed as dist"
)

_NO_STDIN = (
    "there was nothing to read from stdin, and with several ranks there never is: debug with `rankwise run -n 1` in a "
    "terminal, or see where ranks are by `rankwise stacks`; give what a script asks for as an "
    "argument"
)

WHAT_TO_DO = (
    # A torch without NCCL, then two with NCCL on a machine without GPUs.
    ("Distributed package doesn't have NCCL built in", _NO_NCCL),
    ("ProcessGroupNCCL is only supported with GPUs", _NO_NCCL),
    ("nccl2 requires at least one", _NO_NCCL),
    *((words, _NO_GPU) for words in MISSING_GPU),
    (
        "DistributedDataParallel device_ids and output_device arguments only work with",
        "leave device_ids and output_device out for a model on the CPU; rankwise.replicate(model) takes neither",
    ),
    ("Default process group has not been initialized", _NO_GROUP),
    ("trying to initialize the default process group twice", _TWICE),
    ("Expected to have finished reduction in the prior iteration", _UNUSED),
    ("EADDRINUSE", _PORT_TAKEN),
    ("EOFError: EOF when reading a line", _NO_STDIN),
    ("BdbQuit: ", _NO_STDIN),
    ("No module named 'horovod'", _HOROVOD),
    ("No module named 'megengine'", _MEGENGINE),
)
"""Words of the error, mostly torch's, and what mends it; the first row that fits counts."""


def whole(failed: FailedAttempt) -> str:
    """Return the text for a person: the first failure, how the others ended, then the first failure's error, whole."""
    first = failed.first
    lines = [_first_line(failed)]
    if first.at:
        lines.append(f"[rankwise] it was last seen {first.at}")
    if failed.log_path:
        lines.append(f"[rankwise] its stderr is in {failed.log_path}")
    others = _ends_of_others(failed)
    lines += others
    if first.traceback:
        lines += [f"[rankwise] the error of rank {first.rank}:"] if others else []
        lines.append(first.traceback.rstrip("\n"))
    elif failed.stderr_tail:
        lines.append(f"[rankwise] the last lines rank {first.rank} wrote to stderr:")
        lines.extend(f"  {line}" for line in failed.stderr_tail)
    advice = advice_for(f"{first.type}: {first.message}")
    if advice is not None:
        lines.append(f"[rankwise] what to write instead: {advice}")
    return "\n".join(lines) + "\n"


def _ends_of_others(failed: FailedAttempt) -> list[str]:
    """Return how the other ranks ended, those that failed in the order they did; ranks that ended alike on one line."""
    ranks_of: dict[str, list[int]] = {}
    for one in failed.failures[1:]:
        came = "failed on the way" if one.rank in failed.tolerated else "then failed too"
        seen = f", last seen {one.at}" if one.at else ""
        ranks_of.setdefault(f"{came}: {one.brief[:LONGEST_BRIEF]}{seen}", []).append(one.rank)
    for rank, how in sorted(failed.ends.items()):
        ranks_of.setdefault(how, []).append(rank)
    return [f"[rankwise] {fold_ranks(ranks)} {how}" for how, ranks in ranks_of.items()]


def one_line(failed: FailedAttempt) -> str:
    """Return the one line for a machine whose launcher leaves the whole report to node 0's."""
    error = f" ({failed.first.type}: {failed.first.message.splitlines()[0]})" if failed.first.message else ""
    return f"{_first_line(failed)}{error}; node 0 shows it whole\n"


def _first_line(failed: FailedAttempt) -> str:
    who = rank_prefix(failed.first.rank, failed.world_size, failed.hostname or None)
    came_later = bool(failed.tolerated) and failed.first.rank not in failed.tolerated
    first = " first" if failed.world_size > 1 and not came_later else ""
    return f"[rankwise] {who} failed{first}: {failed.first.words}"


def advice_for(error: str) -> str | None:
    """Return what to write instead, or ``None`` where the error is not a known one or says so itself.

    Args:
        error: the exception that ended a rank, as ``ValueError: its message``.
    """
    if "\n  do  " in error:  # as rankwise's own errors end
        return None
    return next((advice for words, advice in WHAT_TO_DO if words in error), None)
