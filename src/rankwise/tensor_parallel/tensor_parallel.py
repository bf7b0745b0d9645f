# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the ranks along ``tp`` share each large layer, and see the same samples.

Works in place, with torch's parallelize_module. Holds the public call, and how a chosen plan is applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rankwise.comm.agreement import all_ranks_succeed, same_on_all_ranks
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.log import log
from rankwise.replicate.batchnorm import take_torchs_batchnorm
from rankwise.replicate.blocks import has_forward, is_plain_container
from rankwise.replicate.device_mesh import axes_for, exchange_along, submesh
from rankwise.replicate.from_meta import FromMeta, check_same_meta
from rankwise.replicate.gradient_hooks import check_hooks_kept
from rankwise.replicate.loss.graph import outputs_of
from rankwise.replicate.random_numbers.model_draws import draw_as_one_rank
from rankwise.replicate.random_numbers.split_tracer import follow_layer
from rankwise.replicate.same_model import SameForward, broadcast_tensors, check_same_model, digest_of_tensors
from rankwise.replicate.self_check import check_torch, gradients, loss_fn
from rankwise.replicate.sparse_gradients import check_no_sparse
from rankwise.replicate.split_tensors import refuse_second_derivatives, use_whole_tensors
from rankwise.replicate.strategy_registry import check_no_optimizer_holds, check_unregistered, is_registered
from rankwise.tensor_parallel.plan import Style, TensorPlan, check_tied, find_plan, given_plan, tied
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.modules import own_parameters
from rankwise.torch_private.tensors import tree_leaves
from rankwise.world import torch_versions
from rankwise.world.device.accelerator import random_state
from rankwise.world.device.kinds import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.replicate.self_check import Bench, Compared

CHECKED_FORWARDS = 3
"""So many of the first forwards in training, and in evaluation, compare values."""


