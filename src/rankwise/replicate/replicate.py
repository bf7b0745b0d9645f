# SPDX-License-Identifier: Apache-2.0
"""Data parallel: the same model on every rank, each with its share of the batch, exact gradients.

Works in place: the model keeps its class and its keys. Holds the public call, which sets up the hooks around forward;
gradient_sync has those of backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from weakref import WeakMethod, ref

from torch import nn

from rankwise.comm.agreement import same_on_all_ranks
from rankwise.comm.session import current
from rankwise.compress.methods import Int8, TopK, method_of
from rankwise.errors import ConfigurationError
from rankwise.replicate.batchnorm import (
    SYNCHRONISED,
    synchronise_batchnorm,
    undo_batchnorm,
    warn_of_own_statistics,
    watch_copies,
)
from rankwise.replicate.buffers import BufferSync, DivergedBuffers
from rankwise.replicate.device_of_inputs import check_device_of_inputs
from rankwise.replicate.gradient_hooks import ModuleHooks
from rankwise.replicate.gradient_sync import GradientSync, SyncAfterForward
from rankwise.replicate.loss.hooks import check_weight_function, subscribe, unsubscribe
from rankwise.replicate.one_copy.divided_step import share_parameters, stop_sharing
from rankwise.replicate.own_hooks import OwnHook, leave_out_of_copies, remove_own_hooks
from rankwise.replicate.random_numbers.model_draws import draw_as_one_rank, forget_draws_of
from rankwise.replicate.random_numbers.scope import check_randomness
from rankwise.replicate.same_model import broadcast_model, check_same_model
from rankwise.replicate.sparse_gradients import sparse_layers
from rankwise.replicate.state_guard.guard import StateGuard
from rankwise.replicate.strategy_registry import (
    check_split,
    check_unregistered,
    is_placed,
    register,
    strategy_of,
    unregister,
)
from rankwise.torch_private.compiler import GraphSplit
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.compress.methods import Method
    from rankwise.replicate.random_numbers.scope import Randomness
    from rankwise.world.mesh import Axes

M = TypeVar("M", bound="nn.Module")


def replicate(
    model: M,
    *,
    sync_batchnorm: bool = False,
    weight: Callable[..., float | torch.Tensor] | None = None,
    compress: str | Method | None = None,
    randomness: Randomness = "counter",
    one_copy_per_host: bool | None = None,
) -> M:
    """Train ``model`` data parallel, in place: after ``loss.backward()`` gradients are global means.

    Called by: every rank, with the same model, before the optimizer is built; again, after its parameters have changed.

    Every rank starts from rank zero's parameters and buffers. Then each ``backward()`` returns with every
    gradient equal on all ranks: the mean over all samples of all ranks, also when ranks have unequal numbers
    of samples, or none. Parameters that only some ranks use need no flag; a parameter that no rank used keeps
    ``grad=None``. The model keeps its class and its ``state_dict`` keys; a deepcopy or pickle of it is a plain
    model, without ranks.

    What a loss is a mean or a sum over is read from its graph when ``backward()`` is called: samples, tokens, class
    weights, unmasked elements; each of several terms by itself. A loss that couples samples of the batch is named in
    a warning, and averaged by the samples of the forward call: the first dimension of its first tensor argument. Pass
    ``weight``, or use :func:`rankwise.weight` around ``backward()``, to say it yourself.

    Every rank runs backward through the model equally often, also without samples. Decisions that depend on a rank's
    own loss (skipping a step, LBFGS's line search, a scheduler on plateaus, stopping early) must use
    ``rankwise.all_reduce`` of it, or the ranks diverge. Gradients are views of memory that the next backward
    overwrites: clone a gradient to keep it after the step. ``torch.autograd.grad`` gives this rank's own gradient;
    a step by gradients that were not averaged is an error. Hooks on gradients of parameters get the mean.

    Args:
        model: on its device already, compiled with ``torch.compile`` or not. After a change of its layers, dtype or
            device, call ``replicate`` again, then create the optimizer.
        sync_batchnorm: take BatchNorm statistics over the whole global batch, as one rank would. Without it,
            each rank normalises by its own samples, and the result depends on the number of ranks. Layers of
            ``torch.nn.SyncBatchNorm`` do so in any case.
        weight: called with the arguments of each forward call; returns what the loss is a mean over:
            the number of samples or tokens of this rank. At least zero.
        compress: for slow networks: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"powersgd"``, ``"top-k"``, or
            :class:`rankwise.PowerSGD`, :class:`rankwise.TopK`. Gradients are then the same on all ranks, but no longer
            those of one rank: ``docs/slow-networks.md`` says how far they differ. The memory of earlier steps that a
            rank keeps is not in checkpoints. The same on every rank.
        randomness: how dropout and other noise inside the model are drawn. ``"counter"``: the same numbers for every
            number of ranks, each rank computing its rows alone; ``"torch"``: the numbers that torch draws for the whole
            batch on one device, which every rank computes; ``"per_rank"``: independent numbers on each rank, so that
            the result depends on the number of ranks as on a seed.
        one_copy_per_host: whether the ranks of a host share one copy of the parameters and of the optimizer's state on
            the CPU, each updating a part of them: ``docs/one-copy-per-host.md``. ``None``: where it is possible.

    Returns:
        ``model`` itself.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.
        ConfigurationError: the model is replicated already and has not changed, or has nothing to train; ``compress``
            is unknown, or does not support models of :func:`rankwise.tensor_parallel`; or :func:`rankwise.mesh` laid
            ranks out along ``dp_shard`` or ``pp``, whose strategies replicate themselves.

    Source: the exact mean is sum_r w_r g_r / sum_r w_r; bucketing as in Li et al., "PyTorch Distributed"
        (VLDB 2020), section 3.2.
    """
    session = current()
    method = method_of(compress)
    is_again = _undo(model, session)
    check_unregistered(model, "replicate")
    check_weight_function(weight, "replicate")
    check_randomness(randomness, "replicate")
    named = dict(model.named_parameters())  # each tied parameter once
    names, parameters = list(named), list(named.values())
    _check_trainable(named)
    _check_compress(compress, method, parameters)
    if session.axes is not None:
        check_split(model, session.axes, "replicate")
    exchange = session.exchange if session.axes is None else _exchange_of(session.axes)
    group = None
    if exchange is not None:
        _check_same(model, method, randomness)
        broadcast_model(model, exchange)
        group = exchange.dup()
    sync = GradientSync(names, parameters, group, type(model).__name__, method, sparse=sparse_layers(model))
    sync.loss.expect_weights(by_forward=weight is not None)
    _follow_session(model, sync, session)
    before: list[Callable[..., object]] = []
    """What is done before each forward pass."""
    after_training = None
    if exchange is not None:
        obstacle = "it was replicated before" if is_again else _obstacle(model, method, session.axes)
        share_parameters(model, sync, exchange, session, wanted=one_copy_per_host, obstacle=obstacle)
        synchronise_batchnorm(model, sync, exchange, only_torchs=not sync_batchnorm)
        if sync_batchnorm:
            watch_copies(session)
        else:
            warn_of_own_statistics(model, "; replicate(model, sync_batchnorm=True) makes it exact")
        buffers = BufferSync(model, exchange, DivergedBuffers(model, exchange, type(model).__name__))
        before.append(buffers.before_training)
        after_training = buffers.after_forward
    if group is not None:
        split = GraphSplit(group.channel_bytes(parameters[0].device))
        model.register_forward_hook(OwnHook(split.end), always_call=True)
        statistics = _shared_statistics(model)
        guard = StateGuard(type(model).__name__, named, statistics, group, session, reads_values=not is_placed(model))
        sync.loss.guard_by(guard)
        sync.report_forwards_to(guard.note_forward)
        before += [split.begin, ModuleHooks(model).before_forward, sync.before_forward]
    model.register_forward_pre_hook(OwnHook(*before))
    model.register_forward_hook(SyncAfterForward(sync, weight, after_training), with_kwargs=True)
    draw_as_one_rank(model, session, exchange, randomness)
    leave_out_of_copies(model)
    return model


def _follow_session(model: nn.Module, sync: GradientSync, session: Session) -> None:
    """Have the session know a model and its losses, and the model know the session's device."""
    subscribe(sync.loss, session)
    register(model, sync)
    session.preemption.unless(WeakMethod(sync.is_mid_step))
    check_device_of_inputs(model, session.world.device, "replicate")


def _undo(model: object, session: Session) -> bool:
    """Undo an earlier call for a model whose parameters have changed since; return whether there is one.

    Called by: every rank.
    """
    sync = strategy_of(model) if isinstance(model, nn.Module) else None
    if not isinstance(model, nn.Module) or not isinstance(sync, GradientSync) or sync.strategy != "replicate":
        return False
    is_divided = is_placed(model) or any(own_part(parameter) is not parameter for parameter in model.parameters())
    if is_divided or sync.followed.are_those_of(model):
        return False
    stop_sharing(sync.parameters, session)
    sync.stop()
    unsubscribe(sync.loss)
    remove_own_hooks(model)
    undo_batchnorm(model)
    forget_draws_of(model)
    unregister(model)
    return True


def _check_compress(compress: object, method: Method | None, parameters: Sequence[nn.Parameter]) -> None:
    """Raise if ``compress`` would make copies of one parameter different."""
    if isinstance(method, Int8 | TopK) and any(own_part(p) is not p for p in parameters):
        raise ConfigurationError(
            f"The layers that tensor_parallel() copies would diverge with compress={compress!r}.",
            evidence="the compressed value of a gradient depends on its neighbours, which differ between ranks "
            "along tp",
            do='pass compress="powersgd", "bf16" or "fp16"',
        )


def _check_trainable(named: Mapping[str, nn.Parameter]) -> None:
    """Raise unless parameters have values, and some need gradients."""
    meta = next((name for name, p in named.items() if p.is_meta), None)
    if meta is not None:
        raise ConfigurationError(
            f"{meta} is on the meta device: the model has no values yet.",
            do="call model.to_empty(device=world.device) and rankwise.load_weights(path, model) first",
        )
    if not any(p.requires_grad for p in named.values()):
        raise ConfigurationError(
            "The model has no parameter that needs a gradient.",
            do="call replicate() on the model that is trained; a frozen model needs none",
        )


def _check_same(model: nn.Module, method: Method | None, randomness: Randomness) -> None:
    """Raise if ranks do not replicate the same model in the same way. Called by: every rank."""
    check_same_model(model)
    words = "pass the same {}= on every rank"
    same_on_all_ranks("compress", str(method), do=words.format("compress"), error=ConfigurationError)
    same_on_all_ranks("randomness", randomness, do=words.format("randomness"), error=ConfigurationError)


def _obstacle(model: nn.Module, method: Method | None, axes: Axes | None) -> str:
    """Return why the ranks of a host cannot share one copy of the parameters; empty if nothing here forbids it."""
    if is_placed(model):
        return "place() moves its parameters"
    if sparse_layers(model):
        return "its gradients are sparse"
    if method is not None:
        return "compress= is for slow networks"
    return "" if axes is None else "rankwise.mesh() arranged the ranks"


def _exchange_of(axes: Axes) -> Exchange | None:
    """Return the exchange of the ranks that hold copies of the same parameters."""
    for axis, strategy in (("dp_shard", "shard"), ("pp", "pipeline")):
        if axes.size(axis) > 1:
            size = axes.size("dp_replicate")
            left = "has none left" if size == 1 else f"would average over {size} of {axes.world_size}"
            raise ConfigurationError(
                f"{current().laid_out_by} laid the ranks out along {axis}, so replicate() {left}.",
                evidence=f"the mesh is {axes}",
                do=f"call rankwise.{strategy}() for this model too: it averages over dp_replicate itself",
            )
    from rankwise.replicate.device_mesh import exchange_along  # noqa: PLC0415 - torch's mesh is only there with axes

    return exchange_along("dp_replicate")


def _shared_statistics(model: nn.Module) -> dict[str, tuple[ref[nn.Module], str]]:
    """Return the module and name of each buffer of layers that take their statistics over all ranks, by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: (ref(module), name)
        for prefix, module in model.named_modules()
        if isinstance(module, SYNCHRONISED)
        for name, _ in module.named_buffers(recurse=False)
    }
