# SPDX-License-Identifier: Apache-2.0
"""A model in stages on different ranks, through which a batch goes in micro-batches.

Works in place: the model keeps its class, its modules, its keys and its tied weights; tensors of other ranks are on the
meta device. Plan cuts the model, and step_api runs a step. In order: the public call; the tensors of a model on one
rank; first steps, which find mistakes that would give wrong numbers and no error.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import nn

from rankwise.comm.agreement import all_ranks_succeed, same_on_all_ranks
from rankwise.comm.collectives import gather_json
from rankwise.comm.same_state import numbers_of_all
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.log import log
from rankwise.pipeline.executor import first_part
from rankwise.pipeline.plan import StagedModel, plan_of
from rankwise.pipeline.schedule import schedule_of
from rankwise.pipeline.stage_gradients import cover_all_stages
from rankwise.pipeline.step_api import Pipeline
from rankwise.pipeline.traced import tensor_places
from rankwise.replicate.batchnorm import take_torchs_batchnorm
from rankwise.replicate.device_mesh import axes_for, exchange_along
from rankwise.replicate.from_meta import fill, is_as_filled, unfilled
from rankwise.replicate.gradient_hooks import check_hooks_kept
from rankwise.replicate.same_model import CHECKED_STEPS, broadcast_tensors, check_same_model, digest_of_tensors
from rankwise.replicate.self_check import check_torch, gradients
from rankwise.replicate.self_check import loss_fn as trial_loss
from rankwise.replicate.strategy_registry import check_no_optimizer_holds, check_unregistered, register
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part, placed_like
from rankwise.torch_private.tensors import tree_map_only
from rankwise.world import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.pipeline.plan import StagePlan
    from rankwise.pipeline.schedule import PipelineSchedule
    from rankwise.pipeline.stages import Program
    from rankwise.replicate.self_check import Bench, Compared
    from rankwise.world.mesh import Axes


def pipeline(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    example: object,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    split: str | Sequence[str] | None = None,
    weight: Callable[[Any], float | torch.Tensor] | None = None,
) -> Pipeline:
    """Put stages of ``model`` on different ranks, in place; return the step that trains it.

    Called by: every rank, with the same model, before the optimizer is built.

    ``loss = step(x, target)`` replaces ``loss = loss_fn(model(x), target); loss.backward()``: afterwards the parameters
    of each rank's stages have the gradients one device would have, for every batch size and number of micro-batches.
    Every rank starts from rank zero's parameters and keeps those of its stages; the others become meta tensors,
    without memory, so that names, order and ``state_dict`` keys stay, and an optimizer built afterwards numbers
    parameters the same on every rank. The ranks of a pipeline lie along ``pp``; if :func:`rankwise.mesh` has
    ``dp_replicate`` too, gradients are those of all pipelines' batches together.

    The model is cut between blocks: layers, and repeated modules (a residual block, a decoder layer) as a whole.
    Between blocks ``forward`` may do anything whose shapes follow from the shapes of the inputs; values that skip
    stages pass through those in between, and values of the inputs alone are computed by every stage.

    BatchNorm in training mode takes its statistics per micro-batch, so the result depends on their number. Dropout and
    noise in the stages are those of one rank under :func:`rankwise.replicate`. This rank has the gradients of its own
    stages only: clip them with :meth:`Pipeline.clip_grad_norm_` or torch's function. Hooks on ``model`` itself do not
    run; those on its blocks do.

    Args:
        model: whole on every rank, already on its device; or on the CPU or the meta device, from which each rank moves
            its own stages to its device. Tensors from meta are filled with NaN, and must be loaded with
            :func:`rankwise.load_weights` or a checkpoint before the first step. Change layers and dtype before.
        loss_fn: called with the model's output and the target of a micro-batch; returns a mean or a sum over its
            samples, its tokens or the elements of a mask, as its graph shows. Other losses are warned about.
        example: a batch as passed to ``model``: a tensor, a tuple of arguments or a dict of them by name. Of any size;
            the closer to the training's, the better the balance.
        micro_batches: the number of parts a batch is split into. Default: the number of stages.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"`` or
            ``"zbv_zero_bubble"``; the last three have two stages per rank.
        split: names of the modules that each stage but the first begins with. Default: the split that minimizes the
            measured forward and backward of the most expensive stage; by numbers of parameters if the model is not on
            its device yet.
        weight: called with the target of a micro-batch; returns the number its loss is a mean over, at least zero. The
            loss is then not read.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.
        ConfigurationError: the model cannot be cut in this way, or arguments differ between ranks; raised on every
            rank, and nothing has changed.
        TorchTooOld: this version of torch has other schedules.
        WrongGradients: this version of torch is not a tested one, and a small model trained wrongly on it.

    Source: torch.distributed.pipelining, whose schedules order a step.
    """
    session = current()
    torch_versions.require((2, 11), "rankwise.pipeline()")
    axes = axes_for("pipeline", "pp")
    with all_ranks_succeed("rankwise.pipeline()"):
        named = check_unregistered(model, "pipeline")
        # Those that are on their device already stay.
        moved = (
            (name, one) for name, one in named.items() if own_part(one).device != torch.device(session.world.device)
        )
        check_hooks_kept(moved, "pipeline")
        _check_axes(axes, model)
        _check_functions(loss_fn, weight)
        chosen = schedule_of(schedule)
        num_micro_batches = checked_count(micro_batches, chosen, axes.pp)
        names = _checked_split(split)
        take_torchs_batchnorm(model)
        plan = plan_of(model, chosen, axes.pp, session.world.device)
    check_torch("pipeline", partial(_trial, schedule, plan.num_stages), variant=chosen.name)
    same_on_all_ranks(
        "the configuration of pipeline()",
        {
            "schedule": chosen.name,
            "micro_batches": num_micro_batches,
            "split": names,
            "weight": weight is not None,
            "tensors on meta": sum(own_part(tensor).is_meta for tensor in (*model.parameters(), *model.buffers())),
        },
        do="pass the same on every rank, with a model created the same way",
        error=ConfigurationError,
    )
    _settle(plan, example, num_micro_batches, names)
    if session.exchange is not None:
        check_same_model(model)
        _start_equal(model)
    place = axes.coordinate(session.world.rank, "pp")
    first = hold_own_stages(plan, place)
    piped = StagedModel(plan.own_parameters(place))
    register(model, cast("Any", piped))
    step = Pipeline(plan, loss_fn, num_micro_batches, weight, place=place, first=first, piped=piped)
    cover_all_stages(model, plan.device, session)
    log(f"pipeline: {type(model).__name__} in {plan.num_stages} stages, {chosen.name}\n{step}")
    return step


def _check_functions(loss_fn: object, weight: object) -> None:
    if not callable(loss_fn):
        raise ConfigurationError(
            f"loss_fn must be a function, not {loss_fn!r}.",
            do="pass loss_fn(output, target), which returns a mean or a sum",
        )
    if weight is not None and not callable(weight):
        raise ConfigurationError(
            f"weight must be a function, not {weight!r}.",
            do="pass weight(target), which returns a number: lambda y: (y != -100).sum()",
        )


def _checked_split(split: object) -> list[str] | None:
    if split is None:
        return None
    names = list(cast("Sequence[object]", split)) if isinstance(split, list | tuple) else [split]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigurationError(
            f"split must be names of modules, not {wrong[0]!r}.", do='pass split=["layers.8"], the first of each stage'
        )
    return cast("list[str]", names)


def _check_axes(axes: Axes, model: nn.Module) -> None:
    """Raise if the mesh has an axis that pipeline() does not support, or that the model is not split along."""
    worker_groups = f"worker_groups={axes.worker_groups}, " if axes.worker_groups > 1 else ""
    if axes.dp_shard > 1:
        raise ConfigurationError(
            f"pipeline() does not shard its stages, but the mesh has dp_shard={axes.dp_shard}.",
            evidence=f"mesh: {axes}",
            do=f"rankwise.mesh({worker_groups}pp={axes.pp}, dp_replicate={axes.data_ranks_per_group}, tp={axes.tp}), "
            "or rankwise.shard() without pp",
        )
    if axes.tp > 1 and all(own_part(parameter) is parameter for parameter in model.parameters()):
        raise ConfigurationError(
            f"The mesh has tp={axes.tp}, but the model is not split along tp.",
            evidence=f"mesh: {axes}",
            do="call rankwise.tensor_parallel(model) first, or "
            f"rankwise.mesh({worker_groups}pp={axes.pp}, dp_replicate={axes.dp_replicate * axes.tp})",
        )


def checked_count(micro_batches: int | None, schedule: PipelineSchedule, num_ranks: int) -> int:
    """Return how many micro-batches a batch is split into, by default one per stage.

    Raises:
        ConfigurationError: the schedule cannot run so many.
    """
    count = schedule.num_stages(num_ranks) if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"micro_batches must be an integer of at least 1, got {count!r}.", do="pass 4")
    if not schedule.allows(count, num_ranks):
        near = [number for number in range(1, 2 * count) if schedule.allows(number, num_ranks)]
        near.sort(key=lambda number: (abs(number - count), number))
        raise ConfigurationError(
            f"{schedule.name} on {num_ranks} ranks cannot run {count} micro-batches.",
            evidence=f"it runs them in rounds of equal length, each of at least {num_ranks}",
            do=f"pass micro_batches={near[0]} or {near[1]}",
        )
    return count


def _settle(plan: StagePlan, example: object, num_micro_batches: int, names: Sequence[str] | None) -> None:
    """Decide the stages, by what the model does with an example. Called by: every rank."""
    with all_ranks_succeed("rankwise.pipeline()"):
        args, kwargs = first_part(example, num_micro_batches)
        if not plan.can_run:
            args, kwargs = tree_map_only(torch.Tensor, lambda leaf: leaf.to(plan.device), (args, kwargs))
        program = plan.trace(args, kwargs)
    costs = _measured(plan, program, args, kwargs) if names is None and plan.num_stages > 1 else None
    with all_ranks_succeed("rankwise.pipeline()"):
        plan.settle(program, names, costs)


def _measured(plan: StagePlan, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, float]:
    """Return the cost of each block, measured on rank 0. Called by: every rank."""
    session = current()
    costs: dict[str, float] | None = None
    with all_ranks_succeed("measuring the blocks of the model"):
        # Ranks along tp compute together.
        if session.world.rank == 0 or (session.axes is not None and session.axes.tp > 1):
            costs = plan.measure(program, args, kwargs)
    return cast("dict[str, float]", gather_json(costs, what="rankwise.pipeline()")[0])


def _start_equal(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, or its part of them along ``tp``."""
    own = [own_part(tensor).detach() for tensor in (*model.parameters(), *model.buffers())]
    for along in map(exchange_along, ("pp", "dp_replicate")):
        if along is not None:
            with torch.no_grad():
                broadcast_tensors([part for part in own if not part.is_meta], along, what="parameters of rank 0")


