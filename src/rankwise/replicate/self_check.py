# SPDX-License-Identifier: Apache-2.0
"""Checks a strategy's gradients before its first use on a version of torch that CI does not run.

Strategies are built on parts of torch that change without notice, and a changed part may compute wrong gradients
without raising. Each strategy provides a trial, a tiny model trained on the job's own ranks; its gradients are compared
with autograd's on one rank. Used by shard, pipeline, tensor_parallel and place.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.session import current_or_none
from rankwise.errors import PeerFailed, RankwiseError, WrongGradients
from rankwise.log import muted
from rankwise.world import torch_versions
from rankwise.world.device import accelerator
from rankwise.world.device.kinds import kind_named

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rankwise.comm.session import Session

WIDTH = 3
_TRIAL_TOLERANCE = 1e-9
_TRIAL_TOLERANCE_SINGLE = 1e-4
_checked: set[tuple[str, str]] = set()


class Compared(NamedTuple):
    """A gradient of the trial, and autograd's on one rank: both whole, [as the parameter]."""

    name: str
    found: torch.Tensor | None
    expected: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bench:
    """The arguments of a trial: the place of this rank among those with samples of their own, and a device."""

    data_rank: int
    num_data_ranks: int
    tp: int
    pp: int
    device: torch.device
    dtype: torch.dtype

    def net(self, num_blocks: int) -> nn.Sequential:
        """Return a model of ``num_blocks`` pairs of layers, the same on every rank, that ``tp`` ranks can share."""
        hidden = 2 * self.tp
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH)) for _ in range(num_blocks)
        ]
        model = nn.Sequential(*blocks).to(self.device, self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(_wave(parameter.shape, 0.7, self))
        return model

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Return a batch of all ranks, [samples, WIDTH] and [samples, WIDTH], and the bounds of this rank's samples.

        Ranks have 1, 2 or 3 samples each, and a different number in the next batch.
        """
        shares = [1 + (rank + number) % 3 for rank in range(self.num_data_ranks)]
        first = sum(shares[: self.data_rank])
        shape = torch.Size((sum(shares), WIDTH))
        x, y = _wave(shape, 1.0 + number, self), _wave(shape, 2.3 + number, self)
        return x, y, first, first + shares[self.data_rank]


def gradients(model: nn.Module, plain: nn.Module) -> Generator[Compared]:
    """Yield this rank's gradients of a trained model, gathered if they are spread, and those of autograd alone.

    Called by: every rank.
    """
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is not None and not parameter.is_meta:
            found: Any = parameter.grad
            if hasattr(found, "full_tensor"):  # a DTensor, whose class takes long to import
                found = found.full_tensor()
            yield Compared(name, None if found is None else found.to(expected.device), expected.grad)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss that trials train with: a mean over samples."""
    return (output - target).square().mean()


def check_torch(strategy: str, trial: Callable[[Bench], Iterable[Compared]], *, variant: str = "") -> None:
    """Run ``trial``, once per process, unless this version of torch is a tested one.

    Called by: every rank of the job, if every rank calls the strategy.

    Random states, gradients, the log and the number of steps are afterwards as before; the trial opens only groups of
    ranks that the strategy is about to use.

    Args:
        strategy: its name: ``"shard"``.
        trial: trains with the strategy, and returns the gradients to compare.
        variant: of the strategy, if it has several: each has its trial when it is first used.

    Raises:
        WrongGradients: gradients differ, or the trial raised; on every rank.
    """
    if torch_versions.is_tested() or (strategy, variant) in _checked:
        return
    _checked.add((strategy, variant))
    session = current_or_none()
    is_joint = session is not None and session.exchange is not None and strategy != "place"
    try:
        if is_joint:
            with all_ranks_succeed(f"the check of rankwise.{strategy}()"):
                _run(strategy, trial, session)
        else:
            _run(strategy, trial, session)
    except BaseException as error:
        _checked.discard((strategy, variant))
        if isinstance(error, PeerFailed):
            # The same class on every rank: the cause is torch, which all ranks have.
            raise _wrong(strategy, str(error)) from None
        raise


def _run(strategy: str, trial: Callable[[Bench], Iterable[Compared]], session: Session | None) -> None:
    bench = _bench(session)
    recorder = None if session is None or session.detector is None else session.detector.recorder
    with ExitStack() as during:
        if recorder is not None:
            during.enter_context(recorder.uncounted())
        during.enter_context(muted())
        during.enter_context(torch.enable_grad())
        during.enter_context(accelerator.kept_random_states(bench.device))
        try:
            _compare(strategy, trial(bench), bench)
        except (RankwiseError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise _wrong(strategy, f"{type(error).__name__}: {error}") from error


def _bench(session: Session | None) -> Bench:
    device = torch.device("cpu" if session is None else session.world.device)
    dtype = torch.float64 if kind_named(device.type).has_float64 else torch.float32
    axes = None if session is None else session.axes
    if session is None or axes is None:
        return Bench(0, 1, 1, 1, device, dtype)
    num_data_ranks = axes.data_ranks_per_group
    data_rank = axes.data_rank(session.world.rank) % num_data_ranks
    return Bench(data_rank, num_data_ranks, axes.tp, axes.pp, device, dtype)


def _compare(strategy: str, compared: Iterable[Compared], bench: Bench) -> None:
    limit = _TRIAL_TOLERANCE if bench.dtype == torch.float64 else _TRIAL_TOLERANCE_SINGLE
    wrong: list[str] = []
    for name, found, expected in compared:
        if found is None:
            wrong.append(f"{name} has no gradient")
            continue
        scale = expected.abs().max().item()
        difference = (found - expected).abs().max().item() / scale
        if not difference <= limit:  # a NaN is not
            wrong.append(f"the gradient of {name} differs by {difference:.2g} of its largest element")
    if wrong:
        raise _wrong(strategy, "\n".join(wrong))


def _wrong(strategy: str, evidence: str) -> WrongGradients:
    return WrongGradients(
        f"rankwise.{strategy}() computes wrong gradients on torch {torch_versions.installed()}, a version "
        "that rankwise was not tested with.",
        where=None if (session := current_or_none()) is None else f"reported on {session.world}",
        evidence=f"a small model was trained on these ranks and compared with autograd on one:\n{evidence}",
        do=f"pip install '{torch_versions.requirement()}', or install a newer rankwise",
    )


def _wave(shape: torch.Size, phase: float, bench: Bench) -> torch.Tensor:
    """Return numbers between -1 and 1 that are the same everywhere, without drawing random numbers."""
    numbers = torch.arange(shape.numel(), dtype=bench.dtype, device="cpu")
    return (numbers * phase + phase).sin().reshape(shape).to(bench.device)
