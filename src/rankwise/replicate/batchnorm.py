# SPDX-License-Identifier: Apache-2.0
"""BatchNorm over the whole global batch, on any device. Used by replicate and shard; other strategies make it plain.

Changes the class of the BatchNorm layers of one model to a subclass of their own; names, parameters and
buffers stay.

In order: the layers; copies of replicated models. A copy is a plain model: one that is called in training mode
(``update_bn`` of an averaged model, a teacher) moves its statistics by this rank's part of the batch, which is named
once. At the end of loops over loaders ranks post summaries of such layers to the store, and the last rank to do so
compares them, so that no rank waits for another.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from rankwise.comm import optimizer_steps
from rankwise.comm.same_state import CheckSchedule, Posted, alive, unlike_summaries
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.replicate import global_statistics
from rankwise.replicate.loss.graph import multiplied, ratio
from rankwise.replicate.own_hooks import OwnHook
from rankwise.tensors.checksum import summary_of
from rankwise.torch_private.modules import AnySizeBatchNorm, BatchNorm, check_input_dim
from rankwise.world.device.streams import check_later

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.loss.loss_on_ranks import LossOnRanks

    Summary = tuple[int, int, tuple[float, float], tuple[float, float]]
    """Of one layer: its features, the batches it has seen, and summaries of its two statistics."""


class BackwardSync(Protocol):
    """What makes the gradients of one model exact."""

    loss: LossOnRanks

    def begin(self, weight: Amount | None) -> None:
        """Start a backward whose loss is a mean over ``weight`` samples. Repeated calls do nothing."""
        ...

    def before_collective(self) -> None:
        """Prepare for a collective of another exchange. Called by: every rank, in backward."""
        ...


_sync_of: WeakKeyDictionary[nn.Module, tuple[ref[BackwardSync], Exchange]] = WeakKeyDictionary()
_lacking: WeakSet[BackwardSync] = WeakSet()
"""Of models that the warning of missing contributions has named."""
_checked: WeakKeyDictionary[BackwardSync, torch.Tensor] = WeakKeyDictionary()
"""The weight, on a device, of the latest backward that was checked for missing contributions."""


class _GlobalStatistics(BatchNorm):
    """The base of the subclasses. Without a sync (a copied model) it is the plain layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        noted = _sync_of.get(self)
        if noted is None or not _uses_batch(self):
            return super().forward(input)
        check_input_dim(self, input)
        if current().exchange is None:
            return super().forward(input)
        sync, exchange = noted[0](), noted[1]
        if sync is None:
            return super().forward(input)
        return global_statistics.normalised(self, input, _RanksOfModel(exchange, sync))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of torch's class, which any program can load."""
        reduced = super().__reduce_ex__(protocol)
        # A call: pickle cannot create an instance of another class than this one's in any other way.
        return (_PLAIN_OF[type(self)], (self.num_features,), *reduced[2:]) if type(self) in _PLAIN_OF else reduced


class GlobalBatchNorm1d(_GlobalStatistics, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` with the statistics of all ranks."""


class GlobalBatchNorm2d(_GlobalStatistics, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` with the statistics of all ranks."""


class GlobalBatchNorm(_GlobalStatistics, AnySizeBatchNorm):
    """``torch.nn.SyncBatchNorm``, on any device: inputs of two dimensions or more."""


class GlobalBatchNorm3d(_GlobalStatistics, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` with the statistics of all ranks."""


SYNCHRONISED = (GlobalBatchNorm, GlobalBatchNorm1d, GlobalBatchNorm2d, GlobalBatchNorm3d)
_CLASS_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
    nn.SyncBatchNorm: GlobalBatchNorm,
}
_PLAIN_OF = {ours: torchs for torchs, ours in _CLASS_OF.items()}


def take_torchs_batchnorm(model: nn.Module) -> None:
    """Have layers of ``torch.nn.SyncBatchNorm``, as DDP scripts have them, run on any device, in place.

    Their statistics are each rank's own until :func:`synchronise_batchnorm` is called. torch's exchange them with all
    ranks, whatever the strategy, and train on GPUs only.
    """
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = GlobalBatchNorm  # pyright: ignore[reportAttributeAccessIssue]


