# SPDX-License-Identifier: Apache-2.0
"""torch's random operations, replaced while a model is replicated: inside a scope they draw as the scope says.

The kernels are replaced, below autograd and below the operations that torch composes (dropout, recurrent layers,
attention, distributions). So every draw is seen, and a model that draws nothing pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.counter import bits, kept
from rankwise.replicate.random_numbers.draw_warnings import forget_notices, notice, warn_of_rejection
from rankwise.replicate.random_numbers.scope import current_scope, drawing, integer_kernels, is_apart, is_drawing
from rankwise.replicate.random_numbers.source import (
    draw_by_sample,
    draw_dropout,
    draw_from_tensors,
    fill,
    forget,
    generator_before,
    main_of,
    redrawing,
    source_again,
    source_by_key,
    source_in,
)
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import skipped
from rankwise.torch_private.kernels import Replacements, dispatch_key, kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.current_batch import CurrentBatch
    from rankwise.comm.session import Session
    from rankwise.replicate.random_numbers.scope import DrawScope, DropoutMask
    from rankwise.replicate.random_numbers.source import NumberSource
    from rankwise.torch_private.kernels import Kernel

IN_PLACE = (
    "bernoulli_.float",
    "bernoulli_.Tensor",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "random_.from",
    "random_.to",
    "uniform_",
)
"""Operations that fill a tensor."""

FROM_TENSORS = ("multinomial", "normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
"""Operations that draw from tensors of probabilities or means."""

BY_REJECTION = ("_sample_dirichlet", "_standard_gamma", "binomial", "poisson")
"""Operations that take as many numbers from a generator as the values in their tensors need."""

LARGEST_AHEAD = 2**16
"""Elements of the largest mask that is drawn ahead: in larger ones, drawing itself dominates the time."""
MOST_AHEAD = 2**22
"""Elements of all masks that are drawn ahead."""


def install(session: Session) -> None:
    """Replace torch's random operations until the world is left."""
    session.once(_installed)


def _installed(session: Session) -> Replacements:
    replacements = Replacements()
    for device_type in dict.fromkeys(("cpu", torch.device(session.world.device).type)):
        key = dispatch_key(device_type)
        if (integers := kernel_of("random_", key)) is not None:
            integer_kernels[device_type] = integers
        for name in IN_PLACE:
            _replace(replacements, name, key, _bernoulli if (name, key) == ("bernoulli_.float", "CPU") else _in_place)
        for name in (*FROM_TENSORS, *BY_REJECTION):
            _replace(replacements, name, key, _from_tensors)
        _replace(replacements, "rrelu_with_noise", key, _rrelu)
        _replace(replacements, "randperm.generator_out", key, _permutation)
        if device_type != "cpu":  # on CPUs dropout uses bernoulli_
            _replace(replacements, "native_dropout", key, _dropout)

    def put_back() -> None:
        replacements.put_back()
        forget()
        integer_kernels.clear()
        forget_notices()

    session.at_end(put_back)
    return replacements


def _replace(replacements: Replacements, name: str, key: str, make: Callable[[str, Kernel], Kernel]) -> None:
    kernel = kernel_of(name, key)
    if kernel is not None:
        replacements.replace(name, key, skipped(make(name, kernel)))


def _source(operation: str, like: torch.Tensor, generator: torch.Generator | None) -> NumberSource | None:
    """Return where the numbers of a draw come from; ``None``: from torch's generator, as usual."""
    if is_drawing():
        return None
    scope = current_scope()
    if scope is not None:
        return source_in(scope, operation, like, generator)
    if in_backward():
        return source_again(generator, like.device)
    notice(operation, like.shape)
    return None


