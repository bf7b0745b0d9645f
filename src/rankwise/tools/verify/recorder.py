# SPDX-License-Identifier: Apache-2.0
"""Records what the script does in each step: hooks on torch, installed before the script runs.

Every value is reduced to a sketch or a digest at once; nothing communicates. Imported by ``rank``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import traceback
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise.comm.session import current, current_or_none
from rankwise.log import logger
from rankwise.tools.replacing import replace_attributes
from rankwise.tools.verify import sketches
from rankwise.tools.verify.draws import RowDraws, State, torch_state
from rankwise.tools.verify.kept import KeptValues
from rankwise.tools.verify.loaders import LoaderPlan, Loaders
from rankwise.tools.verify.names import WRAPPERS, Names
from rankwise.tools.verify.records import (
    Batch,
    Call,
    Facts,
    Last,
    Loader,
    ModuleOutput,
    Parameter,
    Sketch,
    Step,
    Written,
    line_of,
    read,
)
from rankwise.tools.verify.working_copy import WRITTEN
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import is_transforming
from rankwise.torch_private.saving import on_save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType, ModuleType

    from rankwise.tools.replacing import Replaced
    from rankwise.tools.verify.records import RankRun

MOST_FILES = 1000
_LIBRARIES = ("site-packages", "dist-packages")
_STRATEGIES = (
    "replicate",
    "shard.shard",
    "tensor_parallel.tensor_parallel",
    "pipeline.pipeline",
    "local_sgd.local_sgd",
    "parameter_server.parameter_server",
)
"""Modules of rankwise's with a function of the same name that takes a model."""
_ABOUT_RESULTS = ("rankwise.parallel.", "rankwise.comm.optimizer_steps")
"""Modules whose warnings name what makes results depend on the number of ranks."""
_ABOUT_SPEED = "rankwise.parallel.randomness.philox"
"""And that of them whose warnings do not."""


class StepsTaken(SystemExit):
    """Ends the script: it has taken as many steps as were asked for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one run of the script is recorded."""

    record: str
    """A folder; each rank writes a file into it."""
    working_folder: str
    """The folder whose files are the script's, to which names of files are relative."""
    origin: str
    """The user's working folder, of which this process has a copy."""
    steps: int
    float64: bool
    permute: bool = False
    """Whether the rows of each batch are put in another order."""
    keep: bool = False
    """Whether batches are kept for a run on one rank."""
    join: str | None = None
    """The record of a run whose ranks' batches and hyperparameters are taken; for a run on one rank."""
    num_joined: int = 0
    """How many ranks it had."""

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return Path(self.record, f"rank-{rank}.jsonl")

    def loaders(self, rank: int) -> LoaderPlan:
        """Return what is done with the batches of a rank."""
        join = () if self.join is None else tuple(_batches(self.join, one) for one in range(self.num_joined))
        return LoaderPlan(self.float64, self.permute, _batches(self.record, rank) if self.keep else None, join)


def _batches(record: str, rank: int) -> str:
    return str(Path(record, f"batches-{rank}"))


