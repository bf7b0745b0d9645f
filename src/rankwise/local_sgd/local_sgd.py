# SPDX-License-Identifier: Apache-2.0
"""Training with little communication: worker groups train on their own and are averaged every few steps.

Holds the public call; ``rounds`` has the rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakMethod

import torch

from rankwise.comm.agreement import all_ranks_succeed, same_on_all_ranks
from rankwise.comm.session import current
from rankwise.compress.methods import Int8, TopK, method_of
from rankwise.errors import ConfigurationError
from rankwise.local_sgd.outer import MEAN, DiLoCo, PseudoGradients, outer_of
from rankwise.local_sgd.rounds import LocalSGD, exchanged
from rankwise.log import log
from rankwise.pipeline.plan import StagedModel
from rankwise.replicate.batchnorm import take_torchs_batchnorm
from rankwise.replicate.device_mesh import axes_for, exchange_along
from rankwise.replicate.device_of_inputs import check_device_of_inputs
from rankwise.replicate.gradient_sync import GradientSync, SyncAfterForward
from rankwise.replicate.loss.hooks import subscribe
from rankwise.replicate.loss.loss_on_ranks import LossOnRanks
from rankwise.replicate.loss.reports import Mode
from rankwise.replicate.same_model import broadcast_tensors, check_same_model
from rankwise.replicate.strategy_registry import check_split, check_unregistered, is_placed, register, strategy_of
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from torch import nn

    from rankwise.comm.session import Session
    from rankwise.compress.methods import Method
    from rankwise.local_sgd.rounds import WeighsSteps
    from rankwise.replicate.strategy_registry import GradientStrategy
    from rankwise.world.mesh import Axes

_rounds_of: WeakKeyDictionary[nn.Module, LocalSGD] = WeakKeyDictionary()
_STRATEGIES = ("replicate", "shard", "pipeline")


def local_sgd(
    model: nn.Module,
    *,
    every: int,
    outer: str | DiLoCo = MEAN,
    overlap: int | None = None,
    compress: str | Method | None = None,
) -> LocalSGD:
    """Let worker groups of ranks train ``model`` on their own, and average them every ``every`` optimizer steps.

    Called by: every rank, with the same model, after the strategy that spreads it within a worker group
    (:func:`rankwise.replicate`, ``shard``, ``pipeline``, ``tensor_parallel``) and before the first step. The optimizer
    may be built before or after.

    The worker groups lie along ``worker_groups`` of :func:`rankwise.mesh`; without a mesh each rank is one. Every
    worker group starts from the first one's parameters and sees its own part of each global batch. The steps of the
    optimizer that holds the model's parameters are counted, and after ``every`` of them a round ends: the changes of
    the worker groups are averaged, weighted by what their losses average over (samples, tokens, as their graphs show),
    and the outer optimizer takes a step with the mean. A rank sends only its own part, to the rank at its coordinate in
    the other worker groups; ranks with copies share the sending, so that the network between worker groups carries each
    number once per worker group and direction.

    The result is that of one rank only for ``every=1`` with one optimizer, plain SGD and the plain mean. Between
    rounds worker groups differ: a decision that a rank takes from its own loss is not the others', and every worker
    group must take equally many steps. A ``GradScaler`` skips steps whose gradients overflow, on one worker group only:
    train in bfloat16 instead. A step in which a worker group has no samples changes nothing there.

    Args:
        model: on one device, or after one of these strategies. The first argument of a model on one device must be a
            tensor of samples; else put its backward into :func:`rankwise.weight`, as for ``replicate``.
        every: steps of a ``torch.optim.Optimizer`` in a round. If several hold parts of the model, those of the first
            that steps are counted; those of another once the first takes none for a round.
        outer: ``"mean"`` for the mean of the parameters, ``"diloco"``, or :class:`rankwise.DiLoCo`.
        overlap: after how many steps of the next round the mean is applied, which arrives meanwhile; the changes of
            these steps are kept. The same step on every worker group. Default: half of ``every``; 0 waits for it at
            once.
        compress: how changes are compressed between worker groups, as for :func:`rankwise.replicate`. ``"int8"`` and
            ``"top-k"`` are sent when the mean is applied.

    Returns:
        Its :meth:`LocalSGD.synchronize` ends a round at once; save it with the model and the optimizer. A save ends a
        round too, so that a checkpoint holds one state, with the inner optimizer's state of the first worker group. All
        worker groups resume from it, on any number of worker groups.

    Memory: one more copy of a rank's part of the parameters, one more while an overlapping mean is on its way, one more
    with momentum, one more for channels; between worker groups of one host one more, in the memory that they share.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ConfigurationError: an argument is invalid or differs between ranks; the ranks have no worker groups; the model
            is not spread within its worker group, or was given to ``local_sgd`` before.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.

    Source: Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767); Douillard et al., "DiLoCo"
        (arXiv:2311.08105), and arXiv:2501.18512, section 2.2, for applying a mean some steps later.
    """
    session = current()
    with all_ranks_succeed("rankwise.local_sgd()"):
        chosen, method = outer_of(outer), method_of(compress)
        num_overlapping = _checked_steps(every, overlap)
        _check_model(model, session)
    axes = axes_for("local_sgd", "worker_groups")
    with all_ranks_succeed("rankwise.local_sgd()"):
        trained = _check_within_group(model, axes, method)
    same_on_all_ranks(
        "the configuration of local_sgd()",
        {"every": every, "overlap": num_overlapping, "outer": str(chosen or MEAN), "compress": str(method)},
        do="pass the same on every rank",
        error=ConfigurationError,
    )
    name = type(model).__name__
    if session.exchange is not None:
        check_same_model(model)
    if trained is None:
        take_torchs_batchnorm(model)
        trained = _follow_alone(model, session)
    reads_loss = trained if isinstance(trained, StagedModel) else getattr(trained, "loss", None)
    if isinstance(reads_loss, LossOnRanks | StagedModel) and axes.worker_groups > 1:
        reads_loss.cautions[Mode.SUM] = _of_a_sum(axes.worker_groups)
    worker_groups, copies = exchange_along("worker_groups"), exchange_along("dp_replicate")
    changes = None
    if worker_groups is not None:
        tensors = [own_part(tensor).detach() for tensor in (*model.parameters(), *model.buffers())]
        with torch.no_grad():
            held = [part for part in tensors if not part.is_meta]
            broadcast_tensors(held, worker_groups, what="parameters of the first worker group")
        own = worker_groups.dup()
        parts = [own_part(parameter).detach() for _, parameter in exchanged(model)]
        changes = PseudoGradients(parts, own, None if copies is None else copies.dup(), method, f"changes of {name}")
    rounds = LocalSGD(
        model,
        session,
        cast("WeighsSteps", trained),
        every=every,
        overlap=num_overlapping,
        outer=chosen,
        changes=changes,
        data=None if changes is None else exchange_along("dp_replicate", "dp_shard"),
    )
    _rounds_of[model] = rounds
    how = outer if chosen is None else chosen
    log(f"local_sgd: {name} on {axes.worker_groups} worker groups, {how} every {every} steps")
    return rounds


def _checked_steps(every: object, overlap: object) -> int:
    """Return after how many steps of the next round a mean is applied."""
    if type(every) is not int or every < 1:
        raise ConfigurationError(
            f"every= of local_sgd() must be an integer of at least 1, got {every!r}.", do="pass every=16, for example"
        )
    if overlap is None:
        return every // 2
    if type(overlap) is not int or not 0 <= overlap < every:
        raise ConfigurationError(
            f"overlap must be from 0 to {every - 1} with every={every}, got {overlap!r}.",
            do="pass a smaller overlap=: the mean is applied before the next round ends",
        )
    return overlap


def _check_model(model: nn.Module, session: Session) -> None:
    if not isinstance(cast("object", model), torch.nn.Module):
        raise ConfigurationError(
            f"local_sgd() takes a torch.nn.Module, not a {type(model).__name__}.", do="pass the model itself"
        )
    ids = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in ids for other in _rounds_of for parameter in other.parameters()):
        raise ConfigurationError(
            "local_sgd() was already called on this model or a part of it.", do="call local_sgd() once per model"
        )
    if is_placed(model):
        raise ConfigurationError(
            "local_sgd() cannot be combined with place(), which was already applied to this model.",
            do="call only rankwise.replicate(rankwise.place(model)), or local_sgd() without place()",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "The model has no parameter that needs a gradient.", do="call local_sgd() with the model you train"
        )
    trained = strategy_of(model)
    if trained is None:
        check_unregistered(model, "local_sgd")
    elif trained.strategy not in _STRATEGIES:
        raise ConfigurationError(
            f"local_sgd() cannot be combined with {trained.strategy}(), which was already applied to this model.",
            do=f"call local_sgd() after {', '.join(_STRATEGIES)}, or on a model of one device",
        )
    elif session.axes is None and session.world.world_size > 1:
        raise ConfigurationError(
            f"{trained.strategy}() was called before the mesh had worker groups, so it averages over all ranks in "
            "every step.",
            do=f"call rankwise.mesh(worker_groups=..., dp_replicate=...) first, then {trained.strategy}() and "
            "local_sgd()",
        )


def _check_within_group(model: nn.Module, axes: Axes, method: Method | None) -> GradientStrategy | None:
    """Return the model's strategy; raise unless it fits the mesh."""
    if axes.worker_groups == 1 and axes.world_size > 1:
        raise ConfigurationError(
            "local_sgd() requires at least two worker groups.",
            evidence=f"the mesh is {axes}",
            do="call rankwise.mesh(worker_groups=..., ...) right after rankwise.join()",
        )
    if axes.tp > 1 and isinstance(method, Int8 | TopK):
        raise ConfigurationError(
            "The layers that tensor_parallel() copies would diverge with this compress=.",
            evidence="the compressed value of a change depends on its neighbours, which differ between ranks along tp",
            do='pass compress="powersgd", "bf16" or "fp16"',
        )
    trained = strategy_of(model)
    if trained is None:
        check_split(model, axes, "local_sgd")
        needed = "pipeline" if axes.pp > 1 else "shard" if axes.dp_shard > 1 else "replicate"
        if axes.pp > 1 or axes.data_ranks_per_group > 1:
            raise ConfigurationError(
                "This model is not distributed over the ranks of its worker group.",
                evidence=f"the mesh is {axes}",
                do=f"call rankwise.{needed}(model) first, then local_sgd()",
            )
    elif isinstance(trained, GradientSync) and trained.num_ranks != axes.dp_replicate:
        raise ConfigurationError(
            f"This model is averaged over {trained.num_ranks} ranks, but dp_replicate is {axes.dp_replicate}.",
            evidence=f"the mesh is {axes}",
            do="call rankwise.mesh() before replicate()",
        )
    return trained


def _follow_alone(model: nn.Module, session: Session) -> GradientStrategy:
    """Count the samples of a single-device model's gradients, and make accumulated ones exact; send nothing."""
    pairs = list(model.named_parameters())
    names, parameters = [name for name, _ in pairs], [parameter for _, parameter in pairs]
    sync = GradientSync(names, parameters, None, type(model).__name__, strategy="local_sgd")
    register(model, sync)
    session.preemption.unless(WeakMethod(sync.is_mid_step))
    check_device_of_inputs(model, session.world.device, "local_sgd")
    model.register_forward_hook(cast("Any", SyncAfterForward(sync, None)), with_kwargs=True)
    sync.loss.expect_weights(averages_elsewhere=True)
    subscribe(sync.loss, session)
    return sync


def _of_a_sum(num_groups: int) -> str:
    return (
        f"the loss ({{where}}) is a sum over samples: each of the {num_groups} worker groups steps with the sum over "
        "its own samples, and the changes are averaged, so parameters move less than on one rank; use the "
        f"mean over samples, or a learning rate {num_groups} times as large"
    )
