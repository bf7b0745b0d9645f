# SPDX-License-Identifier: Apache-2.0
"""Sharding: each rank keeps a part of every parameter, and ranks gather a block's parameters while it runs.

Works in place, on torch's fully_shard (FSDP2). Holds the public call: which blocks, in which precision, checked on all
ranks before anything changes. sharded_gradients makes the gradients exact.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rankwise.comm.agreement import all_ranks_succeed, same_on_all_ranks
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.log import log
from rankwise.replicate.batchnorm import synchronise_batchnorm, take_torchs_batchnorm, warn_of_own_statistics
from rankwise.replicate.buffers import BufferSync, DivergedBuffers
from rankwise.replicate.device_mesh import axes_for, exchange_along, submesh
from rankwise.replicate.from_meta import FromMeta, check_same_meta
from rankwise.replicate.gradient_hooks import ModuleHooks, check_hooks_kept
from rankwise.replicate.loss.graph import forward_call
from rankwise.replicate.loss.hooks import check_weight_function, subscribe
from rankwise.replicate.no_sync_and_weight import no_sync
from rankwise.replicate.own_hooks import OwnHook
from rankwise.replicate.random_numbers.kernels import install
from rankwise.replicate.random_numbers.model_draws import draw_as_one_rank
from rankwise.replicate.same_model import SameForward, broadcast_tensors, check_same_model
from rankwise.replicate.self_check import check_torch, gradients, loss_fn
from rankwise.replicate.sparse_gradients import check_no_sparse
from rankwise.replicate.split_tensors import use_whole_tensors
from rankwise.replicate.strategy_registry import (
    check_no_optimizer_holds,
    check_split,
    check_unregistered,
    register,
)
from rankwise.shard.block_exchange import exchange_blocks
from rankwise.shard.blocks import Blocks, block_names, grouped, recompute_block
from rankwise.shard.sharded_gradients import ShardSync
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel
from rankwise.torch_private.autograd import in_backward, is_view
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.tensors import tree_leaves, tree_map
from rankwise.world import torch_versions
from rankwise.world.device.kinds import is_accelerator
from rankwise.world.mesh import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import Any

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.backends.shared_memory import SharedMemory
    from rankwise.comm.session import Session
    from rankwise.replicate.self_check import Bench, Compared
    from rankwise.world.mesh import Axes


M = TypeVar("M", bound=nn.Module)

_WEIGHTS = ("weights of sharded models",)
_WITHIN_GROUP = tuple(name for name in NAMES if name != "worker_groups")
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    model: M,
    *,
    blocks: Blocks = None,
    mixed_precision: str | MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    recompute: bool | Blocks = False,
    reshard_after_forward: bool = True,
    weight: Callable[..., float | torch.Tensor] | None = None,
) -> M:
    """Train ``model`` with its parameters, gradients and optimizer state spread over the ranks, in place.

    Called by: every rank, with the same model, before the optimizer is built.

    Every rank starts from rank zero's parameters and buffers and keeps its part of each. A block's parameters are
    gathered when it runs, and freed afterwards; its gradients are reduced while backward continues. Each
    ``backward()`` returns with this rank's part of the exact mean over all samples of all ranks, also when ranks
    have unequal numbers of samples, or none. A parameter that no rank used keeps ``grad=None``.

    The ranks lie along ``dp_shard``; where :func:`rankwise.mesh` has ``dp_replicate`` too, each group along
    ``dp_shard`` holds a whole copy. Parameters become :class:`torch.distributed.tensor.DTensor`, so that an optimizer
    built before holds tensors that are no longer trained. The model keeps its ``state_dict`` keys and is still an
    instance of its class, though torch renames the class: ``FSDPNet``, a subclass of ``Net``. torch can neither
    deepcopy nor pickle it: save it with :func:`rankwise.save`.

    What a loss is a mean or a sum over is read from its graph, as for :func:`rankwise.replicate`. Every rank runs the
    same blocks in the same order, and backward equally often, also without samples; within a block ranks may use
    different parameters. A model on the meta device is sharded without ever being whole: it is returned filled with
    NaN, and must be loaded with :func:`rankwise.load` before it is called.

    Args:
        model: on its device already, or on the meta device.
        blocks: modules that are gathered together: names, with ``*`` for any number; classes; a minimum size of
            each block in bytes, or as text (``"100MiB"``); by default the repeated layers. Parameters in no block are
            gathered with the whole model.
        mixed_precision: ``"bf16"`` or ``"fp16"`` to compute in it and reduce gradients in float32; the model's output
            keeps the parameters' dtype. Or torch's policy. fp16 needs a ``torch.amp.GradScaler``.
        cpu_offload: keep parameters, gradients and optimizer state in the memory of the CPU.
        recompute: whether blocks free their activations and compute them again in backward; or the modules that do,
            as for ``blocks``.
        reshard_after_forward: whether a block frees its parameters between forward and backward.
        weight: called with the arguments of each forward call; returns what the loss is a mean over:
            the number of samples or tokens of this rank. At least zero. The loss is not read then.

    Returns:
        ``model`` itself.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.
        ConfigurationError: the model is sharded or replicated already, has nothing to train, has no such blocks, or
            the mesh has axes that sharding does not use.
        TorchTooOld: this version of torch cannot reduce parameters that only some ranks used.
        WrongGradients: this version of torch is not a tested one, and a small model trained wrongly on it.

    Source: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP" (VLDB 2023); the exact mean is
        sum_r w_r g_r / sum_r w_r.
    """
    session = current()
    for call in ("set_reduce_scatter_unused_params", "reset_iter_state"):
        if not hasattr(FSDPModule, call):
            raise torch_versions.lacks(f"FSDPModule.{call}()", (2, 13), "rankwise.shard()")
    axes = axes_for("shard", "dp_shard")
    with all_ranks_succeed("rankwise.shard()"):
        _check_axes(axes)
        check_unregistered(model, "shard")
        check_split(model, axes, "shard")
        check_weight_function(weight, "shard")
        _check_flags(cpu_offload=cpu_offload, reshard_after_forward=reshard_after_forward)
        _check_trainable(model)
        policy = _precision(model, mixed_precision)
        names = block_names(model, blocks, "blocks")
        recomputed = _recomputed(model, names, recompute)
        groups = grouped(model, names)
        _check_dtypes(model, groups)
    check_torch("shard", _trial)
    if session.exchange is not None:
        same_on_all_ranks(
            "the configuration of shard()",
            {
                "blocks": groups,
                "recompute": recomputed,
                "mixed_precision": str(policy),
                "cpu_offload": cpu_offload,
                "reshard_after_forward": reshard_after_forward,
            },
            do="pass the same on every rank",
            error=ConfigurationError,
        )
        check_same_model(model)
        check_same_meta(model, "shard")
        _start_equal(model, session.exchange)
    before = [ref(parameter) for parameter in model.parameters()]
    take_torchs_batchnorm(model)  # before torch makes blocks subclasses of their own
    name = type(model).__name__  # before torch renames it
    _split(
        model,
        groups,
        policy,
        axes,
        offloads=_offloads(cpu_offload, session.world.device),
        reshards=reshard_after_forward,
    )
    for block in recomputed:
        recompute_block(model.get_submodule(block))
    shared = exchange_blocks(model, name, session, policy)
    _follow(model, name, _exchange_of_weights(session, axes, shared), weight, before)
    log(f"shard: {name} in {len(groups)} blocks over {axes}")
    return model


def _follow(
    model: nn.Module,
    name: str,
    own: Exchange | None,
    weight: Callable[..., float | torch.Tensor] | None,
    before: list[ref[nn.Parameter]],
) -> None:
    """Follow every forward and backward of a sharded model, which had the parameters ``before``.

    ``own`` is for its weights.
    """
    session = current()
    was_meta = FromMeta("shard", model, session.world.device)
    along = exchange_along("dp_shard")
    sync = ShardSync(model, name, own, session)
    sync.loss.expect_weights(by_forward=weight is not None)
    subscribe(sync.loss, session)
    install(session)
    register(model, ref(sync))
    session.preemption.unless(WeakMethod(sync.is_mid_step))
    within_group = None if session.exchange is None else exchange_along(*_WITHIN_GROUP)
    use_whole_tensors(session, within_group)
    buffers = None if within_group is None else _follow_buffers(model, name, sync, within_group)
    hooks = _ForwardHooks(sync, SameForward(along, f"sharded {name}"), weight, buffers, before, was_meta)
    # Before torch's own, which gathers the parameters: an interrupted backward is cleared away first.
    model.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
    model.register_forward_hook(hooks.after)
    draw_as_one_rank(model, session, within_group, "counter", needs_loader=True)


def _follow_buffers(model: nn.Module, name: str, sync: ShardSync, exchange: Exchange) -> BufferSync:
    """Keep buffers equal, have SyncBatchNorm cover all samples, and follow hooks of modules. Called by: every rank."""
    warn_of_own_statistics(
        model,
        "; call model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard(), which makes it exact",
    )
    # Ranks along tp have the same samples.
    data = exchange_along("dp_replicate", "dp_shard")
    if data is not None:
        synchronise_batchnorm(model, sync, data, only_torchs=True)
        model.register_forward_pre_hook(OwnHook(ModuleHooks(model).before_forward))
    return BufferSync(model, exchange, DivergedBuffers(model, exchange, name))


@dataclass(frozen=True, eq=False)
class _ForwardHooks:
    """What runs around each forward of a sharded model."""

    sync: ShardSync
    same: SameForward
    weight: Callable[..., float | torch.Tensor] | None
    buffers: BufferSync | None
    replaced: list[ref[nn.Parameter]]
    """Parameters from before: emptied once no optimizer holds them."""
    was_meta: FromMeta

    @uncompiled
    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notify the other ranks of the call. Called by torch."""
        if in_backward():
            return
        self.same.wait_for_all(model)
        self.sync.forget_broken()
        self.was_meta.check(model)
        if not torch.is_grad_enabled():
            return
        if self.replaced:
            check_no_optimizer_holds(self.replaced, "shard")
            self.replaced.clear()
        if self.buffers is not None and model.training:
            self.buffers.before_forward((args, kwargs))
        self.sync.before_forward(forward_call(self.sync.loss.number, self.weight, args, kwargs))

    @uncompiled
    def after(self, model: nn.Module, _: object, output: object) -> None:
        """Follow the output of the call, where backward comes from. Called by torch."""
        if torch.is_grad_enabled() and not in_backward():
            if self.buffers is not None and model.training:
                self.buffers.after_forward()
            self.sync.after_forward(output)


