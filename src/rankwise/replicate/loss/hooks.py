# SPDX-License-Identifier: Apache-2.0
"""Looks at each loss when its backward is called: reads it for models that need its weight; warns unless it is finite.

torch has no public hook between the call of backward and its first node, and during backward the tensors that losses
saved are freed: this is put around backward from the first strategy call until the world is left.

In order: around backward; the warnings; the first loss that is not finite, with its rank, step and samples. Gradients
are averaged, so one rank's NaN is every rank's a moment later. Each rank looks at its own loss; the store knows which
backward was the first. A loss on a device is read in a later step: nothing waits for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rankwise.comm import step_hooks
from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.log import warn
from rankwise.replicate.loss.batch_statistics import FirstBatches
from rankwise.replicate.loss.graph import clear_, is_zero, multiplied, ratio
from rankwise.replicate.loss.reports import LossVerdict, Mode, as_one_sum, verdict_of, words_of_model
from rankwise.replicate.loss.terms import LossReader, are_of_single_samples
from rankwise.torch_private.autograd import in_backward
from rankwise.world.device import streams

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from rankwise.comm.backends.protocol import Amount
    from rankwise.comm.current_batch import CurrentBatch
    from rankwise.comm.session import Session
    from rankwise.replicate.loss.loss_on_ranks import LossOnRanks
    from rankwise.replicate.loss.terms import Term

_KEY_OF_LOSSES = "loss/not_finite"
_MOST_SHOWN = 8
_subscribers: list[ref[LossOnRanks]] = []
"""Ordered by their numbers. Not a weak set, whose iteration takes as long as reading a loss."""
_warned: set[tuple[str, str]] = set()
_AMOUNT: Callable[[Term], Amount | None] = attrgetter("amount")
_EXPECTED: Callable[[LossOnRanks], Amount | None] = attrgetter("step.expected_amount")


_OF_A_LOOP = (
    "the loss ({where}) has terms of single samples, as in a loop over them: its gradients are averaged over ranks by "
    "samples, which is exact for their mean; pass rankwise.weight(model, len(x)) if it is that, or write a sum with "
    "reduction='sum' and no divisor"
)
_OF_A_STATISTIC = (
    "combines the samples of this rank, and the loss ({where}) depends on the result otherwise than as a mean or a sum "
    "over samples: on one rank it would combine those of the whole batch; apply it to rankwise.whole_batch(x), the "
    "samples of all ranks, with gradients=True if the loss is computed from the result; or average a number with "
    "rankwise.mean(value, len(x))"
)


def check_weight_function(weight: object, strategy: str) -> None:
    """Raise unless ``weight`` is ``None`` or can be called."""
    if weight is not None and not callable(weight):
        raise ConfigurationError(
            f"weight of {strategy}() must be callable, got {weight!r}.",
            do="pass a function of the model's inputs: weight=lambda x: len(x)",
        )


def subscribe(subscriber: LossOnRanks, session: Session) -> None:
    """Read the loss of every backward for a model, until it is deleted or the world is left."""
    if step_hooks.put_around_backward(_around_backward):
        session.at_end(_undo)
        session.on_leave(_check_all)
        session.before_save(_check_all)
    session.once(FirstBatches).follow_next()
    living = {subscriber, *_living()}
    _subscribers[:] = [ref(one) for one in sorted(living, key=attrgetter("number"))]


def unsubscribe(subscriber: LossOnRanks) -> None:
    """Read no more losses for a model."""
    _subscribers[:] = [ref(one) for one in _living() if one is not subscriber]


def _living() -> list[LossOnRanks]:
    return [one for reference in _subscribers if (one := reference()) is not None]


def _check_all() -> None:
    """Raise what is known to be wrong once the device and the other ranks are done with every step so far."""
    streams.run_checks(waits=True)
    for one in _living():
        one.settle()


def _undo() -> None:
    step_hooks.put_around_backward(None)
    _subscribers.clear()
    streams.forget_checks()
    forget_losses()
    _warned.clear()


def _around_backward(
    backward: Callable[..., None], tensors: torch.Tensor | Sequence[torch.Tensor], *args: object, **kwargs: object
) -> None:
    is_within = in_backward()  # then the caller is a checkpoint that computes its part again
    session = current_or_none()
    first_batches = None if session is None else session.made(FirstBatches)
    if first_batches is not None and not first_batches.is_following:
        first_batches = None
    if streams.waiting:
        streams.run_checks()
    subscribers: list[LossOnRanks] = []
    for reference in () if is_within else _subscribers:
        one = reference()
        # Alone, it only matters what several microsteps are means over.
        if one is not None and (one.reports is not None or one.declared.is_averaged_elsewhere or one.is_accumulated):
            subscribers.append(one)
    if subscribers:
        if kwargs.get("inputs") is not None:
            _check_inputs(kwargs["inputs"], subscribers)
        _weighted_backward(backward, session, first_batches, subscribers, tensors, *args, **kwargs)
    else:
        backward(tensors, *args, **kwargs)
    if first_batches is not None and not is_within:
        first_batches.after_backward()


def _weighted_backward(
    backward: Callable[..., None],
    session: Session | None,
    first_batches: FirstBatches | None,
    subscribers: Sequence[LossOnRanks],
    tensors: torch.Tensor | Sequence[torch.Tensor],
    *args: object,
    **kwargs: object,
) -> None:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = args[0] if args else kwargs.get("grad_tensors")
    verdict, reader, reached = _read(roots, first_batches, has_gradients=given is not None, subscribers=subscribers)
    handles: Sequence[RemovableHandle] = ()
    try:
        for one in subscribers:
            one.expect(verdict, reader.calls.get(one.number), session, is_empty=reader.is_empty)
        warn_unless_finite(session, roots, [*map(_AMOUNT, verdict.terms), *map(_EXPECTED, reached)])
        for one in reached:
            if one.is_empty or one.declared.reports_at_start:
                one.report_at_start()
        if verdict.mode is Mode.TERMS:
            handles = _scale_terms(verdict.terms, reached[0])
        backward(tensors, *args, **kwargs)
    except BaseException:
        for one in subscribers:
            one.declared.on_interrupted()
        raise
    finally:
        for handle in handles:
            handle.remove()
        for one in subscribers:
            if one.step.is_expected:  # not ended by the strategy
                one.end()


def _check_inputs(inputs: object, subscribers: Sequence[LossOnRanks]) -> None:
    """Raise if ``inputs`` holds sharded parameters: graphs hold the whole ones."""
    listed: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
    if any(sub.declared.reports_at_start and sub.owns(one) for sub in subscribers for one in listed):
        raise ConfigurationError(
            "backward(inputs=...) was given parameters of a sharded model, which would receive no gradients.",
            do="omit inputs=, and set requires_grad=False on the other parameters",
        )


def _read(
    roots: Sequence[torch.Tensor],
    first_batches: FirstBatches | None,
    *,
    has_gradients: bool,
    subscribers: Sequence[LossOnRanks],
) -> tuple[LossVerdict, LossReader, list[LossOnRanks]]:
    """Return the verdict on a loss, what was read, and the models it comes from; warn if it cannot be read."""
    statistic = None if first_batches is None else first_batches.statistic(roots)
    reader = LossReader(subscribers, _num_given)
    for root in roots:
        reader.read(root)
    reached: list[LossOnRanks] = []
    is_given = reads_amounts = False
    for one in subscribers:
        if one.number in reader.calls:
            reached.append(one)
            is_given = is_given or one.declared.is_given
            reads_amounts = reads_amounts or one.declared.device is None
    verdict = LossVerdict(Mode.SAMPLES)
    if not reached or is_given:
        for one in reached:
            one.check_calls(reader.unlike.get(one.number))
        return verdict, reader, reached
    if has_gradients and any(root.dim() for root in roots):
        _warn_unread("backward() was called with gradients")
        return verdict, reader, reached
    found = verdict_of(reader.terms)
    if found.mode is Mode.TERMS and are_of_single_samples(found.terms, _num_given()):
        warn_once("a loop over samples", _OF_A_LOOP)
        return verdict, reader, reached
    verdict = _followed(found.read() if reads_amounts else found, reached)
    if statistic is not None and verdict.mode is not Mode.SAMPLES:
        warn_once(statistic.place, f"{statistic.name} at {statistic.place} {_OF_A_STATISTIC}")
    return verdict, reader, reached


def _num_given() -> int:
    """Return how many samples a loader gave this rank last; 0 if none did."""
    session = current_or_none()
    batch = None if session is None else session.batches.latest
    return 0 if batch is None else batch.num or 0


def _followed(verdict: LossVerdict, reached: Sequence[LossOnRanks]) -> LossVerdict:
    """Return the verdict that the models of a loss follow; warn if the result differs from that of one rank."""
    for term in verdict.terms:
        if term.is_odd and term.kind == "mean":
            warn_once(term.operation, words_of_model(reached[0].model_name).scaled_mean())
    if verdict.mode is Mode.SAMPLES and verdict.terms:
        _warn_unread(verdict.unknown.operation if verdict.unknown else "its many terms")
    simpler = verdict
    if verdict.mode is Mode.TERMS:
        is_accumulated = any(one.is_accumulated for one in reached)
        if is_accumulated or any(one.declared.is_averaged_elsewhere for one in reached):
            # The factors of several microsteps' terms are known only after the last one, and never elsewhere.
            simpler = as_one_sum(verdict)
        if is_accumulated and simpler.mode is Mode.SAMPLES:
            _warn_unread("several terms inside no_sync()")
    mode = verdict.mode if simpler.mode is Mode.SAMPLES else simpler.mode
    for one in reached:
        if mode in one.cautions:
            warn_once(mode.name, one.cautions[mode])
    return simpler


def _scale_terms(terms: Sequence[Term], model: LossOnRanks) -> Sequence[RemovableHandle]:
    """Have backward scale each term so that the mean over ranks with samples is one rank's result.

    Called by: every rank of the model's group, before backward. Returns what to remove after it.
    """
    combined = model.exchange_terms()
    if combined is None:
        return ()
    handles: list[RemovableHandle] = []
    seen: set[Node] = set()
    for number, (term, on_ranks) in enumerate(zip(terms, combined.terms, strict=True)):
        factor: Amount = combined.num_active * 1.0
        if model.reading(number) in ("mean", "share"):
            factor *= ratio(term.amount, on_ranks.amount)
        is_on_device = isinstance(factor, torch.Tensor)
        if term.node in seen or (not is_on_device and factor == 1.0):
            continue
        seen.add(term.node)
        if not is_zero(factor):
            handles.append(term.node.register_prehook(lambda given, by=factor: _times(given, by)))
        if is_on_device or is_zero(factor):
            # This rank may have nothing of the term, whose gradient is NaN then.
            handles.append(term.node.register_hook(lambda inward, _, by=factor: _cleared(inward, by)))
    return handles


def _times(gradients: Sequence[torch.Tensor | None], factor: Amount) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else multiplied(one, factor) for one in gradients)


def _cleared(gradients: Sequence[torch.Tensor | None], factor: Amount) -> tuple[torch.Tensor | None, ...]:
    if isinstance(factor, torch.Tensor):
        return tuple(None if one is None else clear_(one.clone(), factor) for one in gradients)
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def _warn_unread(because: str) -> None:
    warn_once(
        because,
        f"the loss ({{where}}) is neither a mean nor a sum over samples because of {because}: its gradients are "
        "averaged over ranks by samples, which may differ from the result of one rank; compute that "
        "operation per sample, or pass the number that the loss averages over to rankwise.weight(model, "
        "amount), or compute all of it on each rank, from rankwise.whole_batch(outputs, gradients=True) and "
        "rankwise.whole_batch(targets)",
    )


def warn_once(about: str, message: str, *, all_ranks: bool = False) -> None:
    """Warn, once per line and subject.

    Args:
        about: the subject.
        message: with ``{where}`` in the place of the line.
        all_ranks: whether to print on a rank other than zero too, as for a cause that only some ranks see.
    """
    where = words(user_call_site())
    if (where, about) not in _warned:
        _warned.add((where, about))
        warn(message.format(where=where), all_ranks=all_ranks)


# -- losses that are not finite ----------------------------------------------------------------------


class _Seen:
    """The backward calls since the world was joined."""

    num = 0
    is_over = False
    """Whether this rank has seen a loss that is not finite."""


_seen = _Seen()


def warn_unless_finite(
    session: Session | None,
    losses: Sequence[torch.Tensor],
    amounts: Collection[Amount | None] = (),
    *,
    parts: Sequence[tuple[int, int]] = (),
    advice: str = "skip such a step on all ranks by rankwise.mean(loss, len(x))",
) -> None:
    """Warn, once per job, on the ranks whose losses are the first ones that are not finite.

    Args:
        session: that is open.
        losses: of this rank.
        amounts: the numbers that they are means over. A mean of nothing is NaN, and counts nothing.
        parts: of each loss, the first one and the number of its samples of this rank; default: all.
        advice: how to skip such a step.
    """
    _seen.num += 1
    if _seen.is_over or session is None or session.store is None:
        return
    number, batch = _seen.num, session.batches.current
    if (batch is not None and batch.num == 0) or 0.0 in [one for one in amounts if not isinstance(one, torch.Tensor)]:
        return
    for place, loss in enumerate(losses):
        if type(loss) is not torch.Tensor or loss.is_meta or not loss.numel():
            continue
        own = _part_of(batch, *parts[place]) if parts and batch is not None else batch
        if loss.device.type != "cpu":
            is_bad = ~loss.detach().isfinite().all()
            for amount in amounts:
                if isinstance(amount, torch.Tensor):
                    is_bad &= (amount != 0).to(is_bad.device)
            streams.check_later(is_bad, partial(_report_not_finite, "not finite", number, own, session, advice))
        elif not (math.isfinite(loss.item()) if loss.dim() == 0 else bool(loss.detach().isfinite().all())):
            _report_not_finite(str(loss.item()) if loss.dim() == 0 else "not finite", number, own, session, advice)


def forget_losses() -> None:
    """Check losses again. Called when the world is left."""
    _seen.num, _seen.is_over = 0, False


def _part_of(batch: CurrentBatch, first: int, num: int) -> CurrentBatch:
    indices = batch.indices
    own = None if indices is None else lambda: list(indices())[first : first + num]
    return replace(batch, start=batch.start + first, num=num, indices=own)


def _report_not_finite(value: str, number: int, batch: CurrentBatch | None, session: Session, advice: str) -> None:
    if _seen.is_over or session.store is None:
        return
    _seen.is_over = True
    if session.store.held_or_set(_KEY_OF_LOSSES, str(number)) != str(number).encode():
        return  # another rank's was, and has reached this rank with the gradients
    of = f"backward() call {number}" if batch is None else _samples_of(batch)
    warn(
        f"the loss of this rank is {value} in {of}, the first one of any rank that is not finite: gradients are "
        f"averaged, so those of all ranks may be NaN from now on; look at these samples, or {advice}",
        all_ranks=True,
    )


def _samples_of(batch: CurrentBatch) -> str:
    rows = f"its samples {batch.start} to {batch.start + batch.num - 1} of batch {batch.number} of epoch {batch.epoch}"
    indices = [] if batch.indices is None else list(batch.indices())
    shown = ", ".join(map(str, indices[:_MOST_SHOWN])) + (", ..." if len(indices) > _MOST_SHOWN else "")
    return f"{rows} (dataset[{shown}])" if indices else rows
