# SPDX-License-Identifier: Apache-2.0
"""The stages of a model and the ranks that hold them, found from an example before anything is changed.

The measured time of each block balances the stages. Used by pipeline. Does no communication.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.pipeline.executor import now, num_samples, rows_like
from rankwise.pipeline.stage_executor import BoundStage
from rankwise.pipeline.stages import Stage, balanced, called_blocks, cut, cuts_before, owners, stages_of_blocks
from rankwise.pipeline.traced import trace
from rankwise.replicate.blocks import block_of, blocks
from rankwise.replicate.undo_forward import PythonRandomness, left_as_it_was
from rankwise.torch_private.compiler import module_within
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.modules import own_parameters
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from rankwise.world.device.accelerator import kept_random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Amount
    from rankwise.pipeline.schedule import PipelineSchedule
    from rankwise.pipeline.stages import Program
    from rankwise.replicate.loss.batch_statistics import Statistic
    from rankwise.replicate.loss.reports import Mode
    from rankwise.replicate.random_numbers.scope import PlannedDraw


TIMED_CALLS = 3


def block_costs(program: Program, model: nn.Module, leaves: Sequence[Any], device: torch.device) -> dict[str, float]:
    """Return the seconds of each block, of all its calls, in the order of the first ones. Leaves the model unchanged.

    Args:
        program: what forward calls.
        model: on its device, with its values.
        leaves: of the arguments that the program was made from.
        device: of the model.
    """
    costs = dict.fromkeys(called_blocks(program), 0.0)
    blocks = {name: partial(_timed, costs, name, model.get_submodule(name), device) for name in costs}
    whole = BoundStage(cut(program, {}, 1)[0], program, model, blocks, parameters=[], is_last=True)
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    randomness = PythonRandomness()
    try:
        with left_as_it_was(model), kept_random_states(device), torch.no_grad():
            whole.forward(leaves, ())
    finally:
        randomness.put_back()
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    return costs


def _timed(
    costs: dict[str, float], name: str, block: nn.Module, device: torch.device, *args: object, **kwargs: object
) -> Any:
    """Call a block with its backward a few times, and add the fastest time to its cost; return its result."""
    fastest = float("inf")
    result: Any = None
    values, spec = tree_flatten((args, kwargs))
    for _ in range(TIMED_CALLS):
        own = [_as_input(value) for value in values]
        own_args, own_kwargs = tree_unflatten([_not_leaf(value) for value in own], spec)
        start = now(device)
        with torch.enable_grad():
            result = block(*own_args, **own_kwargs)
            roots = _trained(tree_leaves(result))
            needing = _trained([*own, *block.parameters()])
            if roots and needing:
                ones = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, needing, ones, allow_unused=True)
        fastest = min(fastest, now(device) - start)
    costs[name] += fastest
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _trained(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _as_input(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _not_leaf(value: object) -> object:
    """Return a value that a block may change in place."""
    return value.view_as(value).mul(1) if isinstance(value, torch.Tensor) and value.requires_grad else value


MOST_PROGRAMS = 64
"""Programs are kept for so many shapes and modes; others are traced again."""


@dataclass(frozen=True)
class StageReport:
    """A description of one stage."""

    number: int
    rank: int
    """Along pp."""
    blocks: tuple[str, ...]
    cost_share: float | None
    """Of the measured forward and backward of the whole model; ``None`` if the split was given."""


class StagedModel:
    """The registered entry of a model in stages: refuses other strategies, ``no_sync()`` and ``weight()``."""

    strategy = "pipeline"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.on_mean: Callable[[float], None] | None = None
        self.cautions: dict[Mode, str] = {}
        """A warning by mode of a loss, if the result is then not that of one rank."""

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of a step with the number that gradients of all ranks are the mean over."""
        self.on_mean = listener

    def note_weight(self, total: Amount) -> None:
        """Note the number that the gradients of a step are the mean over."""
        if self.on_mean is not None:
            self.on_mean(float(total))

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - as other strategies have it
        """Refuse: each step is whole."""
        if value:
            raise ConfigurationError(
                "no_sync() does not apply to a pipeline: each step(x, target) leaves exact means, and gradients of "
                "several steps add up.",
                do="call step() several times before optimizer.step()",
            )
        return False

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Refuse: the pipeline calls backward itself."""
        if amount is not None:
            raise ConfigurationError(
                "weight() does not apply to a pipeline, which calls backward() itself.",
                do="pass weight= to rankwise.pipeline()",
            )
        return None


@dataclass(eq=False)
class StagePlan:
    """A model, and the stages of its parts.

    Its many fields are what is decided once, from an example, and what is kept of the model to read it in every step.
    """

    model: nn.Module
    schedule: PipelineSchedule
    num_ranks: int
    device: torch.device
    blocks: list[str]
    can_run: bool = True
    """Whether the whole model is on its device already."""
    order: list[str] = field(default_factory=list[str])
    """Blocks in the order of their calls."""
    stage_of: dict[str, int] = field(default_factory=dict[str, int])
    homes: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """The stages of each parameter and buffer."""
    sent_bytes: int = 0
    """The most that a stage sends for a micro-batch of the example."""
    costs: dict[str, float] | None = None
    _modules: list[nn.Module] = field(init=False)
    _open: list[tuple[str, nn.Module]] = field(init=False)
    """Modules whose forward is traced: those in no block."""
    _programs: OrderedDict[Any, tuple[Program, dict[int, BoundStage]]] = field(default_factory=OrderedDict)

    statistics: tuple[Statistic | None, ...] | None = None
    """Of the tensors of the output, in training: the statistic of several samples that each depends on."""
    _draws: dict[object, Sequence[PlannedDraw]] = field(default_factory=dict[object, "Sequence[PlannedDraw]"])
    """Of programs that were followed, by mode and kinds of arguments."""

    def __post_init__(self) -> None:
        # Kept, since every step reads them.
        self._modules = list(self.model.modules())
        named = self.model.named_modules()
        self._open = [(path, module) for path, module in named if block_of(path, self.blocks) is None]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.schedule.num_stages(self.num_ranks)

    def neighbours(self) -> set[tuple[int, int]]:
        """Return the pairs of ranks along the pipeline of which the first sends to the second."""
        places = [self.schedule.rank_of(stage, self.num_ranks) for stage in range(self.num_stages)]
        pairs = {(one, other) for one, other in pairwise(places) if one != other}
        return pairs | {(other, one) for one, other in pairs}

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """Return the calls of the model for these arguments."""
        try:
            return trace(self.model, args, kwargs, self.blocks, self.device)
        except RankwiseError:
            raise
        except Exception as error:
            shapes = [_signature(leaf) for leaf in tree_leaves((tuple(args), kwargs))]
            raise ConfigurationError(
                f"{type(self.model).__name__} cannot be called with this batch.",
                evidence=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}\n"
                f"called with {', '.join(map(_shape_text, shapes))}",
                do="pass x and example as arguments of the model: a tensor, a tuple of arguments, or a dict of "
                "arguments by name, with the device and dtype of the model",
            ) from error

    def measure(self, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of each block, or its number of parameters if the model is not on its device yet."""
        if not self.can_run:
            sizes = {name: self.model.get_submodule(name).parameters() for name in called_blocks(program)}
            return {name: 1.0 + sum(own_part(one).numel() for one in found) for name, found in sizes.items()}
        return block_costs(program, self.model, tree_leaves((tuple(args), kwargs)), self.device)

    def settle(self, program: Program, split: Sequence[str] | None, costs: dict[str, float] | None) -> None:
        """Decide the stage of every block, parameter and buffer.

        Raises:
            ConfigurationError: the model cannot be cut there, or not into so many stages.
        """
        self.order = called_blocks(program)
        if len(self.order) < self.num_stages:
            raise ConfigurationError(
                f"The model has {len(self.order)} blocks for {self.num_stages} stages.",
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
            cuts = self._balanced(costs, tied)
        self.stage_of = stages_of_blocks(self.order, cuts)
        stages = cut(program, self.stage_of, self.num_stages)
        self.sent_bytes = max(sum(program.kinds[value].nbytes for value in stage.sends) for stage in stages)
        state_names = [
            *(name for name, _ in self.model.named_parameters(remove_duplicate=False)),
            *(name for name, _ in self.model.named_buffers(remove_duplicate=False)),
        ]
        self.homes = owners(program, stages, state_names, self.stage_of)
        self._refuse_shared(tied)

    def _balanced(self, costs: dict[str, float], tied: Sequence[Sequence[str]]) -> list[int]:
        try:
            return balanced([costs[name] for name in self.order], self.num_stages, self._together(tied))
        except ConfigurationError as error:
            if tied:
                names = "; ".join(" = ".join(names) for names in tied)
                error.supplement(
                    evidence=f"{error.evidence}\nshared: {names}",
                    do=f"do not share parameters across the model (tie_word_embeddings=False), or {error.do}",
                )
            raise

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
                    do="cut so that all modules that use it are on one stage, or do not share it "
                    "(tie_word_embeddings=False)",
                )

    # -- what this rank keeps ----------------------------------------------------------------------

    def own_stages(self, place: int) -> list[int]:
        """Return the stages of the rank at ``place`` along pp."""
        return [number for number in range(self.num_stages) if self.schedule.rank_of(number, self.num_ranks) == place]

    def holds(self, name: str, place: int) -> bool:
        """Return whether the rank at ``place`` has a parameter or buffer."""
        return not self.homes.get(name, set()).isdisjoint(self.own_stages(place))

    def own_parameters(self, place: int) -> list[nn.Parameter]:
        """Return the parameters of the rank at ``place``."""
        return [parameter for name, parameter in self.model.named_parameters() if self.holds(name, place)]

    def own_buffers(self, place: int) -> nn.Module:
        """Return a module with only the buffers of the rank at ``place``."""
        holder = nn.Module()
        for number, (name, buffer) in enumerate(self.model.named_buffers()):
            if self.holds(name, place):
                holder.register_buffer(str(number), buffer)
        return holder

    # -- programs for each shape -------------------------------------------------------------------

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any], place: int) -> tuple[Program, dict[int, BoundStage]]:
        """Return the program and own stages for arguments of these shapes; both are kept."""
        leaves, spec = tree_flatten((tuple(args), kwargs))
        key = (self._mode(), str(spec), tuple(_signature(leaf) for leaf in leaves))
        if key not in self._programs:
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.popitem(last=False)
            program = self.trace(args, kwargs)
            if program.num_draws or (self.statistics is None and torch.is_grad_enabled()):
                self._follow_samples(program, args, kwargs)
            stages = cut(program, self.stage_of, self.num_stages)
            self._refuse_elsewhere(program, stages)
            self._programs[key] = program, self._bind(program, stages, place)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _follow_samples(self, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note which samples random numbers are for, and where samples meet. Takes several times as long as a trace."""
        num = num_samples((args, kwargs), "x")
        leaves, spec = tree_flatten((args, kwargs))
        kind = self._mode(), str(spec), tuple(one.dim() for one in leaves if isinstance(one, torch.Tensor))
        known = self._draws.get(kind, ())
        if len(known) == program.num_draws > 0 and all(
            one.fits("", shape, num) for one, shape in zip(known, program.drawn_shapes, strict=True)
        ):
            program.note_samples(known, ())
            return
        if num == 1:
            # A dim of one may be the samples or not.
            num = 3
            args, kwargs = tree_map_only(torch.Tensor, partial(rows_like, num=num), (args, kwargs))
        followed = program
        with suppress(Exception):  # a model that cannot be followed is not wrong
            followed = trace(self.model, args, kwargs, self.blocks, self.device, num_followed=num)
        program.note_samples(followed.draws, followed.statistics)
        self._draws[kind] = followed.draws
        if torch.is_grad_enabled() and self.statistics is None:
            self.statistics = followed.statistics

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
        """Return the state that a program depends on, other than the arguments."""
        kind = self.device.type
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple([module.training for module in self._modules]),
            tuple(
                [
                    (id(parameter), parameter.requires_grad)
                    for module in self._modules
                    for parameter in own_parameters(module).values()
                    if parameter is not None
                ]
            ),
            self._plain_values(),
        )

    def _plain_values(self) -> tuple[tuple[str, object], ...]:
        """Return the plain attributes of open modules, which forward may read between blocks."""
        return tuple(
            (f"{path}.{key}", value)
            for path, module in self._open
            for key, value in vars(module).items()
            if _is_plain(value)
        )

    def _refuse_elsewhere(self, program: Program, stages: Sequence[Stage]) -> None:
        for name, found in owners(program, stages, self.homes, {}).items():
            used = any(program.states.get(number) == name for call in program.calls for number in call.reads)
            if used and not found <= self.homes[name]:
                raise ConfigurationError(
                    f"{name} is used on stage {min(found - self.homes[name])} but belongs to another.",
                    evidence="the model runs differently than on the example",
                    do="pass an example like the training batches: the same arguments, the same mode of the model",
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


def plan_of(model: nn.Module, schedule: PipelineSchedule, num_ranks: int, world_device: str) -> StagePlan:
    """Return a plan without decisions.

    Raises:
        ConfigurationError: the model is on several devices, has no parameters, or is compiled.
    """
    if module_within(model) is not None:
        raise ConfigurationError(
            "A compiled model cannot be cut into stages.",
            do="pass the model itself; its blocks may be compiled: block.compile()",
        )
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    where = devices - {"meta"}
    if not devices or len(where) > 1:
        raise ConfigurationError(
            "All parameters of the model of pipeline() must be on one device.",
            evidence=f"they are on {', '.join(sorted(devices)) or 'none: it has no parameters'}",
            do="create it on every rank and move it to world.device first, or create it on the meta device",
        )
    # A model that is not on this rank's device yet is moved stage by stage, so it need not fit on one.
    is_there = bool(where) and where != {"cpu"}
    device = torch.device(next(iter(where)) if is_there else world_device)
    return StagePlan(model, schedule, num_ranks, device, blocks(model), devices == {str(device)})


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, cast("tuple[object, ...]", value)))
    return value is None or isinstance(value, bool | int | float | str)


def _signature(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type
    return repr(leaf)


def _shape_text(signature: Any) -> str:
    if isinstance(signature, str):
        return signature
    shape, _, dtype, device = signature
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
