# SPDX-License-Identifier: Apache-2.0
"""The hooks on a model's gradients: those by which gradient_sync follows its parameters, and the script's.

backward calls the script's with one rank's part of a gradient; those of parameters get the mean over ranks instead.
Hooks of parameters run once the mean over ranks is known, in the order in which they were registered. Hooks of modules
see gradients of activations, of which each rank has its own; if one changes them other than linearly, a warning says
so. Used by gradient_sync, replicate, shard and pipeline.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.torch_private.autograd import hooks_after_accumulation, hooks_of_gradient, is_accumulated_now
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.modules import backward_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    Hooks = dict[int, Callable[..., Any]]

NUM_FIRST_WATCHED = 4
WATCH_EVERY = 64
LINEARITY_FACTOR = -8.0
"""A power of two, so that a linear hook multiplies its result exactly."""
_KEPT = "keep such changes linear, as scaling and masking are, or make them after backward() has returned"


class FollowedParameters:
    """The parameters of one model, from its strategy until it goes through one again."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], strategy: str) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.strategy = strategy
        first = self.parameters[0]
        self.kind = (first.dtype, first.device)
        """Of the first one, which tells whether the model was moved since."""
        self._kinds = [_kind_of(parameter) for parameter in self.parameters]
        self.hooked: set[int] = set()
        """Numbers of those that have needed gradients so far."""
        self.unhooked = list(enumerate(self.parameters))
        """Those that have not."""
        self._handles: list[RemovableHandle] = []

    def hook_new(self, note: Callable[[int, torch.Tensor], None]) -> bool:
        """Have backward call ``note(number, parameter)`` for those that need gradients now; return whether some do."""
        new = [number for number, parameter in self.unhooked if parameter.requires_grad]
        self._handles += [self.parameters[n].register_post_accumulate_grad_hook(partial(note, n)) for n in new]
        if new:
            self.hooked.update(new)
            self.unhooked = [(number, parameter) for number, parameter in self.unhooked if number not in self.hooked]
        return bool(new)

    def remove_hooks(self) -> None:
        """Follow no gradient any more."""
        for handle in self._handles:
            handle.remove()

    def changed(self) -> ConfigurationError:
        """Return the error for a model whose parameters are of another :attr:`kind` now."""
        first = self.parameters[0]
        return ConfigurationError(
            f"Parameter {self.names[0]} was {self.kind[0]} on {self.kind[1]} when {self.strategy}() was called "
            "and has since changed.",
            evidence=f"it is {first.dtype} on {first.device}",
            do=f"call model.to(...) first, then rankwise.{self.strategy}(model)",
        )

    def check_all_of(self, model: nn.Module) -> None:
        """Raise unless every parameter of ``model`` is one of these."""
        known = {id(parameter) for parameter in self.parameters}
        new = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
        if new:
            first = "change the model first (layers, load_state_dict(assign=True)), then call"
            if self.strategy == "replicate":
                first = "after each change of the model (layers, load_state_dict(assign=True)), call"
            raise ConfigurationError(
                f"Parameter {new[0]} was added after {self.strategy}(), so its gradient would not be synchronized.",
                evidence=f"new parameters: {', '.join(new)}",
                do=f"{first} rankwise.{self.strategy}(model), then create the optimizer, or pass the new parameters to "
                "optimizer.add_param_group()",
            )

    def are_those_of(self, model: nn.Module) -> bool:
        """Return whether ``model`` has the same parameters as when it went through the strategy."""
        known = list(zip(map(id, self.parameters), self._kinds, strict=True))
        return [(id(parameter), _kind_of(parameter)) for parameter in model.parameters()] == known


