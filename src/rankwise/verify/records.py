# SPDX-License-Identifier: Apache-2.0
"""What a rank records of each step, and the file that holds it.

Values only; imports no torch. Written by ``recorder``, read by ``compare``.
"""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor, or the sum of its rows, as a few numbers that add up where tensors do."""

    shape: tuple[int, ...]
    """Of the tensor, or of one row."""
    rows: int
    """How many rows were summed; 1 for a tensor that was not."""
    squares: float
    """The sum of the squares of all elements."""
    projections: tuple[float, ...]
    """On random directions, which depend on the number of elements alone."""
    bends: tuple[float, ...] = ()
    """Of summed rows: the projections of each row, squared with their signs. Normalized rows have equal sums."""

    @property
    def norm(self) -> float:
        """The root of the sum of squares."""
        return self.squares**0.5

    def __add__(self, other: Sketch) -> Sketch:
        """Return the sketch of the sum: of the rows of both, where rows were summed."""
        return Sketch(
            self.shape,
            self.rows + other.rows,
            self.squares + other.squares,
            _sums(self.projections, other.projections),
            _sums(self.bends, other.bends),
        )

    def minus(self, other: Sketch) -> tuple[float, ...]:
        """Return the projections of the difference."""
        return tuple(one - two for one, two in zip(self.projections, other.projections, strict=True))


def _sums(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(mine + theirs for mine, theirs in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class ModuleOutput:
    """What the calls of one module in a step returned, their rows summed."""

    name: str
    kind: str
    """Name of its class."""
    output: Sketch
    inputs: Sketch | None = None
    """Of the outermost module alone: what the script passed."""

    def plus(self, other: ModuleOutput) -> ModuleOutput:
        """Return the output with that of another call."""
        return replace(
            self, output=self.output + other.output, inputs=summed((self.inputs, other.inputs)) or self.inputs
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in one step of its optimizer."""

    name: str
    gradient: Sketch | None
    """When the optimizer took the step; ``None`` if it had none."""
    local: Sketch | None
    """As backward computed it on this rank, before any exchange."""
    before: Sketch
    after: Sketch
    ranks: tuple[int, ...] = ()
    """Those that hold parts of it, of which this is one; empty if this rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that the script took from a loader."""

    loader: int
    epoch: int
    digests: tuple[int, ...]
    """One per sample, of the bits of its tensors."""
    drawn: str = ""
    """The generators of this process, and of the worker, that reading it drew from, with their states before."""
    is_trained: bool = True
    """Whether a model was then called with gradients, not for an evaluation."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model by the script, with gradients."""

    rows: int
    drew: bool
    drew_by_rows: bool
    """Whether all these draws were ones that can be repeated for the rows of several ranks."""
    line: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an optimizer, and all that happened since the step before.

    Its many fields are one entry of a rank's file: what a step is compared by.
    """

    number: int
    optimizer: str
    rows: int
    """Samples that the script passed to its models."""
    inputs: Sequence[int]
    """One digest per sample passed to a model."""
    batches: Sequence[Batch]
    calls: Sequence[Call]
    modules: Sequence[ModuleOutput]
    losses: Sequence[float]
    parameters: tuple[Parameter, ...]
    buffers: Mapping[str, Sketch]
    hyperparameters: tuple[Mapping[str, float], ...]
    """One mapping per parameter group."""
    clipped: Sequence[float]
    """Norms that ``clip_grad_norm_`` returned."""
    num_scheduler_steps: int
    """Since the start."""
    loss_line: str
    step_line: str
    state: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What the optimizer held before the step: of each tensor the sum, and the norm."""
    copies: Mapping[str, Sketch] = field(default_factory=dict)
    """Buffers of models that were called without gradients only."""
    metrics: Sequence[float] = ()
    """What schedulers were given to decide from, since the step before."""
    kept: Mapping[str, Sketch] = field(default_factory=dict)
    """What the script keeps from step to step and computes its loss from, when it called ``backward()``."""


@dataclass(frozen=True, slots=True)
class Last:
    """What a script that ran to its end left after the last step."""

    buffers: Mapping[str, Sketch]
    copies: Mapping[str, Sketch]
    """Buffers and parameters of models that were called without gradients only."""
    metrics: Sequence[float]
    """As of a step."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader that the script iterated."""

    number: int
    length: int | None
    batch_size: int | None
    sampler: str
    shuffles: bool
    """Whether its sampler shuffles and has a ``set_epoch`` to be called."""
    line: str