def _trial(schedule: str, num_stages: int, bench: Bench) -> Generator[Compared]:
    """Train a small model in stages for two steps, and yield the gradients of this rank's stages."""
    model, plain = bench.net(num_stages), bench.net(num_stages)
    if bench.tp > 1:
        from rankwise.tensor_parallel.tensor_parallel import tensor_parallel  # noqa: PLC0415 - takes long

        tensor_parallel(model)
    x, _, first, last = bench.batch(0)
    split = [str(number) for number in range(1, num_stages)]
    step = pipeline(model, trial_loss, example=x[first:last], schedule=schedule, split=split or None)
    for number in range(2):
        x, y, first, last = bench.batch(number)
        step(x[first:last], y[first:last])
        trial_loss(plain(x), y).backward()
    yield from gradients(model, plain)


# -- the tensors of a model on one rank ----------------------------------------------------------------

META = torch.device("meta")


class RefuseForward:
    """A hook before the forward of a model whose parameters are on several ranks."""

    def __call__(self, module: nn.Module, _: object) -> None:
        """Raise before forward runs."""
        raise ConfigurationError(
            f"This {type(module).__name__} is divided into stages: no rank can run all of it.",
            do="call the step that rankwise.pipeline() returned, or its predict()",
        )


def hold_own_stages(plan: StagePlan, place: int) -> FirstSteps:
    """Keep only the stages of the rank at ``place``, on its device; return what checks the first steps.

    Called by: every rank.
    """
    model = plan.model
    before = [ref(parameter) for parameter in model.parameters()]
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    empty: list[tuple[str, torch.Tensor, int]] = []
    for name, table, key, tensor in list(tensor_places(model)):
        is_own = plan.holds(name, place)
        part = own_part(tensor)
        if part.device == (plan.device if is_own else META):
            continue
        if id(tensor) not in new:
            new[id(tensor)] = tensor, _on(tensor, plan.device if is_own else META)
            if is_own and part.is_meta:
                found = new[id(tensor)][1]
                empty.append((name, found, version_of(own_part(found))))
        table[key] = new[id(tensor)][1]
    if plan.num_ranks > 1:
        model.register_forward_pre_hook(RefuseForward())
        model.register_load_state_dict_pre_hook(_leave_others)
    kept = {id(parameter) for parameter in model.parameters()}
    return FirstSteps(exchange_along("pp"), [one for one in before if id(one()) not in kept], empty)


