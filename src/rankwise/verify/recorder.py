# SPDX-License-Identifier: Apache-2.0
"""Records what the script does in each step: hooks on torch, installed before the script runs.

Every value is reduced to a sketch or a digest at once; nothing communicates. Imported by ``runs``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from rankwise.auto.replacing import replace_attributes
from rankwise.comm.session import current_or_none
from rankwise.comm.step_hooks import Follower, Phase, follow
from rankwise.log import logger
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import is_transforming
from rankwise.verify import sketches
from rankwise.verify.kept import KeptValues
from rankwise.verify.loaders import Loaders, RowDraws, StepsTaken, torch_state
from rankwise.verify.models import (
    STRATEGIES,
    WRAPPERS,
    Names,
    Warnings,
    gives_up_equality,
    numbered,
    takes_own_data,
    with_rankwise,
)
from rankwise.verify.records import (
    Batch,
    Call,
    Facts,
    Last,
    ModuleOutput,
    Parameter,
    Plan,
    Sketch,
    Step,
    add_to,
)
from rankwise.verify.script_files import FileNotes, ScriptLines, missing_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.verify.loaders import State


@dataclass(slots=True)
class _Since:
    """What has happened since the last step: fields of :class:`Step`."""

    rows: int = 0
    inputs: list[int] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    loss_line: str = ""


@dataclass(slots=True)
class _Sketched:
    """The sketches of tensors since the last step."""

    modules: dict[str, ModuleOutput] = field(default_factory=dict)
    kept: dict[str, Sketch] | None = None
    local: dict[torch.Tensor, Sketch] = field(default_factory=dict)
    stepped: list[tuple[torch.Tensor, Parameter]] = field(default_factory=list)
    state: dict[str, tuple[float, float]] = field(default_factory=dict)
    has_loader: bool = False
    """Whether the script has taken batches from a loader."""


class Recorder(Follower):
    """What one rank records, from :meth:`install` to :meth:`finish`.

    Its many fields are one script's run: what follows a part of torch each, and counters that hooks on torch share.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        Path(plan.record).mkdir(parents=True, exist_ok=True)
        self._plan = plan
        self._rank = rank
        self._pid = os.getpid()
        self._file = plan.path(rank).open("wb")
        self._lines = ScriptLines(plan.root)
        self._draws = RowDraws(permutes=plan.permute)
        self._loaders = Loaders(plan, rank, self._lines, lambda loader: self._write(loaders=loader))
        self._files = FileNotes(self._lines, lambda written: self._write(written=written))
        self._names = Names()
        self._kept_values = KeptValues(self._lines.root)
        self._facts = Facts(rank, "float64" if plan.float64 else "as-is", data_rank=rank)
        self._found: dict[str, Any] = {"lines_of_kept": {}, "loaded": {}}
        """Fields of :class:`RankRun` that are written at the end."""
        self._steps = 0
        self._num_calls = 0
        self._depth = 0
        self._is_recording = False
        self._schedulers = 0
        self._scheduler_depth = 0
        self._optimizers: dict[Optimizer, str] = {}
        self._own: list[dict[str, Any]] = []
        self._scales: dict[str, float] = {}
        self._hooked: set[torch.Tensor] = set()
        self._inexact: dict[str, str] = {}
        self._clear()
        self._write(facts=self._facts)
        if plan.keep:
            plan.batches(rank).mkdir(exist_ok=True)
        self._joined = list(plan.join.ranks) if plan.join else []

    def _clear(self) -> None:
        self._since, self._sketched = _Since(), _Sketched()

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
        package = sys.modules["rankwise"]
        for name in STRATEGIES:
            package.__dict__.pop(name, None)
        replace_attributes(package, ["__getattr__"], self._around_public_names)
        replace_attributes(nn.Module, ["__call__"], self._around_module)
        for kind in (LRScheduler, ReduceLROnPlateau):
            replace_attributes(kind, ["step"], self._around_scheduler)
        self._watch(torch.Tensor, "backward", self._note_backward)
        self._watch(torch.Tensor, "register_hook", self._note_hook)
        self._watch(nn.Module, "register_full_backward_hook", self._note_hook)
        for kind in (nn.Module, Optimizer):
            self._watch(kind, "load_state_dict", self._note_loading)
        for owner, name in (
            (torch.multiprocessing, "spawn"),
            (torch.multiprocessing, "start_processes"),
            (multiprocessing.Process, "start"),
        ):
            self._watch(owner, name, lambda line, *_, **__: self._note_line("spawn_line", line))
        self._watch(torch.amp.GradScaler, "step", self._note_scale)
        self._watch(nn.utils, "clip_grad_norm_", after=lambda norm, *_: self._since.clipped.append(float(norm)))
        # Also parameters that are in no module.
        self._watch(
            Optimizer,
            "add_param_group",
            after=lambda _, optimizer, *__: self._follow_gradients(optimizer.param_groups[-1]["params"]),
        )
        follow(self, Phase.WATCH)
        self._files.install()
        logger.addHandler(Warnings(lambda text: self._write(warnings=text)))

    def _watch(
        self,
        owner: object,
        name: str,
        before: Callable[..., None] = lambda *_, **__: None,
        after: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """Have calls noted: before them their line, if it is one of the script's, and arguments; after them the result.

        Args:
            owner: a module or a class.
            name: of its function.
            before: receives the line and the arguments.
            after: receives the result and the arguments by position.
        """

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
                before(self._lines.of(frame, frame.f_lineno), *args, **kwargs)
                result = original(*args, **kwargs)
                after(result, *args)
                return result

            return call

        replace_attributes(owner, [name], watched)

    def finish(self, how: str, error: BaseException | None = None) -> None:
        """Write how the script ended, and which line of it raised ``error``."""
        self._end(how, error)
        self._file.close()

    def _end(self, how: str, error: BaseException | None = None) -> None:
        if how == "script":
            copies = self._names.copies(with_parameters=True)
            self._found["last"] = Last(self._names.buffers(), copies, self._since.metrics)
        if error is not None:
            self._found["end_line"] = self._lines.of_error(error)
            self._found["missing"] = missing_file(error, self._files.here, self._plan.origin)
        self._write(
            end=how,
            batches_kept=self._loaders.batches_kept,
            lines_of_copies=self._names.lines_of_copies(),
            **self._found,
        )

    def _note_line(self, name: str, line: str) -> None:
        """Note the first line of the script that does something: a field of :class:`RankRun`."""
        if line:
            self._found.setdefault(name, line)

    def _write(self, **values: object) -> None:
        if os.getpid() == self._pid and not self._file.closed:
            add_to(self._file, **values)

    # -- loaders and files ---------------------------------------------------------------------------------

    def _note_use(self, *, is_trained: bool) -> None:
        """Record that a model is called, with the batches that were taken since the last call."""
        batches = self._loaders.taken()
        self._sketched.has_loader = self._sketched.has_loader or bool(batches)
        if takes_own_data():
            self._since.batches += [replace(batch, is_trained=is_trained) for batch in batches]

    def _note_inputs(self, given: Sequence[torch.Tensor]) -> None:
        if given and takes_own_data():
            self._since.rows += given[0].shape[0]
            self._since.inputs += sketches.digests_of_rows(given)

    def _note_loading(self, line: str, *_: Any, **__: Any) -> None:
        if line and not self._steps:
            self._found["loaded"][self._files.last_read or "a state of its own"] = line

    # -- models --------------------------------------------------------------------------------------------

    def _around_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Where new tensors are of another class, they have no data: pipeline() follows a model so.
            if is_transforming() or type(torch.empty(0)) is not torch.Tensor:
                # What is recorded of it would become a part of the graph, or has no values.
                return original(module, *args, **kwargs)
            is_model = self._names.has_parameters(module)
            if self._is_recording or self._depth or not is_model:
                result = original(module, *args, **kwargs)
                is_shown = not in_backward() if is_model else "Dropout" in type(module).__name__
                if self._depth and not self._is_recording and is_shown:
                    self._note_output(module, result)
                return result
            if self._plan.float64:
                args, kwargs = self._names.cast(module, args, kwargs)
            if not in_backward():
                if torch.is_grad_enabled():
                    return self._outermost(original, module, args, kwargs)
                self._note_use(is_trained=False)
                self._names.add_copy(module, self._lines.running())
            return original(module, *args, **kwargs)

        return call

    def _outermost(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A script may have turned it on: the fastest algorithm found may differ from run to run.
        torch.backends.cudnn.benchmark = False
        root = self._names.add_root(module)
        self._note_use(is_trained=True)
        self._follow_gradients(root.parameters())
        given = sketches.with_rows(sketches.tensors_in((args, kwargs)))
        rows = given[0].shape[0] if given else 0
        floats = [one for one in given if one.is_floating_point()]
        states = torch_state()
        parts, joined_states = self._draws_of_ranks()
        self._draws.begin(rows, parts, joined_states, is_permuted=self._sketched.has_loader)
        self._depth += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            drew, by_rows = self._draws.end()
        if self._plan.keep and drew and not current_or_none():
            torch.save(states, self._plan.batches(self._rank) / f"call-{self._num_calls}.state")
        self._num_calls += 1
        self._note_inputs(given)
        self._since.calls.append(Call(rows, drew, by_rows, self._lines.running()))
        self._note_output(root, result, sketches.of_rows(floats[0]) if floats else None)
        return result

    def _note_output(self, module: nn.Module, result: object, inputs: Sketch | None = None) -> None:
        tensors = [one for one in sketches.tensors_in(result) if one.dim() > 0 and one.is_floating_point()]
        name = self._names.of(module)
        # Ranks that hold parts of layers all compute all rows.
        if type(module).__name__ in WRAPPERS or not tensors or name is None or not takes_own_data(but_stages=True):
            return
        found = ModuleOutput(name, type(module).__name__, sketches.of_rows(tensors[0]), inputs)
        earlier = self._sketched.modules.get(name)
        if earlier is None or earlier.output.shape == found.output.shape:
            self._sketched.modules[name] = found if earlier is None else earlier.plus(found)

    def _draws_of_ranks(self) -> tuple[list[int], list[State]]:
        paths = [path / f"call-{self._num_calls}.state" for path in self._plan.joined_batches]
        calls = [[call for step in rank.steps for call in step.calls] for rank in self._joined]
        if not all(path.exists() for path in paths) or any(len(one) <= self._num_calls for one in calls):
            return [], []
        return [one[self._num_calls].rows for one in calls], [torch.load(path) for path in paths]

    # -- loss and gradients --------------------------------------------------------------------------------

    def _follow_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked and not is_lazy(parameter):
                self._hooked.add(parameter)
                parameter.register_hook(partial(self._note_gradient, parameter))

    def _note_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        # None of a part of the graph that nothing flowed through.
        if gradient is not None and not is_transforming():
            sketch, earlier = sketches.of_tensor(gradient), self._sketched.local.get(parameter)
            self._sketched.local[parameter] = sketch if earlier is None else earlier + sketch

    def _note_backward(self, _line: str, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        if tensor.numel() == 1:
            self._since.losses.append(float(tensor.detach()))
        self._note_loss_line()

    def _note_loss_line(self) -> None:
        """Note where a loss is computed, and with the first one of a step what the script keeps from step to step."""
        self._since.loss_line = self._lines.running() or self._since.loss_line
        if self._sketched.kept is None:
            values = self._kept_values.now(self._lines.frames())
            self._sketched.kept = {name: sketch for name, (sketch, _) in values.items()}
            self._found["lines_of_kept"] |= {name: line for name, (_, line) in values.items()}

    def _note_hook(self, line: str, owner: torch.Tensor | nn.Module, *_: Any, **__: Any) -> None:
        # Those of parameters are hooks on the gradient that ranks exchange.
        if not (isinstance(owner, torch.Tensor) and owner.is_leaf):
            self._note_line("hook_line", line)

    def _note_scale(self, _line: str, scaler: torch.amp.GradScaler, *_: Any, **__: Any) -> None:
        self._scales = {"scale of the loss": scaler.get_scale()}

    # -- strategies ----------------------------------------------------------------------------------------

    def _around_public_names(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        """Follow calls of strategies, which rankwise imports when a script first names them."""

        @wraps(original)
        def find(name: str) -> Any:
            found = original(name)
            if name in STRATEGIES:
                found = self._around_strategy(found)
                setattr(sys.modules["rankwise"], name, found)
            return found

        return find

    def _around_strategy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        @wraps(original)
        def apply(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = [f"{key}={value!r}" for key, value in kwargs.items() if gives_up_equality(key, value)]
            if given or name == "local_sgd":
                self._inexact[f"rankwise.{name}({', '.join(given)})"] = self._lines.running()
            if name == "pipeline" and self._plan.num_scripts == 1:
                # The reference is one device, which computes the batch as a whole.
                kwargs |= {"micro_batches": 1, "split": None}
            # Strategies call models to look at them.
            is_recording, self._is_recording = self._is_recording, True
            try:
                with self._files.paused():
                    result = original(model, *args, **kwargs)
            finally:
                self._is_recording = is_recording
            if name == "pipeline":
                # It calls layers, not the model.
                self._names.add_root(model)
                if not hasattr(type(result).__call__, "__wrapped__"):
                    replace_attributes(type(result), ["__call__"], self._around_staged)
            return result

        return apply

    def _around_staged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(step: Any, x: object, target: object) -> torch.Tensor:
            self._note_use(is_trained=True)
            self._note_inputs(sketches.with_rows(sketches.tensors_in(x)))
            self._note_loss_line()
            states, self._depth = torch_state(), self._depth + 1
            try:
                loss = original(step, x, target)
            finally:
                self._depth -= 1
            self._since.losses.append(float(loss))
            drew = not all(map(torch.equal, states, torch_state()))
            self._since.calls.append(Call(0, drew, drew_by_rows=False, line=self._since.loss_line))
            return loss

        return call

    # -- steps ---------------------------------------------------------------------------------------------

    def _around_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            # A scheduler of schedulers steps its own.
            self._scheduler_depth += 1
            if isinstance(scheduler, ReduceLROnPlateau):
                self._found["scheduler_line"] = self._lines.running()
                self._since.metrics.append(float(args[0] if args else kwargs["metrics"]))
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._scheduler_depth -= 1
                self._schedulers += self._scheduler_depth == 0

        return step

    def before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Note what the step uses."""
        self._optimizers.setdefault(optimizer, numbered(optimizer, self._optimizers))
        self._impose(optimizer)
        self._sketched.stepped, self._sketched.state = [], {}
        held = (one for group in optimizer.param_groups for one in group["params"])
        for parameter in (one for one in held if not one.is_meta):  # the others are of other stages of a pipeline
            name = self._names.parameter(parameter)
            name = name or f"parameter {len(self._sketched.stepped)} of {self._optimizers[optimizer]}"
            self._sketched.state |= sketches.of_optimizer_state(optimizer.state.get(parameter, {}), name)
            gradient = None if parameter.grad is None else sketches.of_tensor(parameter.grad)
            before, ranks = sketches.of_tensor(parameter), sketches.ranks_of_parts(parameter)
            self._sketched.stepped.append((parameter, Parameter(name, gradient, None, before, before, ranks)))

    def _impose(self, optimizer: Optimizer) -> None:
        """Take the hyperparameters of the run whose batches were joined."""
        self._own = []
        if self._joined and self._steps < len(self._joined[0].steps):
            theirs = self._joined[0].steps[self._steps].hyperparameters
            for group, values in zip(optimizer.param_groups, theirs, strict=False):
                self._own.append({key: group[key] for key in values if key in group})
                for key, value in values.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    elif isinstance(group.get(key), float):
                        group[key] = value

    def after_step(self, optimizer: Optimizer) -> None:
        """Write the step."""
        # Those of a model that is called in parts, or is no module.
        self._note_use(is_trained=True)
        hyperparameters = tuple(sketches.hyperparameters_of(group) | self._scales for group in optimizer.param_groups)
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            group |= {key: value for key, value in own.items() if not isinstance(group[key], torch.Tensor)}
        self._steps += 1
        if not self._facts.uses_rankwise and current_or_none() is not None:
            self._facts = with_rankwise(self._facts, self._inexact)
            self._write(facts=self._facts)
        step = Step(
            number=self._steps,
            optimizer=self._optimizers[optimizer],
            modules=tuple(self._sketched.modules.values()),
            parameters=tuple(
                replace(one, local=self._sketched.local.get(parameter), after=sketches.of_tensor(parameter))
                for parameter, one in self._sketched.stepped
            ),
            buffers=self._names.buffers(),
            hyperparameters=hyperparameters,
            num_scheduler_steps=self._schedulers,
            step_line=self._lines.running(),
            state=self._sketched.state,
            copies=self._names.copies(),
            kept=self._sketched.kept or {},
            **{one.name: getattr(self._since, one.name) for one in fields(_Since)},
        )
        self._write(steps=step)
        self._clear()
        if self._steps >= self._plan.steps:
            self._end("steps")
            raise StepsTaken(0)


def _uncompiled(model: Any = None, **_: object) -> Any:
    """Stand in for ``torch.compile``: return the model or function as it is."""
    return (lambda one: one) if model is None else model
