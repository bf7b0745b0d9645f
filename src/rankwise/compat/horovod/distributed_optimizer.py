# SPDX-License-Identifier: Apache-2.0
"""``DistributedOptimizer``: an optimizer whose ``step`` combines the gradients of all ranks first, or their steps."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, cast

import torch

from rankwise.compat.horovod.api import synchronize
from rankwise.compat.horovod.compression import Compression
from rankwise.compat.horovod.exceptions import NotOffered
from rankwise.compat.horovod.gradients import GradientOrderError, GradientReduction, Gradients, PassCounter
from rankwise.compat.horovod.initialization import size
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.reducing import allreduce_async_
from rankwise.compat.horovod.request import Adasum, Average, known_op
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch import nn

W = TypeVar("W", bound="WrappedOptimizer")


class WrappedOptimizer(torch.optim.Optimizer):
    """The first base of a class that is otherwise the wrapped optimizer's own."""

    backward_passes_per_step: int
    _parameter_names: dict[nn.Parameter, str]
    """Named as in Horovod's optimizers, since subclasses and scripts read it."""
    _passes: PassCounter | None = None
    """``None`` if there are no other ranks to combine with."""
    _frozen: list[nn.Parameter]
    _synchronized = False
    _should_synchronize = True

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that no step has used."""
        return self._passes is not None and self._passes.is_pending

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise: a copy would not correspond to an optimizer on the other ranks."""
        raise ConfigurationError(
            "A DistributedOptimizer cannot be pickled or copied.",
            do="save optimizer.state_dict(), and load it into a newly wrapped optimizer",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and combine their gradients too."""
        super().add_param_group(param_group)
        known = {*map(id, self._parameter_names)}
        index = len(self.param_groups) - 1
        for number, parameter in enumerate(self.param_groups[index]["params"]):
            if id(parameter) not in known:
                self._parameter_names[parameter] = f"allreduce.noname.{index}.{number}"
        self._follow(self.param_groups[index]["params"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this number of backward passes before each step, from now on.

        Complete gradients of the current step remain complete, since they may be being sent already: the next backward
        that adds to one before ``step()`` raises a GradientOrderError. The others get ``passes`` more.
        """
        self.backward_passes_per_step = passes
        if self._passes is not None:
            self._passes.expect(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; gradients that were not combined yet are discarded."""
        self._synchronized = False
        self._should_synchronize = True
        # A single rank may load: if nothing is being sent, its channels must remain as on the others.
        if self.is_pending:
            self.forget_gradients()
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # Keep the same dicts: a scheduler that was created before the optimizer was wrapped refers to them.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Clear the gradients.

        Raises:
            GradientOrderError: no step has used them yet. It is an ``AssertionError`` too.
        """
        if self.is_pending:
            raise GradientOrderError(
                "zero_grad() was called after backward() and before step() or synchronize(): gradients that are "
                "already being reduced would be lost.",
                do="call zero_grad() before the first backward() of a step, or after step()",
            )
        super().zero_grad(set_to_none)

    def _follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients of parameters; of frozen ones, once they are no longer frozen."""
        if self._passes is not None:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._passes.follow([self._parameter_names[parameter] for parameter in trained], trained)
            self._frozen += [parameter for parameter in parameters if not parameter.requires_grad]

    def _follow_unfrozen(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            were_frozen, self._frozen = self._frozen, []
            self._follow(were_frozen)

    def forget_gradients(self) -> None:
        """Discard gradients that were computed but not combined."""
        if self._passes is not None:
            self._passes.start_over()


def wrapped(kind: type[W], optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], passes: int) -> W:
    """Return an optimizer with the class and the state of ``optimizer``, which is a ``kind`` too."""
    own = type(optimizer)
    both = type(own.__name__, (kind, own), {"__doc__": own.__doc__, "__module__": own.__module__})
    result = object.__new__(both)
    vars(result).update(vars(optimizer), backward_passes_per_step=passes, _parameter_names=names, _frozen=[])
    # A scheduler may have stored the optimizer's own step here.
    vars(result).pop("step", None)
    return cast("W", result)


def DistributedOptimizer(  # noqa: N802, PLR0917 - as people write and call it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - as people call it
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer: before each ``step`` the gradients of all ranks are combined.

    Called by: every rank, in the same order.

    The mean is over ranks, whatever the size of their batches; gradients of several backward passes are added up and
    not divided by their number. A parameter without a gradient counts as zero, and has one afterwards. Gradients are
    sent while the last backward pass runs.

    Args:
        optimizer: must not be used itself afterwards; its state and options are taken over.
        named_parameters: ``model.named_parameters()``, or pairs of name and parameter.
        compression: ``Compression.none``, ``Compression.fp16``, or a class with ``compress`` and ``decompress``.
        backward_passes_per_step: the largest number of backward passes before a step.
        op: ``Average``, ``Sum``, ``Adasum`` (which combines the steps instead), ``Min``, ``Max``, ``Product``.
        gradient_predivide_factor: gradients are divided by it before they are averaged, and multiplied afterwards.
        num_groups: as an integer in ``groups``.
        groups: which gradients Horovod would send together. Checked only: here they are sent in buckets.
        sparse_as_dense: make sparse gradients dense before they are sent.
        process_set: the ranks to combine over.

    Returns:
        An optimizer of a subclass of ``optimizer``'s class, of the same name.

    Raises:
        ConfigurationError: an argument is bad; it is a ``ValueError``.
        NotOffered: Adasum within a process set; it is a ``NotImplementedError``.
    """
    _check(optimizer, backward_passes_per_step, gradient_predivide_factor, op)
    _check_reduction(op, compression, process_set)
    if num_groups != 0:
        # Begins as Horovod's, which people filter on.
        message = "Parameter `num_groups` has been replaced by `groups`. Pass groups=."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _names(optimizer, named_parameters)
    _check_groups(groups)
    if op == Adasum and size() > 1:
        if process_set.process_set_id != global_process_set.process_set_id:
            raise NotOffered(
                "Adasum combines the steps of all ranks, not of a process set.", do="leave out process_set=, or op="
            )
        stepping = wrapped(AdasumOptimizer, optimizer, names, backward_passes_per_step)
        stepping.begin(compression)
        return stepping
    averaging = wrapped(AveragingOptimizer, optimizer, names, backward_passes_per_step)
    averaging.begin(GradientReduction(op, compression, gradient_predivide_factor, sparse_as_dense, process_set))
    return averaging


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    own = [
        (f"allreduce.noname.{index}.{number}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]
    if callable(named_parameters):
        raise ConfigurationError(
            "named_parameters was passed as a function.", do="call it: named_parameters=model.named_parameters()"
        )
    named: Sequence[Any] = own if named_parameters is None else list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in named):
        raise ConfigurationError(
            "named_parameters must be pairs of a name and a parameter.",
            evidence=f"it holds {', '.join(sorted({type(one).__name__ for one in named}))}",
            do="pass model.named_parameters()",
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigurationError(
            "Names in named_parameters must be unique.",
            evidence=f"more than once: {', '.join(map(str, twice))}",
            do="for several models, add a prefix to the names of each",
        )
    names = {parameter: name for name, parameter in named}
    unnamed = [(name, parameter) for name, parameter in own if parameter not in names]
    if unnamed:
        shapes = ", ".join(f"{name.removeprefix('allreduce.noname.')}: {list(p.shape)}" for name, p in unnamed)
        raise ConfigurationError(
            "The optimizer has parameters that named_parameters does not name.",
            evidence=f"by parameter group and index, with shapes: {shapes}",
            do="name every parameter of the optimizer, or omit named_parameters",
        )
    return names


def _check(optimizer: object, passes: int, predivide_factor: float, op: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"DistributedOptimizer takes an optimizer of torch, not {type(optimizer).__name__}.",
            do="hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))",
        )
    if isinstance(optimizer, WrappedOptimizer):
        raise ConfigurationError(
            "The optimizer is a DistributedOptimizer already.", do="wrap the plain optimizer, once"
        )
    if predivide_factor == 0.0:
        raise ConfigurationError(
            "gradient_predivide_factor must not be 0: gradients are divided by it.", do="leave it out"
        )
    if predivide_factor != 1.0 and op != Average:
        raise ConfigurationError(
            "gradient_predivide_factor is for op=Average only.", do="leave it out, or leave out op="
        )
    if passes <= 0:
        raise ConfigurationError(
            f"backward_passes_per_step must be 1 or more, not {passes}.",
            do="pass the number of backward passes before each step",
        )


def _check_reduction(op: int, compression: object, process_set: object) -> None:
    known_op(op)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ConfigurationError(
            f"compression must have compress and decompress, got {compression!r}.",
            do="pass hvd.Compression.none or hvd.Compression.fp16",
        )
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        raise ConfigurationError(
            f"process_set is {process_set!s}, which is not registered.", do="pass what hvd.add_process_set() returned"
        )


def _check_groups(groups: object) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise ConfigurationError(
            f"groups must be a number of groups, or a list of lists of parameters, not {groups!r}.",
            do="leave it out: gradients travel in buckets anyway",
        )
    seen: set[int] = set()
    for parameter in (one for group in groups for one in group):  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(parameter, torch.Tensor):
            raise ConfigurationError("groups must hold tensors.", evidence=f"it holds a {type(parameter).__name__}")
        if id(parameter) in seen:
            raise ConfigurationError("A parameter can be in one of groups only.", do="name it once")
        seen.add(id(parameter))


class AveragingOptimizer(WrappedOptimizer):
    """The class for every op but Adasum: combines gradients, then every rank takes the same step."""

    process_set: ProcessSet
    _gradients: Gradients | None

    def begin(self, reduction: GradientReduction) -> None:
        """Combine gradients from now on, if other ranks are in the process set."""
        process_set = self.process_set = reduction.process_set
        self._gradients = None
        if process_set.included() and (process_set.size() or 1) > 1:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            names = [self._parameter_names[parameter] for parameter in trained]
            self._gradients = Gradients(names, trained, reduction, self.backward_passes_per_step)
            self._passes = self._gradients.passes
            self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def synchronize(self) -> None:
        """Combine all gradients over the ranks, so that they can be changed before ``step``, for example clipped.

        Called by: every rank of the process set.
        """
        if self._gradients is not None:
            self._follow_unfrozen()
            self._gradients.reduce()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Return a context in which ``step`` uses the gradients as :meth:`synchronize` has left them."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Combine all gradients over the ranks, and step.

        Called by: every rank of the process set.

        Args:
            closure: computes the loss, and gradients if there are none yet; they are combined after it.
        """
        gradients = self._gradients
        is_late = self._should_synchronize and closure is not None and gradients is not None and not self.is_pending
        if self._should_synchronize and not is_late:
            if self._synchronized:
                # Begins as Horovod's, which people filter on.
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). "
                    "Gradients that were already reduced are reduced again: write `with optimizer.skip_synchronize(): "
                    "optimizer.step()`.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is None:
            super().step()
            return None

        def combining() -> float:
            loss = closure()
            # Late gradients come from the closure of some rank, perhaps not of this one.
            if gradients is not None and (is_late or self.is_pending):
                gradients.reduce()
            return loss

        return super().step(combining)

    def forget_gradients(self) -> None:
        """Discard gradients that were computed but not combined, or are being sent."""
        if self._gradients is not None:
            self._gradients.forget()


class AdasumOptimizer(WrappedOptimizer):
    """The class for Adasum: every rank steps on its own, then the changes of the parameters are combined.

    Source: Maleki et al. (arXiv:2006.02924), extended from gradients to the steps of any optimizer.
    """

    _compression: Any

    def begin(self, compression: Any) -> None:
        """Count backward passes from now on."""
        self._compression = compression
        self._passes = PassCounter(self.backward_passes_per_step, lambda _: None)
        for group in self.param_groups:
            self._follow(group["params"])

    def synchronize(self) -> None:
        """Do nothing: gradients are not combined."""

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Raise: steps that are not combined would leave the ranks with different parameters.

        Raises:
            GradientOrderError: always; it is an ``AssertionError``.
        """
        raise GradientOrderError(
            "op=Adasum combines the optimizer steps, so synchronization cannot be skipped.", do="call step()"
        )
        yield  # makes this function a context manager

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and replace the change of each parameter by the Adasum of all ranks' changes.

        Called by: every rank.

        Args:
            closure: computes gradients, and the loss that is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_unfrozen()
        moved = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for parameter in moved:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        starts = [parameter.detach().clone() for parameter in moved]
        super().step()
        under_way: list[tuple[Any, Any]] = []
        for parameter, start in zip(moved, starts, strict=True):
            compressed, context = self._compression.compress(parameter.detach() - start)
            under_way.append((allreduce_async_(compressed, name=self._parameter_names[parameter], op=Adasum), context))
        for parameter, start, (handle, context) in zip(moved, starts, under_way, strict=True):
            parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        if self._passes is not None:
            self._passes.start_over()
        return loss