def _check_axes(axes: Axes) -> None:
    tp = f", tp={axes.tp}" if axes.tp > 1 else ""
    worker_groups = f"worker_groups={axes.worker_groups}, " if axes.worker_groups > 1 else ""
    if axes.pp > 1:
        raise ConfigurationError(
            f"shard() does not support pp={axes.pp}.",
            evidence=f"the mesh is {axes}",
            do=f"call rankwise.mesh({worker_groups}dp_shard={axes.data_ranks_per_group * axes.pp}{tp}) and shard(), or "
            f"rankwise.mesh({worker_groups}pp={axes.pp}, dp_replicate={axes.data_ranks_per_group}{tp}) and pipeline()",
        )
    if axes.dp_shard == 1 and axes.dp_replicate > 1:
        raise ConfigurationError(
            "shard() needs dp_shard of at least 2, got 1.",
            evidence=f"the mesh is {axes}",
            do=f"call rankwise.replicate(model), or rankwise.mesh({worker_groups}dp_shard={axes.dp_replicate}{tp})",
        )


def _check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "The model has no parameter that needs a gradient.",
            do="call shard() on the model that is trained; a frozen model has no gradients",
        )
    check_hooks_kept(model.named_parameters(), "shard")
    check_no_sparse(model, "shard")


def _check_flags(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"shard() was given {name}={value!r}.", do=f"pass {name}=True or {name}=False")