def synchronise_batchnorm(model: nn.Module, sync: BackwardSync, exchange: Exchange, *, only_torchs: bool) -> None:
    """Have BatchNorm layers of ``model`` take their statistics over all ranks of ``exchange``, in place.

    ``only_torchs`` leaves out all but those that were ``torch.nn.SyncBatchNorm``, which asks for it itself.

    Raises:
        ConfigurationError: a layer is of a subclass of torch's.
    """
    take_torchs_batchnorm(model)
    for name, module in model.named_modules():
        if only_torchs and not isinstance(module, GlobalBatchNorm):
            continue
        replacement = _CLASS_OF.get(type(module))
        if replacement is None and isinstance(module, BatchNorm) and not isinstance(module, SYNCHRONISED):
            raise ConfigurationError(
                f"sync_batchnorm=True does not know {type(module).__name__}, the class of {name or 'the model'}.",
                do="use torch.nn.BatchNorm1d, 2d or 3d there; the forward of a subclass may do something else",
            )
        if replacement is not None:
            module.__class__ = replacement  # pyright: ignore[reportAttributeAccessIssue] - a subclass of its own
        if isinstance(module, SYNCHRONISED):
            _sync_of[module] = ref(sync), exchange


def undo_batchnorm(model: nn.Module) -> None:
    """Make the BatchNorm layers of ``model`` torch's own again."""
    for module in model.modules():
        if isinstance(module, SYNCHRONISED):
            _sync_of.pop(module, None)
            module.__class__ = _PLAIN_OF[type(module)]  # pyright: ignore[reportAttributeAccessIssue] - its base


def warn_of_own_statistics(model: nn.Module, advice: str = "") -> None:
    """Warn once, before a training forward in which BatchNorm layers normalize by the samples of each rank.

    Layers in evaluation mode, as those of a frozen backbone, normalize by their running statistics.
    """
    layers = [
        (name or type(module).__name__, ref(module))
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm | _GlobalStatistics)
    ]

    def before(*_: object) -> None:
        if torch.is_grad_enabled():
            names = [name for name, layer in layers if (one := layer()) is not None and _uses_batch(one)]
            if names:
                handle.remove()
                warn(
                    f"{_take_their(names)} statistics per rank, so that the result depends on the number of ranks"
                    f"{advice}"
                )

    if layers:
        handle = model.register_forward_pre_hook(OwnHook(before))