class ForwardChecks:
    """The checks of one model, around each forward."""

    def __init__(
        self,
        name: str,
        before: Sequence[ref[nn.Parameter]],
        exchange: Exchange | None,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self._before = list(before)
        self._exchange = exchange
        self._same = SameForward(exchange, f"tensor parallel {name}")
        self._prepare = prepare
        self._num_left = {True: CHECKED_FORWARDS, False: CHECKED_FORWARDS}
        self._differing: list[tuple[int, list[int]]] = []
        """Random states that differ between ranks: number, and checksums by rank."""
        self._own: list[int] = []
        self._is_averaged = False

    def follow(self, model: nn.Module) -> None:
        """Have every forward of ``model`` checked."""
        model.register_forward_pre_hook(_SplitModelHook(self._before_forward), with_kwargs=True, prepend=True)
        model.register_forward_hook(_SplitModelHook(self._after_forward))

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Meet the other ranks. Called by: every rank along ``tp``."""
        self._differing = []
        if in_backward():
            return
        self._same.wait_for_all(model, (args, kwargs))
        self._prepare(model)
        if self._before:
            check_no_optimizer_holds(self._before, "tensor_parallel")
            self._before.clear()
        if not self._is_averaged and model.training and torch.is_grad_enabled():
            _check_averaged(model)
            self._is_averaged = True
        if self._exchange is not None and self._num_left[model.training]:
            self._num_left[model.training] -= 1
            self._compare((args, kwargs), self._exchange)

    def _after_forward(self, _: nn.Module, __: object, output: object) -> None:
        """Raise if the forward drew random numbers that differ between ranks."""
        if not in_backward():
            for reached in outputs_of(output):
                reached.register_hook(lambda _: refuse_second_derivatives("tensor_parallel"))
        differing, self._differing = self._differing, []
        if not differing:
            return
        now = _random_states()
        for number, states in differing:
            if now[number] != self._own[number]:
                raise ConfigurationError(
                    "Ranks that share layers drew different random numbers, for example for dropout masks.",
                    where=f"reported on {current().world}",
                    evidence="checksums of the random states before, by rank along tp:\n"
                    + fold_values(dict(enumerate(states))),
                    do="call torch.manual_seed() with the same seed on ranks that differ along tp only",
                )

    def _compare(self, values: object, exchange: Exchange) -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self._own = _random_states()
        own = torch.tensor([digest_of_tensors(tensors), *self._own])
        inputs, *states = exchange.all_gather(own, what="inputs of a tensor parallel model").unbind(1)
        if len(set(inputs.tolist())) > 1:
            raise ConfigurationError(
                "Ranks that share layers received different inputs.",
                where=f"reported on {current().world}",
                evidence="checksums of the inputs, by rank along tp:\n" + fold_values(dict(enumerate(inputs.tolist()))),
                do="take batches from rankwise.DataLoader, which yields the same to all ranks along tp; use the same "
                "seed for random inputs",
            )
        # Different states are an error only if forward draws numbers, which shows after it has run.
        self._differing = [(number, found) for number, one in enumerate(states) if len(set(found := one.tolist())) > 1]


class _SplitModelHook:
    """A hook of a split model. A copy of the model is split too, and keeps the hook; pickling one is refused."""

    def __init__(self, check: Callable[..., None]) -> None:
        self._check = check

    @uncompiled
    def __call__(self, *args: object) -> None:
        self._check(*args)

    def __deepcopy__(self, memo: object) -> _SplitModelHook:
        return type(self)(self._check)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigurationError(
            "A model that is split by tensor_parallel() cannot be pickled: its layers are distributed over ranks.",
            do="save it with rankwise.save() or rankwise.save_weights()",
        )


def _random_states() -> list[int]:
    """Return checksums of the states of the CPU's random generator, and of this rank's GPU's."""
    device = current().world.device
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(random_state(device))
    return [digest_of_tensors([state]) for state in states]


def _check_averaged(model: nn.Module) -> None:
    """Raise if copies of the model see different samples, and no strategy averages their gradients."""
    axes = current().axes
    if axes is not None and axes.data_world_size > 1 and not is_registered(model):
        strategy = "shard" if axes.dp_shard > 1 else "replicate"
        raise ConfigurationError(
            "This model is split along tp, but the gradients of its copies are not averaged.",
            evidence=f"the mesh is {axes}",
            do=f"call rankwise.{strategy}(model) after tensor_parallel(), before creating the optimizer",
        )


M = TypeVar("M", bound=nn.Module)

_plans: WeakKeyDictionary[nn.Module, TensorPlan] = WeakKeyDictionary()


def tensor_parallel(model: M, plan: str | Mapping[str, Style] = "auto") -> M:
    """Split the layers of ``model`` over the ranks along ``tp``, in place.

    Called by: every rank, with the same model, before :func:`rankwise.replicate` or :func:`rankwise.shard` and before
    the optimizer is built.

    Every rank starts from rank zero's parameters. The model is called as before and returns whole outputs on every
    rank, so the loss does not change. Ranks along ``tp`` must receive the same samples, as from
    :class:`rankwise.DataLoader`, and draw the same random numbers (use one seed). Parameters become
    :class:`torch.distributed.tensor.DTensor`: parts of split layers, copies of the others, so that optimizers and
    ``clip_grad_norm_`` treat all of them the same; their gradients are complete. ``state_dict`` has the names and
    shapes of one device.

    ``"auto"`` calls each module that has several linear layers once, on a small input, and finds those that compute the
    input of another one: MLPs, attention with separate projections; and embeddings with an output layer of as many
    words. Layers are split if a trial in float64 gives the same outputs and gradients in parts; the log names what was
    left whole.

    Args:
        model: already on its device, or on the meta device.
        plan: ``"auto"``, or styles by name of the module, with ``*`` for any part of a name:
            ``{"layers.*.up": "column", "layers.*.down": "row", "embed": "vocab", "head": "head"}``. A style is one of
            these words, ``"replicate"``, or one of ``torch.distributed.tensor.parallel``.

    Returns:
        ``model`` itself.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.
        ConfigurationError: the plan does not fit the model, sizes cannot be shared evenly, nothing to split was found,
            or the model went through another strategy before.
        TorchTooOld: this version of torch splits layers in another way.
        WrongGradients: this version of torch is not a tested one, and a small model trained wrongly on it.

    Source: torch.distributed.tensor.parallel.parallelize_module; Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    session = current()
    torch_versions.require((2, 11), "rankwise.tensor_parallel()")
    axes = axes_for("tensor_parallel", "tp")
    tp = axes.tp
    with all_ranks_succeed("rankwise.tensor_parallel()"):
        _check_first(model)
        chosen = _choose(model, plan, tp)
    check_torch("tensor_parallel", _trial)
    if session.exchange is not None:
        same_on_all_ranks(
            "the plan of tensor_parallel()",
            {name: style if isinstance(style, str) else type(style).__name__ for name, style in chosen.styles.items()},
            do="pass the same plan on every rank",
            error=ConfigurationError,
        )
        check_same_model(model)
        check_same_meta(model, "tensor_parallel")
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        with torch.no_grad():
            broadcast_tensors(tensors, session.exchange, what="parameters of rank 0")
    before = [ref(parameter) for parameter in model.parameters()]
    take_torchs_batchnorm(model)  # ranks along tp have the same samples
    _split(model, chosen, submesh("tp"))
    _plans[model] = chosen
    # shard() divides parameters further, and allocates their memory itself.
    was_meta = FromMeta("tensor_parallel", model, session.world.device if axes.dp_shard == 1 else None)
    exchange = exchange_along("tp")
    ForwardChecks(type(model).__name__, before, exchange, was_meta.check).follow(model)
    use_whole_tensors(session, exchange)
    draw_as_one_rank(model, session, None, "counter")
    log(f"tensor_parallel: {len(chosen.styles)} layers of {type(model).__name__} over {tp} ranks" + _left(chosen))
    return model


def plan_of(model: nn.Module) -> TensorPlan:
    """Return how ``model`` was split, to be printed or edited.

    Raises:
        ConfigurationError: it did not go through :func:`rankwise.tensor_parallel`.
    """
    plan = _plans.get(model)
    if plan is None:
        raise ConfigurationError(
            f"plan_of() was called with a {type(model).__name__} that is not split.",
            do="pass the model that rankwise.tensor_parallel() was called with",
        )
    return plan


def _left(plan: TensorPlan) -> str:
    if not plan.whole:
        return ""
    name, why = next(iter(plan.whole.items()))
    more = f", and {len(plan.whole) - 1} more" if len(plan.whole) > 1 else ""
    return f"; whole: {name or 'the model itself'} ({why}){more}"


def _check_first(model: nn.Module) -> None:
    named = check_unregistered(model, "tensor_parallel")
    check_hooks_kept(named.items(), "tensor_parallel")
    check_no_sparse(model, "tensor_parallel")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigurationError(
            "The model has parameters that are already distributed over ranks.",
            do="call tensor_parallel() once, and before shard()",
        )


def _choose(model: nn.Module, plan: object, tp: int) -> TensorPlan:
    if plan == "auto":
        chosen = find_plan(model, tp)
    elif isinstance(plan, dict):
        chosen = given_plan(model, plan, tp)  # pyright: ignore[reportUnknownArgumentType] - checked there
    else:
        raise ConfigurationError(
            f"Unknown plan {plan!r} of tensor_parallel().",
            do='pass plan="auto", or a dict of styles by name: {"layers.*.up": "column", "layers.*.down": "row"}',
        )
    check_tied(model, chosen)
    return chosen


def _split(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    ties = tied(model)
    styles = {name: _torch_style(style) if isinstance(style, str) else style for name, style in plan.styles.items()}
    # Every rank has the same values already, and takes its part from its own.
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))
    for name, style in plan.styles.items():
        layer = model.get_submodule(name)
        if isinstance(style, str) and style != "column":
            layer.register_forward_hook(_plain_output)
        layer.register_forward_hook(follow_layer)
        if isinstance(layer, nn.Linear):
            _EmptyBatches(layer)
    for name, counts in plan.heads.items():
        for attribute, count in counts.items():
            setattr(model.get_submodule(name), attribute, count)
    _copy_rest(model, mesh)
    _distribute_copies(model, {model.get_submodule(name) for name in plan.styles})


def _copy_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter that is not split a replicated DTensor: optimizers take only one kind of parameter."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not isinstance(parameter, DTensor):
                if parameter not in copies:
                    whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                    copies[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                setattr(module, name, copies[parameter])


def _torch_style(style: str) -> ParallelStyle:
    if style == "column":
        return ColwiseParallel()
    if style == "row":
        return RowwiseParallel(use_local_output=False)
    if style == "head":
        return ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=False)


def _plain_output(_: nn.Module, __: object, output: object) -> object:
    return _Local.apply(output) if isinstance(output, DTensor) else output


class _Local(torch.autograd.Function):
    """The whole output as a plain tensor. Unlike ``DTensor.to_local`` not a view, so ``x += y`` works on it."""

    @staticmethod
    def forward(ctx: Any, output: DTensor) -> torch.Tensor:
        ctx.layout = (output.device_mesh, output.placements)
        local = output.to_local()
        # torch's stand-in for a result that is under way: as a plain tensor, the next operations can be followed.
        wait = getattr(local, "wait", None)
        return (local if wait is None else wait()).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient, which is the same on every rank."""
        refuse_second_derivatives("tensor_parallel")
        mesh, placements = ctx.layout
        return DTensor.from_local(gradient, mesh, placements, run_check=False)


def _distribute_copies(module: nn.Module, split: set[nn.Module]) -> None:
    """Have modules that are whole on every rank compute with plain tensors, as they were written to."""
    if module in split:
        return
    if split.isdisjoint(module.modules()) and has_forward(module) and not is_plain_container(module):
        _stand_in(module, list(module.modules()))
        return
    if has_forward(module):
        # A ParameterList is read by the module that contains it.
        _stand_in(module, [module, *(one for one in module.children() if not has_forward(one))])
    for child in module.children():
        _distribute_copies(child, split)


def _stand_in(module: nn.Module, owners: list[nn.Module]) -> None:
    places = [(owner, name) for owner in owners for name, _ in owner.named_parameters(recurse=False)]
    if places:
        module.forward = _Plain(module, places)


class _EmptyBatches:
    """Gives a split Linear an empty batch as [0, features]: torch cannot split one of more dims."""

    def __init__(self, linear: nn.Module) -> None:
        self._shape: torch.Size | None = None
        linear.register_forward_pre_hook(self._before, prepend=True)
        linear.register_forward_hook(self._after)

    def _before(self, _: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...] | None:
        x = inputs[0] if inputs else None
        self._shape = None
        if isinstance(x, torch.Tensor) and x.ndim > 2 and not x.numel():  # noqa: PLR2004 - rows and features
            self._shape = x.shape
            return (x.reshape(0, x.shape[-1]), *inputs[1:])
        return None

    def _after(self, _: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor | None:
        shape, self._shape = self._shape, None
        return None if shape is None else output.reshape(*shape[:-1], output.shape[-1])


class _Plain:
    """Replaces the ``forward`` of a module whose parameters are copies: it computes with plain tensors."""

    def __init__(self, module: nn.Module, places: list[tuple[nn.Module, str]]) -> None:
        self._forward = module.forward
        self._places = places

    def __call__(self, *args: object, **kwargs: object) -> Any:
        for owner, name in self._places:
            parameter = own_parameters(owner).get(name)
            # Parameters that shard() has divided are not whole, and stay.
            if (
                isinstance(parameter, DTensor)
                and parameter.device_mesh.ndim == 1
                and parameter.placements[0].is_replicate()
            ):
                # Python looks here first, and the parameter keeps its place among the others.
                owner.__dict__[name] = parameter.to_local()
        try:
            return self._forward(*args, **kwargs)
        finally:
            for owner, name in self._places:
                owner.__dict__.pop(name, None)


def _trial(bench: Bench) -> Generator[Compared]:
    """Train a small split model on two batches of different sizes, and yield its gradients. Called by: every rank."""
    model, plain = tensor_parallel(bench.net(2)), bench.net(2)
    model.eval()  # In training mode ranks with samples of their own would have to be averaged over.
    for number in range(2):
        # The ranks along tp see the same samples.
        x, y, first, last = bench.batch(number)
        loss_fn(model(x[first:last]), y[first:last]).backward()
        loss_fn(plain(x[first:last]), y[first:last]).backward()
    yield from gradients(model, plain)