def _kind_of(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device


class GradientHooks:
    """The hooks of one model's parameters."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], *, is_in_stages: bool = False) -> None:
        """Follow the hooks of ``parameters``, whose backward in stages may take gradients from ``autograd.grad``."""
        self.parameters = parameters
        self.is_in_stages = is_in_stages
        self._names = names
        self.held: dict[int, tuple[Hooks, Hooks]] = {}
        """By number of the parameter, torch's tables of hooks that change the gradient, and that follow it."""
        self._earlier: dict[int, torch.Tensor | None] = {}
        """What ``grad`` was before the backward under way adds to it."""
        self.is_deferred = True
        """Whether hooks run after the backward under way: not in the microsteps of an accumulation."""
        self._take_over()

    def _take_over(self) -> None:
        """Replace hooks that were registered since, in torch's tables, where their handles still remove them."""
        self.held.clear()
        # Other strategies have a hook of their own there.
        num_own = 0 if self.is_in_stages else 1
        all_changing = [*map(hooks_of_gradient, self.parameters)]
        all_following = [*map(hooks_after_accumulation, self.parameters)]
        if not any(all_changing) and max(map(len, filter(None, all_following)), default=0) <= num_own:
            return
        for number in range(len(self.parameters)):
            changing: Hooks = all_changing[number] or {}
            following: Hooks = all_following[number] or {}
            if not changing and len(following) <= num_own:
                continue
            for table in (changing, following):
                for key, hook in list(table.items()):
                    if not isinstance(hook, _Deferred) and not _is_own(hook):
                        table[key] = _Deferred(hook, self, number, changes=table is changing)
            if changing or any(isinstance(hook, _Deferred) for hook in following.values()):
                self.held[number] = changing, following

    def stop(self) -> None:
        """Give the hooks back to torch."""
        for tables in self.held.values():
            for table in tables:
                table.update({key: hook.hook for key, hook in table.items() if isinstance(hook, _Deferred)})
        self.held.clear()

    def begin(self, *, is_deferred: bool) -> None:
        """Note that a backward begins. Called before it reaches the parameters, if the model itself was called."""
        self._take_over()
        self.is_deferred = is_deferred
        if is_deferred:
            for number in self.held:
                self.note_earlier(number)

    def note_earlier(self, number: int) -> None:
        """Keep the gradient that the backward under way adds to."""
        if number not in self._earlier:
            before = self.parameters[number].grad
            self._earlier[number] = None if before is None else before.detach().clone()

    @torch.no_grad()
    def change(self, aside: Mapping[int, torch.Tensor]) -> None:
        """Have hooks change the means over ranks, which are in ``grad``.

        Called by: every rank, if hooks were deferred.

        Args:
            aside: by identity of the parameter, earlier gradients that the means include and ``grad`` did not.
        """
        for number, (changing, _) in self.held.items():
            parameter = self.parameters[number]
            total = parameter.grad
            earlier = self._earlier.get(number)
            if earlier is None:
                earlier = aside.get(id(parameter))
            if not changing or total is None or _is_unchanged(total, earlier):
                continue
            gradient = total if earlier is None else total - earlier
            for hook in [one.hook if isinstance(one, _Deferred) else one for one in changing.values()]:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is not total:
                total.copy_(gradient if earlier is None else gradient + earlier)

    def follow(self) -> None:
        """Call the hooks that follow accumulation, once ``grad`` is complete. They may step an optimizer."""
        for number, (_, following) in self.held.items():
            parameter = self.parameters[number]
            earlier = self._earlier.get(number)
            hooks = [one.hook for one in following.values() if isinstance(one, _Deferred)]
            if not hooks or parameter.grad is None or _is_unchanged(parameter.grad, earlier):
                continue
            for hook in hooks:
                hook(parameter)

    def end(self) -> None:
        """Forget the backward under way."""
        self._earlier.clear()

    def warn_of_part(self, number: int) -> None:
        """Warn that a hook has run in a microstep of an accumulation."""
        warn(
            f"a hook on the gradient of {self._names[number]} runs in each microstep inside rankwise.no_sync(), on "
            f"this rank's part of the gradient, so that the result depends on the number of ranks; {_KEPT}, or "
            "leave no_sync() out"
        )


class _Deferred:
    """A hook of a parameter that runs after backward, on the mean over ranks."""

    def __init__(self, hook: Callable[..., Any], owner: GradientHooks, number: int, *, changes: bool) -> None:
        self.hook = hook
        self._owner = ref(owner)
        self._number = number
        self._changes = changes
        self._is_judged = False

    def __call__(self, given: torch.Tensor) -> object:
        """Run the hook now or later. Called by torch, with the gradient or the parameter."""
        owner = self._owner()
        if owner is None or (
            self._changes and not owner.is_in_stages and not is_accumulated_now(owner.parameters[self._number])
        ):
            return self.hook(given)  # of autograd.grad, which returns this rank's gradient
        if owner.is_deferred:
            owner.note_earlier(self._number)
            return None
        result = self.hook(given)
        if not self._is_judged and (not self._changes or result is not None):
            self._is_judged = True
            if not self._changes or not _is_linear(lambda one: self.hook(one[0]), (given,), result):
                owner.warn_of_part(self._number)
        return result


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether the script has registered hooks on the gradient of a parameter."""
    tables = hooks_of_gradient(parameter), hooks_after_accumulation(parameter)
    return any(not _is_own(hook) for table in tables for hook in (table or {}).values())


def check_hooks_kept(parameters: Iterable[tuple[str, torch.Tensor]], strategy: str) -> None:
    """Raise if one of the parameters has a hook: ``strategy`` replaces them.

    Raises:
        ConfigurationError: names it.
    """
    hooked = next((name for name, one in parameters if has_hooks(one)), None)
    if hooked is not None:
        raise ConfigurationError(
            f"Parameter {hooked} has a hook, which {strategy}() would lose: it replaces the parameters.",
            do=f"call {strategy}() first, then register hooks on the parameters that the model has",
        )


def _is_unchanged(total: torch.Tensor, earlier: torch.Tensor | None) -> bool:
    """Return whether no rank has computed a gradient. Of a split one, ranks would come to different answers."""
    return earlier is not None and own_part(total) is total and torch.equal(total, earlier)


def _is_own(hook: object) -> bool:
    of = hook.func if isinstance(hook, partial) else hook
    return str(getattr(of, "__module__", "")).startswith("rankwise.")


# -- modules -------------------------------------------------------------------------------------------


class ModuleHooks:
    """Finds the hooks on gradients of activations that a script registers on a model's modules."""

    def __init__(self, model: nn.Module, *, is_in_stages: bool = False) -> None:
        self._num_forwards = 0
        self._is_in_stages = is_in_stages
        _watch(model, is_in_stages=is_in_stages)

    def before_forward(self, model: nn.Module, _inputs: object) -> None:
        """Look for new hooks before the first forward passes, and now and then later. Called by torch."""
        if self._num_forwards < NUM_FIRST_WATCHED or self._num_forwards % WATCH_EVERY == 0:
            _watch(model, is_in_stages=self._is_in_stages)
        self._num_forwards += 1


def _watch(model: nn.Module, *, is_in_stages: bool) -> None:
    for name, module in model.named_modules():
        for table in backward_hooks(module):
            for key, hook in list(table.items()):
                if not isinstance(hook, _Judged) and not _is_own(hook):
                    table[key] = _Judged(hook, name or type(module).__name__, is_in_stages=is_in_stages)


class _Judged:
    """A backward hook of a module, whose result is judged once."""

    def __init__(self, hook: Callable[..., Any], name: str, *, is_in_stages: bool) -> None:
        self._hook = hook
        self._name = name
        self._is_in_stages = is_in_stages
        self._is_judged = False

    def __call__(self, module: nn.Module, *gradients: Any) -> object:
        result = self._hook(module, *gradients)
        if result is not None and not self._is_judged:
            self._is_judged = True
            if not _is_linear(lambda given: self._hook(module, *given), gradients, result):
                of, number = ("a micro-batch's", "micro-batches") if self._is_in_stages else ("this rank's", "ranks")
                warn(
                    f"a backward hook of {self._name} changes gradients of activations other than linearly: it is "
                    f"called with gradients of the mean over {of} samples, so that the result depends on the number "
                    f"of {number}; {_KEPT}; hooks of parameters (parameter.register_hook) get the mean over all "
                    "samples",
                    all_ranks=self._is_in_stages,
                )
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles of the hook itself."""
        return partial, (self._hook,)


@torch.no_grad()
def _is_linear(call: Callable[[Sequence[Any]], Any], given: Sequence[Any], result: object) -> bool:
    """Return whether a hook multiplies its result if its gradients are multiplied."""
    scaled = tuple(_times(one) for one in given)
    again = call(scaled)
    mine, theirs = _times(result), again
    pairs = zip(_tensors(mine), _tensors(theirs), strict=False)
    return all(torch.allclose(one, other, equal_nan=True) for one, other in pairs)


def _times(given: object) -> Any:
    if isinstance(given, tuple | list):
        return tuple(_times(one) for one in given)
    return given * LINEARITY_FACTOR if isinstance(given, torch.Tensor) else given


def _tensors(given: object) -> list[torch.Tensor]:
    several = given if isinstance(given, tuple | list) else (given,)
    return [one for one in several if isinstance(one, torch.Tensor)]