class Recorder:
    """What one rank records, from :meth:`install` to :meth:`finish`."""

    def __init__(self, plan: Plan, rank: int, world_size: int) -> None:
        Path(plan.record).mkdir(parents=True, exist_ok=True)
        self._plan = plan
        self._rank = rank
        self._world_size = world_size
        self._pid = os.getpid()
        self._file = plan.path(rank).open("w", encoding="utf-8")
        self._root = f"{Path(plan.working_folder).resolve()}{os.sep}"
        self._draws = RowDraws(permutes=plan.permute)
        self._loaders = Loaders(plan.loaders(rank), self)
        self._names = Names()
        self._kept_values = KeptValues(self._root)
        self._lines_of_kept: dict[str, str] = {}
        self._joined: list[RankRun] = []
        self._steps = 0
        self._num_calls = 0
        self._depth = 0
        self._is_recording = False
        self._schedulers = 0
        self._scheduler_depth = 0
        self._paths: set[str] = set()
        self._optimizers: dict[int, tuple[Optimizer, str]] = {}
        self._own: list[dict[str, Any]] = []
        self._scales: dict[str, float] = {}
        self._unused: list[Batch] = []
        self._loaded: dict[str, str] = {}
        self._last_read = ""
        self._hooked: dict[int, torch.Tensor] = {}
        self._here = Path.cwd()
        self._inexact: dict[str, str] = {}
        self._noted: dict[str, object] | None = None
        """What is to be known of rankwise's part in the run, after the first step."""
        self._metrics: list[float] = []
        self._scheduler_line = self._hook_line = self._spawn_line = ""
        self._clear()
        self._write("facts", Facts(rank, world_size, "float64" if plan.float64 else "as-is", data_rank=rank))
        if plan.keep:
            Path(_batches(plan.record, rank)).mkdir(exist_ok=True)
        if plan.join is not None:
            found = [read(Path(plan.join, f"rank-{one}.jsonl")) for one in range(plan.num_joined)]
            self._joined = [one for one in found if one is not None]

    def _clear(self) -> None:
        self._rows = 0
        self._inputs: list[int] = []
        self._batches: list[Batch] = []
        self._has_loader = False
        """Whether the script has taken batches from a loader."""
        self._calls: list[Call] = []
        self._modules: dict[str, ModuleOutput] = {}
        self._losses: list[float] = []
        self._local: dict[int, Sketch] = {}
        self._clipped: list[float] = []
        self._loss_line = ""
        self._before: dict[int, tuple[Sketch, Sketch | None]] = {}
        self._state: dict[str, tuple[float, float]] = {}
        self._kept: dict[str, Sketch] | None = None

    # -- torch ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Follow the script from now on. Called once, before it runs."""
        if self._plan.float64:
            torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        # Compiled graphs would hide the modules.
        replace_attributes(torch, ["compile"], lambda _: _uncompiled)
        self._loaders.install()
        self._draws.install()
        replace_attributes(nn.Module, ["__call__"], self._around_module)
        replace_attributes(torch.Tensor, ["backward"], self._around_backward)
        for kind, name in ((torch.Tensor, "register_hook"), (nn.Module, "register_full_backward_hook")):
            replace_attributes(kind, [name], self._around_hooks)
        for kind in (nn.Module, Optimizer):
            replace_attributes(kind, ["load_state_dict"], self._around_loading)
        replace_attributes(torch.multiprocessing, ["spawn", "start_processes"], self._around_start)
        replace_attributes(multiprocessing.Process, ["start"], self._around_start)
        replace_attributes(nn.utils, ["clip_grad_norm_"], self._around_clipping)
        replace_attributes(Optimizer, ["add_param_group"], self._around_groups)
        replace_attributes(torch.amp.GradScaler, ["step"], self._around_scaler)
        for kind in (LRScheduler, ReduceLROnPlateau):
            replace_attributes(kind, ["step"], self._around_scheduler)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        on_save(self._note_file)
        sys.addaudithook(self._audit)
        logger.addHandler(_Warnings(lambda text: self._write("warning", text)))

    def finish(self, how: str, error: BaseException | None = None) -> None:
        """Write how the script ended, and which line of it raised ``error``."""
        self._end(how, error)
        self._file.close()

    def _end(self, how: str, error: BaseException | None = None) -> None:
        last = None
        if how == "script":
            copies = self._names.copies(with_parameters=True)
            last = asdict(Last(self._names.buffers(), copies, tuple(self._metrics)))
        content = {
            "how": how,
            "line": "" if error is None else self._line_of_error(error),
            "batches_kept": self._loaders.batches_kept,
            "facts": self._noted or {},
            "last": last,
            "loaded": self._loaded,
            "lines_of_kept": self._lines_of_kept,
            "lines_of_copies": self._names.lines_of_copies(),
            "missing": "" if error is None else self._missing(error),
            "scheduler_line": self._scheduler_line,
            "hook_line": self._hook_line,
            "spawn_line": self._spawn_line,
        }
        self._write("end", content)

    def _missing(self, error: BaseException) -> str:
        """Return the file or folder that ended the script because only the user's folder has it beside it."""
        named: list[str] = []
        if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | bytes):
            named = [os.fsdecode(error.filename)]
        elif isinstance(error, ModuleNotFoundError) and error.name:
            named = [str(Path(folder, f"{error.name}{end}")) for folder in sys.path for end in ("", ".py")]
        beside = [os.path.relpath(self._here / one, self._here) for one in named]
        found = [one for one in beside if one.startswith("..") and Path(self._plan.origin, one).exists()]
        return found[0] if found else self._missing(error.__cause__) if error.__cause__ is not None else ""

    def _line_of_error(self, error: BaseException) -> str:
        """Return the innermost line of the script in the traceback of the error, or of what caused it."""
        causes = self._line_of_error(error.__cause__) if error.__cause__ is not None else ""
        lines = [self._line_in(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        return causes or next((line for line in reversed(lines) if line), "")

    def stop(self) -> NoReturn:
        """End the script: it has taken all steps, or there are no more batches."""
        raise StepsTaken(0)

    def line(self) -> str:
        """Return the line of the script that is running, ``train.py:31``."""
        return next((self._line_in(frame, frame.f_lineno) for frame in self._frames()), "")

    def _frames(self) -> Iterator[FrameType]:
        """Yield the functions of the script that are running, the innermost first."""
        frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
        while frame is not None:
            if self._line_in(frame, frame.f_lineno):
                yield frame
            frame = frame.f_back

    def _note_kept(self) -> None:
        """Note what the script keeps from step to step, when the first loss of a step is computed."""
        if self._kept is None:
            values = self._kept_values.now(self._frames())
            self._kept = {name: sketch for name, (sketch, _) in values.items()}
            self._lines_of_kept |= {name: line for name, (_, line) in values.items()}

    def _line_in(self, frame: FrameType, number: int) -> str:
        """Return the line as ``train.py:31``; empty if it is none of the script's."""
        name = frame.f_code.co_filename
        is_own = name.startswith(self._root) and not any(word in name for word in _LIBRARIES)
        return f"{name.removeprefix(self._root)}:{number}" if is_own else ""

    def _write(self, kind: str, value: Facts | Step | Loader | Written | Mapping[str, object] | str) -> None:
        if os.getpid() == self._pid and not self._file.closed:
            self._file.write(line_of(kind, value))
            self._file.flush()

    # -- loaders and files ---------------------------------------------------------------------------------

    def on_loader(self, loader: Loader) -> None:
        """Note a loader that is iterated for the first time."""
        self._write("loader", loader)

    def on_batch(self, batch: Batch) -> None:
        """Note a batch that is about to be given to the script."""
        self._unused.append(batch)

    def _note_use(self, *, is_trained: bool) -> None:
        """Note that a model is called, with the batches that were taken since the last call."""
        self._has_loader = self._has_loader or bool(self._unused)
        if _takes_own_data():
            self._batches += [replace(batch, is_trained=is_trained) for batch in self._unused]
        self._unused = []

    def _note_inputs(self, given: Sequence[torch.Tensor]) -> None:
        if given and _takes_own_data():
            self._rows += given[0].shape[0]
            self._inputs += sketches.digests_of_rows(given)

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wax+"):
            self._note_file(args[0])
        elif event == "open" and isinstance(args[0], str | bytes) and os.fsdecode(args[0]).endswith(WRITTEN):
            self._last_read = os.path.relpath(os.fsdecode(args[0]), self._here)

    def _note_file(self, name: object) -> None:
        if self._is_recording or not isinstance(name, str | bytes | os.PathLike):
            return
        self._is_recording = True
        try:
            given = Path(os.fsdecode(name)).absolute()
            _own_copy(given, self._root)
            path = str(given.resolve())
            line = self.line()
            if path.startswith(self._root) and path not in self._paths and line and len(self._paths) < MOST_FILES:
                self._paths.add(path)
                shown = path.removeprefix(self._root)
                if not any(part.startswith((".", "__")) for part in Path(shown).parts):
                    self._write("written", Written(shown, line))
        except OSError:
            pass
        finally:
            self._is_recording = False

    # -- models --------------------------------------------------------------------------------------------

    def _around_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Where new tensors are of another class, they have no data: pipeline() follows a model so.
            if is_transforming() or type(torch.empty(0)) is not torch.Tensor:
                # What is recorded of it would become a part of the graph, or has no values.
                return original(module, *args, **kwargs)
            if self._is_recording or not self._names.has_parameters(module):
                return self._parameterless(original, module, args, kwargs)
            if self._depth or not torch.is_grad_enabled() or in_backward():
                return self._inner(original, module, args, kwargs)
            return self._outermost(original, module, args, kwargs)

        return call

    def _parameterless(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = original(module, *args, **kwargs)
        if self._depth and not self._is_recording and "Dropout" in type(module).__name__:
            self._note_output(module, result)
        return result

    def _inner(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._depth:
            if not in_backward():
                self._note_use(is_trained=False)
                self._names.add_copy(module, self.line())
            if self._plan.float64:
                args, kwargs = self._names.cast(module, args, kwargs)
            return original(module, *args, **kwargs)
        result = original(module, *args, **kwargs)
        if not in_backward():
            self._note_output(module, result)
        return result

    def _outermost(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A script may have turned it on: the fastest algorithm found may differ from run to run.
        torch.backends.cudnn.benchmark = False
        root = self._names.add_root(module)
        self._note_use(is_trained=True)
        if self._plan.float64:
            args, kwargs = self._names.cast(root, args, kwargs)
        self._follow_gradients(root.parameters())
        given = sketches.with_rows(sketches.tensors_in((args, kwargs)))
        rows = given[0].shape[0] if given else 0
        floats = [one for one in given if one.is_floating_point()]
        states = torch_state()
        parts, joined_states = self._draws_of_ranks()
        self._draws.begin(rows, parts, joined_states, is_permuted=self._has_loader)
        self._depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            drew, by_rows = self._draws.end()
        self._keep_state(states, drew=drew)
        self._num_calls += 1
        self._note_inputs(given)
        self._calls.append(Call(rows, drew, by_rows, self.line()))
        self._note_output(root, result, sketches.of_rows(floats[0]) if floats else None)
        return result

    def _note_output(self, module: nn.Module, result: object, inputs: Sketch | None = None) -> None:
        if type(module).__name__ in WRAPPERS:
            return
        tensors = [one for one in sketches.tensors_in(result) if one.dim() > 0 and one.is_floating_point()]
        name = self._names.of(module)
        # Ranks that hold parts of layers all compute all rows.
        if not tensors or name is None or not _takes_own_data(but_stages=True):
            return
        output = sketches.of_rows(tensors[0])
        earlier = self._modules.get(name)
        if earlier is None:
            self._modules[name] = ModuleOutput(name, type(module).__name__, output, inputs)
        elif earlier.output.shape == output.shape:
            both = inputs if earlier.inputs is None else earlier.inputs
            if inputs is not None and earlier.inputs is not None and earlier.inputs.shape == inputs.shape:
                both = earlier.inputs + inputs
            self._modules[name] = ModuleOutput(name, earlier.kind, earlier.output + output, both)

    def _keep_state(self, state: State, *, drew: bool) -> None:
        if self._plan.keep and drew and not current_or_none():
            torch.save(state, Path(_batches(self._plan.record, self._rank), f"call-{self._num_calls}.state"))

    def _draws_of_ranks(self) -> tuple[list[int], list[State]]:
        if self._plan.join is None:
            return [], []
        folders = [_batches(self._plan.join, rank) for rank in range(self._plan.num_joined)]
        paths = [Path(folder, f"call-{self._num_calls}.state") for folder in folders]
        calls = [[call for step in rank.steps for call in step.calls] for rank in self._joined]
        if not all(path.exists() for path in paths) or any(len(one) <= self._num_calls for one in calls):
            return [], []
        return [one[self._num_calls].rows for one in calls], [torch.load(path) for path in paths]

    # -- loss and gradients --------------------------------------------------------------------------------

    def _around_groups(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def add(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            # Also those that are in no module.
            self._follow_gradients(optimizer.param_groups[-1]["params"])

        return add

    def _follow_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            key = id(parameter)
            if parameter.requires_grad and key not in self._hooked and not is_lazy(parameter):
                self._hooked[key] = parameter
                parameter.register_hook(self._hook_of(key))

    def _hook_of(self, key: int) -> Callable[[torch.Tensor | None], None]:
        def note(gradient: torch.Tensor | None) -> None:
            if gradient is None or is_transforming():
                # None of a part of the graph that nothing flowed through.
                return
            sketch = sketches.of_tensor(gradient)
            earlier = self._local.get(key)
            self._local[key] = sketch if earlier is None else earlier + sketch

        return note

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                self._losses.append(float(tensor.detach()))
            self._loss_line = self.line() or self._loss_line
            self._note_kept()
            return original(tensor, *args, **kwargs)

        return backward

    def _around_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def register(owner: torch.Tensor | nn.Module, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
            # Those of parameters are hooks on the gradient that ranks exchange.
            if not (isinstance(owner, torch.Tensor) and owner.is_leaf):
                self._hook_line = self._hook_line or self._line_in(frame, frame.f_lineno)
            return original(owner, *args, **kwargs)

        return register

    def _around_loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
            line = self._line_in(frame, frame.f_lineno)
            if line and not self._steps:
                self._loaded[self._last_read or "a state of its own"] = line
            return original(*args, **kwargs)

        return load

    def _around_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
            self._spawn_line = self._spawn_line or self._line_in(frame, frame.f_lineno)
            return original(*args, **kwargs)

        return start

    def _around_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            self._clipped.append(float(norm))
            return norm

        return clip

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            self._scales = {"scale of the loss": scaler.get_scale()}
            return original(scaler, *args, **kwargs)

        return step

    # -- strategies ----------------------------------------------------------------------------------------

    def of_strategies(self) -> dict[str, Callable[[ModuleType], Replaced]]:
        """Return what is changed in modules of rankwise's once they are imported."""

        def change(module: ModuleType) -> Replaced:
            name = module.__name__.rpartition(".")[2]
            # It may be bound already; it is looked up again.
            sys.modules["rankwise"].__dict__.pop(name, None)
            return replace_attributes(module, [name], self._around_strategy)

        changes = {f"rankwise.parallel.{name}": change for name in _STRATEGIES}
        step = "rankwise.parallel.pipeline.step_api"
        return {**changes, step: lambda module: replace_attributes(module.Pipeline, ["__call__"], self._around_staged)}

    def _around_strategy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        @wraps(original)
        def apply(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = [f"{key}={value!r}" for key, value in kwargs.items() if _gives_up_equality(key, value)]
            if given or name == "local_sgd":
                self._inexact[f"rankwise.{name}({', '.join(given)})"] = self.line()
            if name == "pipeline" and self._world_size == 1:
                # The reference is one device, which computes the batch as a whole.
                kwargs |= {"micro_batches": 1, "split": None}
            # Strategies call models to look at them.
            is_recording, self._is_recording = self._is_recording, True
            try:
                result = original(model, *args, **kwargs)
            finally:
                self._is_recording = is_recording
            if name == "pipeline":
                # It calls layers, not the model.
                self._names.add_root(model)
            return result

        return apply

    def _around_staged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(step: Any, x: object, target: object) -> torch.Tensor:
            self._note_use(is_trained=True)
            self._note_inputs(sketches.with_rows(sketches.tensors_in(x)))
            self._loss_line = self.line()
            self._note_kept()
            states, self._depth = torch_state(), self._depth + 1
            try:
                loss = original(step, x, target)
            finally:
                self._depth -= 1
            self._losses.append(float(loss))
            self._calls.append(Call(0, not _are_equal(states, torch_state()), drew_by_rows=False, line=self._loss_line))
            return loss

        return call

    # -- steps ---------------------------------------------------------------------------------------------

    def _around_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            # A scheduler of schedulers steps its own.
            self._scheduler_depth += 1
            if isinstance(scheduler, ReduceLROnPlateau):
                self._scheduler_line = self.line()
                self._metrics += [float(one) for one in (*args[:1], *_named(kwargs, "metrics"))]
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._scheduler_depth -= 1
                self._schedulers += self._scheduler_depth == 0

        return step

    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if id(optimizer) not in self._optimizers:
            same = sum(type(one) is type(optimizer) for one, _ in self._optimizers.values())
            name = type(optimizer).__name__ + (f"#{same + 1}" if same else "")
            self._optimizers[id(optimizer)] = optimizer, name
        self._impose(optimizer)
        self._state = {}
        for group in optimizer.param_groups:
            for parameter in filter(_is_held, group["params"]):
                name = self._names.parameter(parameter) or f"parameter {len(self._before)}"
                self._state |= _state_of(optimizer.state.get(parameter, {}), name)
                gradient = None if parameter.grad is None else sketches.of_tensor(parameter.grad)
                self._before[id(parameter)] = sketches.of_tensor(parameter), gradient

    def _impose(self, optimizer: Optimizer) -> None:
        """Take the hyperparameters of the run whose batches were joined."""
        self._own = []
        if self._joined and self._steps < len(self._joined[0].steps):
            theirs = self._joined[0].steps[self._steps].hyperparameters
            for group, values in zip(optimizer.param_groups, theirs, strict=False):
                self._own.append({key: group[key] for key in values if key in group})
                for key, value in values.items():
                    _set(group, key, value)

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Those of a model that is called in parts, or is no module.
        self._note_use(is_trained=True)
        name = self._optimizers[id(optimizer)][1]
        hyperparameters = tuple(_numbers(group) | self._scales for group in optimizer.param_groups)
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            for key, value in own.items():
                if not isinstance(group[key], torch.Tensor):
                    group[key] = value
        parameters: list[Parameter] = []
        for group in optimizer.param_groups:
            for parameter in filter(_is_held, group["params"]):
                before, gradient = self._before[id(parameter)]
                known = self._names.parameter(parameter) or f"parameter {len(parameters)} of {name}"
                local = self._local.get(id(parameter))
                ranks = sketches.ranks_of_parts(parameter)
                parameters.append(Parameter(known, gradient, local, before, sketches.of_tensor(parameter), ranks))
        self._steps += 1
        if self._noted is None and current_or_none() is not None:
            self._noted = _facts_of_rankwise() | {"inexact": self._inexact}
        self._write(
            "step",
            Step(
                self._steps,
                name,
                self._rows,
                tuple(self._inputs),
                tuple(self._batches),
                tuple(self._calls),
                tuple(self._modules.values()),
                tuple(self._losses),
                tuple(parameters),
                self._names.buffers(),
                hyperparameters,
                tuple(self._clipped),
                self._schedulers,
                self._loss_line,
                self.line(),
                self._state,
                self._names.copies(),
                tuple(self._metrics),
                self._kept or {},
            ),
        )
        self._metrics = []
        self._clear()
        if self._steps >= self._plan.steps:
            self._end("steps")
            self.stop()


def _gives_up_equality(option: str, value: object) -> bool:
    """Return whether an option of a strategy makes it give another result than one rank's."""
    return (option, value) == ("mode", "async") or (option == "compress" and value is not None)


def _are_equal(one: State, other: State) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def _takes_own_data(*, but_stages: bool = False) -> bool:
    """Return whether no rank before this one takes the same samples: one of its layers, or of its pipeline."""
    session = current_or_none()
    if session is None or session.axes is None:
        return True
    rank, axes = session.world.rank, session.axes
    return not axes.coordinate(rank, "tp") and (but_stages or not axes.coordinate(rank, "pp"))


def _is_held(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds the values of a parameter: other stages of a pipeline do not."""
    return not parameter.is_meta


def _named(kwargs: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    return (kwargs[name],) if name in kwargs else ()


def _facts_of_rankwise() -> dict[str, object]:
    # In memory only if the script uses rankwise.
    from rankwise.parallel.core.strategy_registry import strategies_by_parameter  # noqa: PLC0415
    from rankwise.parallel.randomness.model_draws import ways_to_draw  # noqa: PLC0415

    strategies = sorted(set(strategies_by_parameter().values()))
    session = current()
    rank = session.world.rank
    return {
        "uses_rankwise": True,
        "strategies": strategies,
        "data_rank": rank if session.axes is None else session.axes.data_rank(rank),
        "randomness": sorted(ways_to_draw()),
    }


class _Warnings(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Notes what rankwise warns of that makes results depend on the number of ranks, and shows all that it logs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[rankwise] %(message)s"))
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        # The module that warns: above logging, and rankwise.log.
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - public in all but name
        while frame is not None and frame.f_globals["__name__"] in {"logging", "rankwise.log"}:
            frame = frame.f_back
        source = "" if frame is None else frame.f_globals["__name__"]
        if record.levelno >= logging.WARNING and source.startswith(_ABOUT_RESULTS) and source != _ABOUT_SPEED:
            self._note(record.getMessage())
        super().emit(record)


def _state_of(held: Mapping[Any, Any], parameter: str) -> dict[str, tuple[float, float]]:
    """Return the sum and the norm of each tensor that an optimizer holds for a parameter."""
    found: dict[str, tuple[float, float]] = {}
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and value.numel() and (value.is_floating_point() or value.dim() == 0):
            wide = value.detach().double()
            found[f"{key} of {parameter}"] = float(wide.sum()), float(wide.norm())
    return found


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group that are numbers."""
    found: dict[str, float] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[key] = float(value)
        elif isinstance(value, tuple) and all(isinstance(one, int | float) for one in value):
            found |= {f"{key}[{number}]": float(one) for number, one in enumerate(value)}
    return found


def _set(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    elif isinstance(group.get(key), float):
        group[key] = value


def _own_copy(path: Path, root: str) -> None:
    """Replace a link to one of the user's large files by a copy, before the script writes to it."""
    if path.is_symlink() and str(path).startswith(root):
        content = path.resolve()
        path.unlink()
        if content.is_file():
            path.write_bytes(content.read_bytes())


def _uncompiled(model: Any = None, **_: object) -> Any:
    """Stand in for ``torch.compile``: return the model or function as it is."""
    return (lambda one: one) if model is None else model
