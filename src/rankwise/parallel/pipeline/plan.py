# SPDX-License-Identifier: Apache-2.0
"""Which rank of a pipeline holds what: found from an example, before anything is changed.

Used by pipeline. Communicates only to agree on the measured costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rankwise.errors import ConfigurationError
from rankwise.parallel.blocks import block_of, blocks
from rankwise.parallel.buckets import own_part
from rankwise.parallel.pipeline.cost import block_costs
from rankwise.parallel.pipeline.stage_run import BoundStage
from rankwise.parallel.pipeline.stages import Stage, balanced, called_blocks, cut, cuts_before, owners, stages_of_blocks
from rankwise.parallel.pipeline.traced import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.mesh import Axes
    from rankwise.parallel.pipeline.program import Program
    from rankwise.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class StageReport:
    """What one stage is."""

    number: int
    rank: int
    """Along pp."""
    blocks: tuple[str, ...]
    cost_share: float | None
    """Of the forward and backward of the whole model, as measured; ``None`` where the split was given by hand."""


class RefuseForward:
    """Stands before the forward of a model whose parameters are on several ranks."""

    def __call__(self, module: nn.Module, _: object) -> None:
        """Raise, before forward runs."""
        raise ConfigurationError(
            f"This {type(module).__name__} is cut into stages: no rank can run all of it.",
            do="call the step that rankwise.pipeline() returned, or its predict()",
        )


class Piped:
    """What is noted of a model in stages, so that no other strategy takes it, and nobody speaks of its backward."""

    strategy = "pipeline"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    @property
    def is_accumulating(self) -> bool:
        """Never: each step is whole."""
        return False

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        if value:
            raise ConfigurationError(
                "no_sync() is not for a pipeline: each step(x, target) leaves exact means, and steps add up.",
                do="call step() several times before optimizer.step()",
            )

    @property
    def given_weight(self) -> float | None:
        """Never given: there is no backward to say it for."""
        return None

    @given_weight.setter
    def given_weight(self, value: float | None) -> None:
        if value is not None:
            raise ConfigurationError(
                "weight() is not for a pipeline: there is no backward() to put into its block.",
                do="pass weight= to rankwise.pipeline()",
            )


@dataclass(eq=False)
class Plan:
    """A model, and where its parts go."""

    model: nn.Module
    schedule: Schedule
    num_ranks: int
    device: torch.device
    blocks: list[str]
    order: list[str] = field(default_factory=list[str])
    """Blocks in the order of their calls."""
    stage_of: dict[str, int] = field(default_factory=dict[str, int])
    homes: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """The stages of each parameter and buffer."""
    costs: dict[str, float] | None = None
    _programs: dict[Any, tuple[Program, dict[int, BoundStage]]] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.schedule.num_stages(self.num_ranks)

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """Return what the model calls for these arguments."""
        return trace(self.model, args, kwargs, self.blocks, self.device)

    def measure(self, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of each block."""
        reads = {number for call in program.calls for number in call.reads}
        states = {number: attrgetter(name) for number, name in program.states.items() if number in reads}
        return block_costs(program, self.model, pytree.tree_leaves((tuple(args), kwargs)), self.device, states)

    def settle(self, program: Program, split: Sequence[str] | None, costs: dict[str, float] | None) -> None:
        """Decide the stage of every block, parameter and buffer.

        Raises:
            ConfigurationError: the model cannot be cut there, or not into so many stages.
        """
        self.order = called_blocks(program)
        if len(self.order) < self.num_stages:
            raise ConfigurationError(
                f"The model has {len(self.order)} blocks, and there are {self.num_stages} stages.",
                evidence=f"blocks: {', '.join(self.order) or 'none'}",
                do=f"use at most {len(self.order) // self.schedule.stages_per_rank} ranks along pp"
                + (', or schedule="1f1b", with one stage per rank' if self.schedule.stages_per_rank > 1 else ""),
            )
        tied = tied_names(self.model)
        if split is not None:
            names = [name for name, _ in self.model.named_modules()]
            cuts = cuts_before(split, self.order, names, self.num_stages)
        elif costs is None:
            cuts = []
        else:
            self.costs = costs
            cuts = balanced([costs[name] for name in self.order], self.num_stages, self._together(tied))
        self.stage_of = stages_of_blocks(self.order, cuts)
        stages = cut(program, self.stage_of, self.num_stages)
        state_names = [name for name, _ in _states(self.model)]
        self.homes = owners([(program, stages)], state_names, self.stage_of)
        self._refuse_shared(tied)

    def _together(self, tied: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for names in tied:
            found = [block_of(name, self.order) for name in names]
            places = [self.order.index(block) for block in found if block is not None]
            if places:
                spans.append((min(places), max(places)))
        return spans

    def _refuse_shared(self, tied: Sequence[Sequence[str]]) -> None:
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for names in [*tied, *([name] for name in parameters)]:
            stages = sorted(set[int]().union(*(self.homes[name] for name in names)))
            if len(stages) > 1:
                raise ConfigurationError(
                    f"The parameter {' = '.join(names)} is used on stages {', '.join(map(str, stages))}.",
                    evidence="a parameter lives on one rank",
                    do="cut so that all its users are on one stage, or do not share it (tie_word_embeddings=False)",
                )

    # -- what this rank keeps ----------------------------------------------------------------------

    def own_stages(self, place: int) -> list[int]:
        """Return the stages of the rank at ``place`` along pp."""
        return [number for number in range(self.num_stages) if self.schedule.rank_of(number, self.num_ranks) == place]

    def give_up(self, place: int) -> None:
        """Replace what the rank at ``place`` does not hold by meta tensors: same names, same order."""
        own = set(self.own_stages(place))
        stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for path, module in self.model.named_modules():
            tables = (module._parameters, module._buffers)  # noqa: SLF001 - torch has no public way to swap them
            for table in cast("tuple[dict[str, Any], ...]", tables):
                for key, tensor in table.items():
                    name = f"{path}.{key}" if path else key
                    if tensor is None or self.homes[name] & own:
                        continue
                    table[key] = stand_ins.setdefault(id(tensor), (tensor, _on_meta(tensor)))[1]
        if stand_ins:
            self.model.register_forward_pre_hook(RefuseForward())

    def own_parameters(self, place: int) -> list[nn.Parameter]:
        """Return the parameters of the rank at ``place``."""
        own = set(self.own_stages(place))
        return [parameter for name, parameter in self.model.named_parameters() if self.homes[name] & own]

    def own_buffers(self, place: int) -> nn.Module:
        """Return a module that has the buffers of the rank at ``place``, and nothing else."""
        own = set(self.own_stages(place))
        holder = nn.Module()
        for number, (name, buffer) in enumerate(self.model.named_buffers()):
            if self.homes[name] & own:
                holder.register_buffer(str(number), buffer)
        return holder

    # -- programs for what comes -------------------------------------------------------------------

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any], place: int) -> tuple[Program, dict[int, BoundStage]]:
        """Return the stages of the rank at ``place`` for arguments of these shapes, kept for the next time."""
        key = (self._mode(), tuple(_signature(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs))))
        if key not in self._programs:
            program = self.trace(args, kwargs)
            stages = cut(program, self.stage_of, self.num_stages)
            self._refuse_elsewhere(program, stages)
            self._programs[key] = program, self._bind(program, stages, place)
        return self._programs[key]

    def _bind(self, program: Program, stages: Sequence[Stage], place: int) -> dict[int, BoundStage]:
        modules = {name: self.model.get_submodule(name) for name in self.stage_of}
        parameters = [(self.homes[name], p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {
            number: BoundStage(
                stage=stages[number],
                program=program,
                model=self.model,
                blocks=modules,
                parameters=[parameter for homes, parameter in parameters if number in homes],
                is_last=number == self.num_stages - 1,
            )
            for number in self.own_stages(place)
        }

    def _mode(self) -> tuple[Any, ...]:
        """Return what a program depends on besides the arguments."""
        kind = self.device.type
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple(module.training for module in self.model.modules()),
            tuple((id(parameter), parameter.requires_grad) for parameter in self.model.parameters()),
        )

    def _refuse_elsewhere(self, program: Program, stages: Sequence[Stage]) -> None:
        for name, found in owners([(program, stages)], list(self.homes), {}).items():
            used = any(program.states.get(number) == name for call in program.calls for number in call.reads)
            if used and not found <= self.homes[name]:
                raise ConfigurationError(
                    f"{name} is used on stage {min(found - self.homes[name])}, and lives on another.",
                    evidence="the model runs otherwise than on the example",
                    do="give an example like what is trained: the same arguments, the same mode of the model",
                )

    def reports(self) -> list[StageReport]:
        """Return what each stage is."""
        total = sum(self.costs.values()) if self.costs else 0.0
        found: list[StageReport] = []
        for number in range(self.num_stages):
            names = tuple(name for name in self.order if self.stage_of[name] == number)
            share = sum(self.costs[name] for name in names) / total if self.costs and total else None
            found.append(StageReport(number, self.schedule.rank_of(number, self.num_ranks), names, share))
        return found


def plan_of(model: nn.Module, schedule: Schedule, num_ranks: int) -> Plan:
    """Return a plan in which nothing is decided yet.

    Raises:
        ConfigurationError: the model is on several devices, on none, or compiled.
    """
    if hasattr(model, "_orig_mod"):
        raise ConfigurationError(
            "A compiled model cannot be cut into stages.",
            do="pass the model itself, its blocks compiled if you like: block.compile()",
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ConfigurationError(
            "pipeline() needs a model whose parameters are on one device.",
            evidence=f"they are on {', '.join(devices) or 'none: it has no parameters'}",
            do="build it on every rank and move it to world.device first",
        )
    return Plan(model, schedule, num_ranks, torch.device(devices[0]), blocks(model))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _states(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    part = own_part(tensor)
    empty = torch.empty_like(part, device="meta", requires_grad=False)
    if part is not tensor:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - most models have none, and it takes long

        spec = tensor._spec  # type: ignore[attr-defined]  # noqa: SLF001 - how torch itself rebuilds a DTensor
        empty = DTensor(empty, spec, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _signature(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return repr(leaf)


def check_axes(axes: Axes) -> None:
    """Raise if the ranks lie along an axis that a pipeline does not go with.

    Raises:
        ConfigurationError: names the nearest sizes.
    """
    if axes.dp_shard > 1:
        raise ConfigurationError(
            f"A pipeline's stages are not sharded, and the ranks are laid out with dp_shard={axes.dp_shard}.",
            evidence=f"mesh: {axes}",
            do=f"rankwise.mesh(pp={axes.pp}, dp_replicate={axes.dp_replicate * axes.dp_shard}, tp={axes.tp}), "
            "or rankwise.shard() without pp",
        )


def checked_count(micro_batches: int | None, schedule: Schedule, num_ranks: int) -> int:
    """Return how many micro-batches a batch is run in: what was asked for, or one per stage.

    Raises:
        ConfigurationError: the schedule cannot run so many.
    """
    count = schedule.num_stages(num_ranks) if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"micro_batches must be a whole number, at least 1, not {count!r}.", do="pass 4")
    if not schedule.allows(count, num_ranks):
        near = [number for number in range(1, 2 * count) if schedule.allows(number, num_ranks)]
        near.sort(key=lambda number: (abs(number - count), number))
        raise ConfigurationError(
            f"{schedule.name} on {num_ranks} ranks cannot run {count} micro-batches.",
            evidence=f"it runs them in rounds of at least {num_ranks}, all of one length",
            do=f"pass micro_batches={near[0]} or {near[1]}",
        )
    return count