@dataclass(frozen=True, slots=True)
class Written:
    """A file that the script opened for writing."""

    path: str
    line: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for the whole run of a rank."""

    rank: int
    dtype: str
    uses_rankwise: bool = False
    """Whether it called ``rankwise.join()``."""
    strategies: tuple[str, ...] = ()
    """Strategies that its models went through: ``"replicate"``."""
    data_rank: int = 0
    """Which part of a batch it takes: the same for the stages of a pipeline, and for the parts of split layers."""
    inexact: Mapping[str, str] = field(default_factory=dict)
    """Calls of rankwise's that give up equality with one rank, and their lines."""
    randomness: tuple[str, ...] = ()
    """What these models were given as ``randomness=``, or its default."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """Everything that one rank recorded. Its many fields are the file of that rank, which is read as a whole."""

    facts: Facts
    steps: tuple[Step, ...] = ()
    loaders: tuple[Loader, ...] = ()
    written: tuple[Written, ...] = ()
    end: str = ""
    """How the script ended: ``"script"``, ``"steps"`` (as many as asked for), or its error; empty if it was killed."""
    end_line: str = ""
    """The line of the script that raised that error, ``train.py:31``."""
    batches_kept: bool = True
    """Whether its batches are on disk, for a run on one rank to take."""
    last: Last | None = None
    """``None`` if the script did not end by itself."""
    warnings: tuple[str, ...] = ()
    """What rankwise warned of that makes results depend on the number of ranks."""
    lines_of_copies: Mapping[str, str] = field(default_factory=dict)
    """Which line first called each model that was called without gradients only."""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Files of which a state was loaded before the first step, with the lines that loaded it."""
    lines_of_kept: Mapping[str, str] = field(default_factory=dict)
    """Which line changes each value that the script keeps from step to step."""
    scheduler_line: str = ""
    """The line that gave a scheduler a value to decide from."""
    hook_line: str = ""
    """The line that registered a hook on the gradient of what a model computes, such as ``h.register_hook(f)``."""
    spawn_line: str = ""
    """The line that started a process."""
    missing: str = ""
    """What the script did not find in its copy of the working folder, although it exists outside."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all ranks of a run recorded, and how the run ended."""

    ranks: tuple[RankRun, ...]
    exit_code: int
    output: str = field(default="", repr=False)
    """The last lines that it wrote."""
    seconds: float = 0.0
    record: str = ""
    """The folder with the files of its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How one run of the script is recorded."""

    num_ranks: int = 1
    steps: int
    """After so many it is ended."""
    float64: bool
    """Whether it computes in float64."""
    permute: bool = False
    """Whether the rows of each batch are put in another order."""
    join: Run | None = None
    """The run whose ranks' batches and hyperparameters are taken; for a run on one rank."""
    auto: bool = False
    """Whether rank zero runs it and the others serve, as with ``rankwise run --auto``."""
    record: str = ""
    """A folder; each rank writes a file into it."""
    root: str = ""
    """The folder whose files are the script's, to which names of files are relative."""
    origin: str = ""
    """The user's working folder, of which this process has a copy."""

    @property
    def num_scripts(self) -> int:
        """How many ranks run the script."""
        return 1 if self.auto else self.num_ranks

    @property
    def keep(self) -> bool:
        """Whether batches are kept for a run on one rank."""
        return self.num_scripts > 1

    @property
    def joined_batches(self) -> list[Path]:
        """The folders with the batches of the run to join."""
        return [] if self.join is None else [Path(self.join.record, _batches(n)) for n in range(len(self.join.ranks))]

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return Path(self.record, f"rank-{rank}")

    def batches(self, rank: int) -> Path:
        """Return the folder of a rank's batches."""
        return Path(self.record, _batches(rank))


def _batches(rank: int) -> str:
    return f"batches-{rank}"


# -- the file ------------------------------------------------------------------------------------------------

_REPEATED = ("steps", "loaders", "written", "warnings")
"""Fields of :class:`RankRun` whose values are added one by one."""


def add_to(file: BinaryIO, **fields: object) -> None:
    """Add fields of :class:`RankRun` to its file: a value, or the next one of a field that has several."""
    pickle.dump(fields, file)
    file.flush()


def read(path: Path) -> RankRun | None:
    """Read what a rank recorded; ``None`` if it recorded nothing. A last entry that was cut off is left out."""
    found: dict[str, Any] = {}
    if not path.exists():
        return None
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            for name, value in pickle.load(file).items():  # noqa: S301 - written by a rank of this command
                found[name] = (*found.get(name, ()), value) if name in _REPEATED else value
    return RankRun(**found) if "facts" in found else None


# -- parts ---------------------------------------------------------------------------------------------------


def assembled(ranks: Sequence[RankRun]) -> tuple[RankRun, ...]:
    """Return the runs with whole parameters, which several ranks hold parts of, on each of them.

    A rank also gets the parameters, optimizer state and buffers of other stages of its pipeline.
    """
    steps = [[_assembled(rank, number, ranks) for number in range(len(rank.steps))] for rank in ranks]
    return tuple(replace(rank, steps=tuple(own)) for rank, own in zip(ranks, steps, strict=True))


def _assembled(rank: RankRun, number: int, ranks: Sequence[RankRun]) -> Step:
    held = [(other, other.steps[number]) for other in ranks if number < len(other.steps)]
    mates = [step for other, step in held if other.facts.data_rank == rank.facts.data_rank]
    own = rank.steps[number]
    found = {one.name: one for step in (*mates, own) for one in step.parameters}
    parts = {other.facts.rank: {one.name: one for one in step.parameters} for other, step in held}
    whole = [
        _whole(one, [parts[other][one.name] for other in one.ranks if one.name in parts.get(other, {})])
        for one in found.values()
    ]
    return replace(
        own,
        parameters=tuple(whole),
        state={name: state for step in (*mates, own) for name, state in step.state.items()},
        buffers={name: buffer for step in (*mates, own) for name, buffer in step.buffers.items()},
    )


def _whole(one: Parameter, parts: Sequence[Parameter]) -> Parameter:
    if not parts or len(parts) < len(one.ranks):
        return one
    before, after = summed(part.before for part in parts), summed(part.after for part in parts)
    gradient = summed(part.gradient for part in parts)
    return replace(one, gradient=gradient, local=None, before=before or one.before, after=after or one.after, ranks=())


def summed(sketches: Iterable[Sketch | None]) -> Sketch | None:
    """Return the sum of those that exist; ``None`` if none does or their shapes differ."""
    existing: Sequence[Sketch] = [one for one in sketches if one is not None]
    if not existing or any(one.shape != existing[0].shape for one in existing):
        return None
    total = existing[0]
    for one in existing[1:]:
        total += one
    return total
