# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a host share one copy of a model's parameters; the set-up if they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.comm.agreement import same_on_all_ranks
from rankwise.comm.backends.engine import Meeting
from rankwise.comm.backends.mapping import PAGE_BYTES
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.comm.same_state import Posted
from rankwise.errors import ConfigurationError, fold_values
from rankwise.log import log
from rankwise.replicate.one_copy.divided_step import DividedSteps
from rankwise.replicate.one_copy.shared_parameters import ParameterLayout, SharedParameters, why_not_shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.gradient_sync import GradientSync

LEAST_BYTES = 2**19
"""For smaller models the ranks would spend more time on meeting than they save."""


def share_parameters(
    model: nn.Module, sync: GradientSync, exchange: Exchange, session: Session, *, wanted: bool | None, obstacle: str
) -> None:
    """Have the ranks of each host share one copy of a model's parameters, which are equal on all ranks.

    Called by: every rank of ``exchange``.

    Args:
        model: that has them.
        sync: of its gradients.
        exchange: of the ranks that hold copies.
        session: of this rank.
        wanted: ``False``: do not; ``True``: do, or raise; ``None``: do so where it is possible and worth it.
        obstacle: why another part of the call makes it impossible, or empty.

    Raises:
        ConfigurationError: ``wanted`` is true, and it is impossible; or it differs between ranks.
    """
    same_on_all_ranks(
        "one_copy_per_host", str(wanted), do="pass the same one_copy_per_host= on every rank", error=ConfigurationError
    )
    num_bytes = sum(parameter.nbytes for parameter in sync.parameters)
    if wanted is False or (wanted is None and num_bytes < LEAST_BYTES):
        return
    reason = obstacle or why_not_shared(sync.names, sync.parameters)
    if not reason and not isinstance(exchange, SharedMemory):
        reason = "the ranks do not exchange through shared memory"
    if not reason and isinstance(exchange, SharedMemory):
        reason = _share(model, sync, exchange, session, is_wanted=wanted is True)
    if reason and wanted:
        raise ConfigurationError(
            f"one_copy_per_host=True is impossible for this {type(model).__name__}: {reason}.",
            do="leave one_copy_per_host out",
        )


def stop_sharing(parameters: Sequence[nn.Parameter], session: Session) -> None:
    """Give every rank its own copy, if the ranks of a host share some of these parameters.

    Called by: every rank of the host.
    """
    steps = session.made(_steps_of)
    if steps is not None and steps.models_of(parameters):
        steps.give_up("a model has changed")


def _share(model: nn.Module, sync: GradientSync, exchange: SharedMemory, session: Session, *, is_wanted: bool) -> str:
    """Share them; return why it is impossible, or nothing."""
    most = max(map(len, exchange.hosts))
    if most == 1:
        return "no host has more than one rank"
    own_host = _own_host(exchange)
    layout = ParameterLayout.of(sync.parameters, len(own_host), PAGE_BYTES)
    memory, reasons = exchange.host_memory(layout.end, [layout.parts[own_host.index(exchange.rank)]])
    if memory is None:
        return "there is too little shared memory\n" + fold_values(reasons)
    steps = session.once(_steps_of)
    if steps is None or memory.mapping.private is None:
        return "this system does not tell which pages a process has written"
    name = type(model).__name__
    shared = SharedParameters(name, sync.names, sync.parameters, memory, layout, is_wanted=is_wanted)
    steps.meet(f"one_copy_per_host of {name}", [])
    shared.show()
    steps.add(model, shared)
    sync.report_backwards_to(steps.note_backward)
    log(f"{name}: one copy of the parameters per host, {layout.end / 2**20:.1f} MiB for up to {most} ranks")
    return ""


def _steps_of(session: Session) -> DividedSteps | None:
    exchange = session.exchange
    if not isinstance(exchange, SharedMemory):
        return None
    memory, _ = exchange.host_memory(PAGE_BYTES + Meeting.num_bytes(len(_own_host(exchange))), [])
    if memory is None:
        return None
    posted = Posted.of(session, f"rankwise/one_copy/{memory.ranks[0]}", memory.ranks)
    return None if posted is None else DividedSteps(session, exchange, memory, posted)


def _own_host(exchange: SharedMemory) -> list[int]:
    return next(ranks for ranks in exchange.hosts if exchange.rank in ranks)