def _precision(model: nn.Module, wanted: str | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if wanted is None:
        return MixedPrecisionPolicy()
    if isinstance(wanted, MixedPrecisionPolicy):
        return wanted
    if not isinstance(wanted, str) or wanted not in _PRECISIONS:
        raise ConfigurationError(
            f"Unknown mixed_precision={wanted!r} of shard().",
            do=f"use one of {', '.join(map(repr, _PRECISIONS))}, or a torch.distributed.fsdp.MixedPrecisionPolicy",
        )
    output = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return MixedPrecisionPolicy(param_dtype=_PRECISIONS[wanted], reduce_dtype=torch.float32, output_dtype=output)


def _recomputed(model: nn.Module, names: list[str], wanted: bool | Blocks) -> list[str]:  # noqa: FBT001 - as given
    """Return the names of the modules that compute their activations again."""
    if wanted is False:
        return []
    if wanted is None:
        raise ConfigurationError("recompute must not be None.", do="pass True, False, or names or classes of modules")
    if wanted is not True:
        return block_names(model, wanted, "recompute")
    # A single layer keeps little but its input, which is kept anyway.
    composed = [name for name in names if list(model.get_submodule(name).children())]
    if not composed:
        raise ConfigurationError(
            "recompute=True found nothing to recompute: every block of the model is a single layer.",
            do='name the modules to recompute: recompute=["layers.*"]',
        )
    return composed


def _check_dtypes(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Raise unless the trained parameters that are gathered together have one dtype: they are reduced as one tensor."""
    seen: set[int] = set()
    # Inner blocks take their parameters first; those in no block belong to the model.
    for group in [*groups, [""]]:
        dtypes: dict[torch.dtype, str] = {}
        for name in group:
            for inner, parameter in model.get_submodule(name).named_parameters(prefix=name):
                if id(parameter) not in seen and parameter.requires_grad:
                    seen.add(id(parameter))
                    dtypes.setdefault(parameter.dtype, inner)
        if len(dtypes) > 1:
            raise ConfigurationError(
                f"The block {' with '.join(group) or type(model).__name__} holds parameters of {len(dtypes)} dtypes.",
                evidence="\n".join(f"{where} is {dtype}" for dtype, where in dtypes.items()),
                do="convert the model to one dtype (model.float()), and use mixed_precision= to compute in another",
            )


def _start_equal(model: nn.Module, exchange: Exchange) -> None:
    """Give every rank the parameters and buffers of rank zero, or its data rank zero's parts of split layers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    plain = [t for t in tensors if not isinstance(t, DTensor)]
    parts = [t.to_local() for t in tensors if isinstance(t, DTensor)]
    with torch.no_grad():
        broadcast_tensors(plain, exchange, what="parameters of rank 0")
        along = exchange_along("dp_replicate", "dp_shard")
        if parts and along is not None:
            broadcast_tensors(parts, along, what="parts of parameters of data rank 0")


def _exchange_of_weights(session: Session, axes: Axes, shared: SharedMemory | None) -> Exchange | None:
    """Return an exchange of the ranks of this worker group, for the weights of sharded models. Called by: every rank.

    Args:
        session: the open one.
        axes: of its mesh.
        shared: that of the ranks along ``dp_shard``, if the blocks pass through its memory.
    """
    if session.exchange is None:
        return None
    if shared is not None and axes.dp_replicate == axes.tp == 1:
        return shared
    # Ranks also wait in collectives of torch, in which they would not answer in shared memory.
    known = session.parts.get(_WEIGHTS)
    if known is not None:
        return known
    group = dist.new_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"torch.distributed.new_group() returned {group!r} for a group of all ranks")
    exchange, detector = session.exchange, session.exchange.detector
    own = TorchGroup(detector, exchange.rank, exchange.world_size, group, detector.recorder.new_exchange_id())
    if axes.worker_groups > 1:
        own = own.split(axes.groups_along(*_WITHIN_GROUP))
    session.parts[_WEIGHTS] = own
    return own


def _offloads(wanted: bool, device: str) -> OffloadPolicy:  # noqa: FBT001 - the caller's own argument
    if not wanted:
        return OffloadPolicy()
    if is_accelerator(device):
        return CPUOffloadPolicy()
    log("shard: the parameters are already in CPU memory; cpu_offload has no effect")
    return OffloadPolicy()


def _split(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    policy: MixedPrecisionPolicy,
    axes: Axes,
    *,
    offloads: OffloadPolicy,
    reshards: bool,
) -> None:
    mesh = submesh("dp_replicate", "dp_shard") if axes.dp_replicate > 1 else submesh("dp_shard")
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # torch shards no others
    inner = MixedPrecisionPolicy(
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
    )
    for name in {name for group in groups for name in group} | {""}:
        model.get_submodule(name).register_forward_hook(_without_views)
    for group in groups:
        for block in fully_shard(
            [model.get_submodule(name) for name in group],
            mesh=mesh,
            mp_policy=inner,
            offload_policy=offloads,
            reshard_after_forward=reshards,
        ):
            block.set_reduce_scatter_unused_params(True)
    # None: torch keeps the outermost parameters between forward and backward, which needs them first.
    root = fully_shard(
        model, mesh=mesh, mp_policy=policy, offload_policy=offloads, reshard_after_forward=None if reshards else False
    )
    root.set_reduce_scatter_unused_params(True)


def _without_views(_: nn.Module, __: object, output: object) -> object:
    """Return an output that may be changed in place, which on a view of another tensor would lose torch's hooks."""
    if not any(_is_followed_view(leaf) for leaf in tree_leaves(output)):
        return None
    return tree_map(lambda leaf: leaf.clone() if _is_followed_view(leaf) else leaf, output)


def _is_followed_view(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and is_view(value)


_TRIAL_STEPS = ((0, 1), (2,))
"""The batches of each step; all but a step's last are accumulated."""


def _trial(bench: Bench) -> Generator[Compared]:
    """Train a small sharded model, and yield its gradients: unequal shares, an accumulation, a step without zero_grad.

    Called by: every rank.
    """
    model, plain = bench.net(2), bench.net(2)
    if bench.tp > 1:
        tensor_parallel(model)
    shard(model)
    for step in _TRIAL_STEPS:
        xs, ys = [], []
        for number in step:
            x, y, first, last = bench.batch(number)
            xs.append(x)
            ys.append(y)
            with nullcontext() if number == step[-1] else no_sync(model):
                loss_fn(model(x[first:last]), y[first:last]).backward()
        loss_fn(plain(torch.cat(xs)), torch.cat(ys)).backward()
    yield from gradients(model, plain)