def _uses_batch(layer: BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _take_their(names: list[str]) -> str:
    """Return the start of a sentence about BatchNorm layers: ``the BatchNorm layers 'bn1' and 2 more take their``."""
    if len(names) == 1:
        return f"the BatchNorm layer {names[0]!r} takes its"
    return f"the BatchNorm layers {names[0]!r} and {len(names) - 1} more take their"


def _warn_of_lacking_gradients(sync: BackwardSync) -> None:
    """Warn once per model that samples without weight change the others' outputs, which no gradient shows."""
    # A loss that enters the global loss times zero cannot carry that gradient to earlier layers.
    if sync not in _lacking:
        _lacking.add(sync)
        warn(
            "the samples of this rank have no weight in the loss, but BatchNorm includes them in its statistics: "
            "the gradients of earlier layers miss their contribution, so the result depends on the number of "
            "ranks; remove such samples before calling the model, or give each rank samples that count",
            all_ranks=True,
        )


@dataclass(frozen=True, slots=True)
class _RanksOfModel:
    """The ranks that train a model together; see :class:`rankwise.replicate.global_statistics.StatisticsRanks`.

    The loss of rank r is a mean over its own w_r samples and later enters the global loss times w_r / sum w, so sums
    over ranks are weighted with w_r, and divided by w_r where they meet this rank's gradient again.
    """

    exchange: Exchange
    sync: BackwardSync

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self.exchange.all_gather(own, what="BatchNorm statistics")

    def mean_sums(self, own: torch.Tensor, x: torch.Tensor, count: torch.Tensor, *, is_needed: bool) -> torch.Tensor:
        # If the loss does not pass through the model's output, backward may reach this layer first.
        self.sync.begin(self.sync.loss.forward_weight)
        amount = self.sync.loss.weight
        if isinstance(amount, torch.Tensor):
            return self._mean_sums_on_device(own, amount, count, is_checked=bool(x.numel()) and is_needed)
        total = torch.nan_to_num(own) * amount if amount == 0 else own * amount
        self.sync.before_collective()
        total = self.exchange.all_reduce(total, what="BatchNorm gradients")
        if amount == 0 and x.numel() and is_needed and bool(total.any()):
            _warn_of_lacking_gradients(self.sync)
        return total / (count * amount) if amount else torch.zeros_like(total)

    def _mean_sums_on_device(
        self, own: torch.Tensor, amount: torch.Tensor, count: torch.Tensor, *, is_checked: bool
    ) -> torch.Tensor:
        total = self.exchange.all_reduce(multiplied(own, amount), what="BatchNorm gradients")
        # Once per backward: in the layer that backward reaches first.
        if is_checked and _checked.get(self.sync) is not amount and self.sync not in _lacking:
            _checked[self.sync] = amount
            check_later((amount == 0) & total.any(), partial(_warn_of_lacking_gradients, self.sync))
        return multiplied(total, ratio(1.0, count * amount))


# -- copies of replicated models -----------------------------------------------------------------------

FIRST_COMPARED_LOOPS = 4
LOOPS_BETWEEN_COMPARISONS = 64
"""How many loops apart ranks compare statistics of copies, after the first ones."""


def watch_copies(session: Session) -> None:
    """Compare statistics of copies of replicated models from now on, until a difference was named.

    Called by: every rank that replicates a model with synchronized BatchNorm. Further calls change nothing.
    """
    session.once(_started)


def _started(session: Session) -> _CopiedStatistics | None:
    posted = Posted.of(session, "rankwise/statistics_of_copies")
    if posted is None:
        return None
    copies = _CopiedStatistics(posted)
    session.batches.after_loop(copies.compare)
    session.before_save(copies.compare_now)
    session.on_leave(copies.compare_now)
    return copies


class _CopiedStatistics:
    def __init__(self, posted: Posted) -> None:
        self._posted = posted
        self._schedule = CheckSchedule(FIRST_COMPARED_LOOPS, LOOPS_BETWEEN_COMPARISONS)
        self._num_loops = 0
        self._num_compared = 0
        self._has_warned = False

    def compare(self) -> None:
        """Compare after some of the loops."""
        self._num_loops += 1
        if self._schedule.is_due(self._num_loops - 1):
            self.compare_now()

    def compare_now(self) -> None:
        """Post this rank's summaries; warn if it is the last rank to do so and the ranks differ."""
        if self._has_warned:
            return
        layers = _copied_layers()
        self._num_compared += 1
        # Whatever waits for a lost store reports it.
        with contextlib.suppress(OSError):
            found = self._posted.reports(str(self._num_compared), [_layer_summary(one) for one in layers])
            number = None if found is None else _unlike_layer(list(found.values()), layers)
            if number is not None and self._posted.is_first("told"):
                self._has_warned = True
                self._warn(layers[number])

    def _warn(self, layer: BatchNorm) -> None:
        warn(
            f"{_owner_of(layer)} is not replicated, and its {type(layer).__name__} has running statistics that differ "
            "between ranks, as when each rank calls a copy of a model in training mode with its own samples (update_bn "
            "of an averaged model, a teacher); call copy = rankwise.replicate(copy, sync_batchnorm=True) first, which "
            "takes them from all samples; or copy.eval(), which keeps them",
            all_ranks=True,
        )


def _copied_layers() -> list[BatchNorm]:
    """Return the BatchNorm layers with statistics that no strategy handles, in an order that ranks share."""
    known = optimizer_steps.accounted_modules()
    found = [one for one in alive(BatchNorm) if not issubclass(type(one), SYNCHRONISED) and one not in known]
    return sorted(filter(_is_used, found), key=_layer_summary)


def _is_used(layer: BatchNorm) -> bool:
    count = layer.num_batches_tracked
    return layer.running_mean is not None and count is not None and not count.is_meta and int(count) > 0


def _layer_summary(layer: BatchNorm) -> Summary:
    mean, variance = layer.running_mean, layer.running_var
    if mean is None or variance is None:
        return layer.num_features, 0, (0.0, 0.0), (0.0, 0.0)
    count = layer.num_batches_tracked
    return layer.num_features, 0 if count is None else int(count), summary_of(mean), summary_of(variance)


def _unlike_layer(held: Sequence[Sequence[Summary]], layers: Sequence[BatchNorm]) -> int | None:
    """Return the number of a layer whose statistics differ; ``None`` where ranks have other layers on purpose."""
    shapes = [[one[:2] for one in summaries] for summaries in held]
    if any(one != shapes[0] for one in shapes):
        return None
    dtypes = [torch.float32 if one.running_mean is None else one.running_mean.dtype for one in layers]
    # Of each layer its mean, then its variance.
    values = [[one for summary in summaries for one in summary[2:]] for summaries in held]
    unlike = unlike_summaries(values, [dtype for dtype in dtypes for _ in range(2)])
    return unlike[0] // 2 if unlike else None


def _owner_of(layer: BatchNorm) -> str:
    owners = [one for one in alive(nn.Module) if any(part is layer for part in one.modules())]
    largest = max(owners, key=lambda one: sum(1 for _ in one.modules()), default=layer)
    return type(largest).__name__