def find_unfilled(model: nn.Module, empty: list[tuple[str, torch.Tensor, int]]) -> str | None:
    """Return the name of a tensor that has not been written to since, if there is one."""
    now = {name: tensor for name, _, _, tensor in tensor_places(model)}
    for name, tensor, version in empty:
        part = own_part(tensor)
        if now.get(name) is tensor and version_of(part) == version and is_as_filled(part):
            return name
    return None


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device; one from the meta device is filled so that it cannot pass for loaded."""
    part = own_part(tensor).detach()
    if device.type == "meta":
        part = torch.empty_like(part, device="meta")
    elif part.is_meta:
        part = torch.empty_like(part, device=device)
        fill(part)
    else:
        part = part.to(device)
    if own_part(tensor) is not tensor:
        part = placed_like(tensor, part)
    return nn.Parameter(part, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _leave_others(model: nn.Module, state: dict[str, Any], prefix: str, *_given: object) -> None:
    """Have ``load_state_dict`` skip the tensors of other ranks: torch would warn of each."""
    for name, _table, _key, tensor in tensor_places(model):
        given = state.get(prefix + name)
        if own_part(tensor).is_meta and isinstance(given, torch.Tensor) and given.shape == tensor.shape:
            state[prefix + name] = tensor


class FirstSteps:
    """Compares the first batches of the ranks, and looks for unfilled parameters and outdated optimizers."""

    def __init__(
        self,
        along: Exchange | None,
        replaced: Sequence[ref[nn.Parameter]],
        empty: Sequence[tuple[str, torch.Tensor, int]],
    ) -> None:
        """Note what to check.

        Args:
            along: the ranks of the pipeline.
            replaced: parameters in whose place the model has others now.
            empty: tensors that were on the meta device: name, tensor, version.
        """
        self._along = along
        self._replaced = list(replaced)
        self._empty = list(empty)
        self._num_left = CHECKED_STEPS

    def __call__(self, model: nn.Module, batch: object) -> None:
        """Check a step. Called by: every rank of the pipeline, at the beginning of each step.

        Raises:
            ConfigurationError: parameters are not filled yet, an optimizer holds replaced parameters, or the ranks
                received different values.
        """
        if self._num_left <= 0:
            return
        self._num_left -= 1
        name = find_unfilled(model, self._empty) if self._empty else None
        if self._along is not None:
            own = [digest_of_tensors(batch), int(name is not None)]
            rows = numbers_of_all(self._along, own, "values of the batch")
            if name is None:
                _compare_batches(rows)
        if name is not None:
            raise unfilled("pipeline", name, is_saved=name in model.state_dict())
        self._empty.clear()
        check_no_optimizer_holds(self._replaced, "pipeline")
        self._replaced.clear()


def _compare_batches(rows: Sequence[Sequence[int]]) -> None:
    """Compare what ranks reported: a checksum of the batch, and whether tensors are unfilled."""
    unfilled_places = [place for place, (_, is_unfilled) in enumerate(rows) if is_unfilled]
    if unfilled_places:
        raise ConfigurationError(
            f"The stages of pp {', '.join(map(str, unfilled_places))} were on the meta device and have not been "
            "initialized since.",
            where=f"reported on {current().world}",
            do="initialize the model first: rankwise.load_weights(path, model), or restore a checkpoint",
        )
    digests = [digest for digest, _ in rows]
    if len(set(digests)) > 1:
        raise ConfigurationError(
            "The ranks of one pipeline received different batches.",
            where=f"reported on {current().world}",
            evidence="checksums of x and target, by rank along pp:\n" + fold_values(dict(enumerate(digests))),
            do="take batches from rankwise.DataLoader, which yields the same to all ranks along pp; use the same "
            "seed for random inputs",
        )