def _bernoulli(name: str, kernel: Kernel) -> Kernel:
    """Return dropout's draw: as of other operations, but shorter if a forward pass draws as the one before."""
    usual = _in_place(name, kernel)

    def draw(out: torch.Tensor, *args: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        scope = current_scope()
        if generator is None and scope is not None and scope.plan and _drop_on_plan(name, out, args, scope):
            return out
        return usual(out, *args, generator=generator)

    return draw


def _drop_on_plan(operation: str, out: torch.Tensor, args: Sequence[Any], scope: DrawScope) -> bool:
    """Fill a dropout mask, if the forward pass before drew it at this place, as the samples' rows in order.

    Does the same as :func:`fill` in a third of the time, for the one operation that draws in every layer.
    """
    number, rows = len(scope.made), scope.rows
    if scope.randomness != "counter" or scope.traced_layouts or scope.part is not None or rows is None:
        return False
    if number >= len(scope.plan) or not out.is_contiguous() or is_apart(has_graph=scope.has_graph):
        return False
    planned = scope.plan[number]
    layout = planned.layout
    if layout is None or layout.dim or layout.outer != 1 or planned.operation not in {operation, ""}:
        return False
    if not out.dim() or planned.num_dims != out.dim() or out.shape[0] != rows.num * layout.inner:
        return False
    scope.made.append(planned)
    count = out.numel()
    if count:
        key, size = scope.next_key(), count // rows.num
        mask = (key[1], size, args[0] if args else 0.5)
        if not scope.masks and mask in scope.expected[:1]:
            scope.ahead.update(masks_ahead(key[0], scope.expected, rows))
        scope.masks.append(mask)
        ready = scope.ahead.pop(mask, None)
        if ready is not None:
            out.copy_(ready.view(out.shape))
        else:
            kept(key, rows.start * size, count, mask[2], out.numpy().reshape(-1))
    return True


def masks_ahead(key: int, expected: Sequence[DropoutMask], rows: CurrentBatch) -> dict[DropoutMask, torch.Tensor]:
    """Return the small dropout masks of a forward pass, [rows.num * elements of a sample], all drawn when it begins.

    ``expected`` are the masks that the pass before drew. Drawn one by one between layers, each takes twice as long: by
    then the processor's cache holds the code of other operations. The numbers are the same either way, since they are
    functions of a key and a position.
    """
    masks: dict[DropoutMask, torch.Tensor] = {}
    left = MOST_AHEAD
    for mask in expected:
        number, size, probability = mask
        count = size * rows.num
        left -= count
        if left < 0:
            break
        if count <= LARGEST_AHEAD:
            masks[mask] = torch.from_numpy(kept((key, number), size * rows.start, count, probability))
    return masks


def _in_place(name: str, kernel: Kernel) -> Kernel:
    def draw(out: torch.Tensor, *args: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        scope = current_scope()
        is_followed = scope is not None and bool(scope.traced_layouts)
        before = generator_before(scope, generator, out.device) if is_followed else None
        source = _source(name, out, generator)
        if source is None:
            kernel(out, *args, generator=generator)
            return out
        fill(name, kernel, out, args, source)
        if scope is not None and is_followed:
            scope.note_redraw(
                redrawing(source, scope, before, lambda again: fill(name, kernel, out, args, again), out.device)
            )
        return out

    return draw


def _from_tensors(name: str, kernel: Kernel) -> Kernel:
    draws = draw_from_tensors if name in FROM_TENSORS else draw_by_sample

    def draw(*args: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        given, generator = _split(args, generator)
        main, scope = main_of(given), current_scope()
        before = generator_before(scope, generator, main.device)
        source = _source(name, main, generator)
        if source is None:
            drawn: torch.Tensor = kernel(*given, generator=generator)
            return drawn
        if source.key is None and name in BY_REJECTION:
            warn_of_rejection(name)
            source = source_by_key(source)
        with drawing():
            out = draws(kernel, given, source)
        if scope is not None and scope.traced_layouts:
            scope.note_redraw(
                redrawing(source, scope, before, lambda again: out.copy_(draws(kernel, given, again)), main.device)
            )
        return out

    return draw


def _split(args: tuple[Any, ...], generator: torch.Generator | None) -> tuple[tuple[Any, ...], torch.Generator | None]:
    """Return arguments without a generator among them, and the generator."""
    if args and isinstance(args[-1], torch.Generator):
        return args[:-1], args[-1]
    return args, generator


def _rrelu(name: str, kernel: Kernel) -> Kernel:
    def activate(
        inputs: torch.Tensor, noise: torch.Tensor, *args: Any, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        given, generator = _split(args, generator)
        lower, upper, training = (*given, *(1 / 8, 1 / 3, False)[len(given) :])
        source = _source(name, inputs, generator) if training else None
        if source is None:
            activated: torch.Tensor = kernel(inputs, noise, *given, generator=generator)
            return activated
        if source.key is None:
            warn_of_rejection(name)
            source = source_by_key(source)
        fill("uniform_", torch.Tensor.uniform_, noise, (lower, upper), source)
        noise.masked_fill_(inputs > 0, 1)
        return inputs * noise

    return activate


def _dropout(name: str, kernel: Kernel) -> Kernel:
    def drop(inputs: torch.Tensor, probability: float, train: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        source = None if train is False else _source(name, inputs, None)
        if source is None:
            dropped: tuple[torch.Tensor, torch.Tensor] = kernel(inputs, probability, train)
            return dropped
        with drawing():
            return draw_dropout(kernel, inputs, probability, source)

    return drop


def _permutation(name: str, kernel: Kernel) -> Kernel:
    def permute(length: int, *, generator: torch.Generator | None = None, out: torch.Tensor) -> torch.Tensor:
        scope = current_scope()
        if scope is None or is_drawing():
            kernel(length, generator=generator, out=out)
            return out
        _check_not_samples(length, scope)
        scope.traced_layouts.append(None)
        try:
            source = source_in(scope, name, out, generator)
        finally:
            scope.traced_layouts.pop()
        if source.key is not None and out.device.type != "cpu":
            order = bits(source.full_key, range(length), torch.int64, out.device).argsort()
            return out.resize_(length).copy_(order)
        with drawing():
            kernel(length, generator=source.own_generator(out.device), out=out)
        return out

    return permute


def _check_not_samples(length: int, scope: DrawScope) -> None:
    rows = scope.rows
    if rows is None or scope.is_per_rank or length != rows.num or rows.num == rows.num_global:
        return
    raise ConfigurationError(
        f"torch.randperm({length}) at {words(user_call_site())} permutes this rank's samples among themselves.",
        evidence=f"this rank has {rows.num} of {rows.num_global} samples; one rank would permute all of them",
        do="mix samples in the dataset's __getitem__; or gather the batch (rankwise.all_gather_uneven), draw "
        f"torch.randperm({rows.num_global}), and take this rank's rows; if it does not permute samples, call "
        "it before the loop",
    )
