# SPDX-License-Identifier: Apache-2.0
"""Random numbers inside a replicated model: around each forward pass, and the generators that all ranks share.

The samples that the model is called with, and their place in its inputs, decide which numbers a rank draws. Used by
replicate.
"""

from __future__ import annotations

import hashlib
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from rankwise.comm.same_state import numbers_of_all
from rankwise.log import warn
from rankwise.replicate.own_hooks import OwnHook
from rankwise.replicate.random_numbers.batch_tracer import BatchTracer
from rankwise.replicate.random_numbers.draw_warnings import warn_of_dropout
from rankwise.replicate.random_numbers.kernels import install
from rankwise.replicate.random_numbers.sample_layout import OWN_ROWS, SampleLayout, layouts_of
from rankwise.replicate.random_numbers.scope import DrawScope, enter, leave
from rankwise.replicate.random_numbers.source import default_generator
from rankwise.replicate.random_numbers.split_tracer import SplitTracer, warn_of_parts
from rankwise.replicate.state_guard.diagnosis import Repair, add_fact
from rankwise.tensors.arrays import tensors_in
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import is_compiled, is_transforming

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.random_numbers.scope import DropoutMask, PlannedDraw, Randomness

    PassKind = tuple[bool, bool, tuple[tuple[int, torch.dtype], ...]]
    """Forward passes that draw the same way: training, with gradients, and the dims and dtypes of the inputs."""
    from rankwise.comm.current_batch import CurrentBatch


MOST_FOLLOWED = 16
"""How many forward passes of a model are traced: each takes up to three times as long."""
_KIND: Callable[[torch.Tensor], tuple[int, torch.dtype]] = attrgetter("ndim", "dtype")
_SHAPE: Callable[[torch.Tensor], torch.Size] = attrgetter("shape")
LARGEST_SEED = 2**32
"""Seeds that users choose are smaller; those that torch takes from the system are larger, but for one in 4e9."""


_draws_of: WeakKeyDictionary[nn.Module, DrawsOfModel] = WeakKeyDictionary()


def draw_as_one_rank(
    model: nn.Module,
    session: Session,
    exchange: Exchange | None,
    randomness: Randomness,
    *,
    needs_loader: bool = False,
) -> None:
    """Have each forward pass of a model draw its random numbers as one rank would draw them.

    Called by: every rank of ``exchange``, the ranks that hold copies or shards; ``None`` for a single rank.

    Args:
        model: that draws.
        session: of this rank.
        exchange: between the ranks.
        randomness: the way to draw.
        needs_loader: whether samples that come from no loader leave torch to draw by itself.
    """
    draws = _draws_of.get(model)
    if exchange is None and randomness == "torch" and draws is None:
        return  # torch's own numbers
    if exchange is not None and randomness != "per_rank":
        agree_on_generators(exchange, torch.device(session.world.device))
        compare_generators(exchange, session)
    if draws is not None:
        draws.draw_by(randomness)
        return
    _draws_of[model] = draws = DrawsOfModel(session, randomness, type(model).__name__, needs_loader=needs_loader)
    session.at_end(forget_draws)
    # Next to forward: draws of other hooks are not the model's.
    model.register_forward_pre_hook(OwnHook(draws.before), with_kwargs=True)
    model.register_forward_hook(OwnHook(draws.after), prepend=True, always_call=True)


def forget_draws_of(model: nn.Module) -> None:
    """Have a model whose hooks were removed draw as torch does."""
    _draws_of.pop(model, None)


def ways_to_draw() -> set[Randomness]:
    """Return in which ways the models of this process draw."""
    return {draws.randomness for draws in _draws_of.values()}


class DrawsOfModel:
    """How the forward passes of one model draw random numbers.

    Its many fields are what one pass of a kind leaves for the next: its draws, its masks, and how its layers are split.
    """

    def __init__(self, session: Session, randomness: Randomness, name: str, *, needs_loader: bool = False) -> None:
        """Replace torch's random operations."""
        self._session = session
        self.randomness: Randomness = randomness
        self._name = name
        self._needs_loader = needs_loader
        axes = session.axes
        self._rank = session.world.rank if axes is None else axes.data_rank(session.world.rank)
        self._is_data_divided = (session.world.world_size if axes is None else axes.data_world_size) > 1
        is_split = axes is not None and axes.tp > 1
        self._part = (axes.coordinate(session.world.rank, "tp"), axes.tp) if axes is not None and is_split else None
        self._splits: dict[object, tuple[SampleLayout | None, ...]] = {}
        self._sized: set[PassKind] = set()
        """Kinds of passes in which the place of a part depends on the sizes of the inputs."""
        self._plans: dict[PassKind, tuple[PlannedDraw, ...]] = {}
        self._masks: dict[PassKind, Sequence[DropoutMask]] = {}
        self._num_followed = 0
        self._has_warned = False
        self._open: list[tuple[PassKind, DrawScope, BatchTracer | None, SplitTracer | None, object]] = []
        install(session)

    def draw_by(self, randomness: Randomness) -> None:
        """Draw in another way from now on."""
        self.randomness = randomness

    def before(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Draw as one rank would from now on. Called by torch, before a forward pass."""
        if self._open and not in_backward():
            self._abandon()
        if len(args) == 1 and type(args[0]) is torch.Tensor and not kwargs:  # as most models are called
            leaves = [args[0]] if args[0].dim() else []
        else:
            leaves = [one for _, one in tensors_in((args, kwargs)) if one.dim()]
        rows = rows_in_hand(list(self._session.batches.in_use.values()), leaves)
        self.begin(module, leaves, rows)

    def begin(
        self,
        module: nn.Module,
        leaves: Sequence[torch.Tensor],
        rows: CurrentBatch | None,
        plan: Sequence[PlannedDraw] | None = None,
        key: int | None = None,
    ) -> DrawScope:
        """Draw for some samples from now on.

        Args:
            module: that is called.
            leaves: the tensors that it is called with.
            rows: the samples; ``None`` if they come from no loader.
            plan: the draws of the pass; default: found out in the first one.
            key: of all draws, where several calls make up the pass; default: taken by the first draw. Draws whose rows
                cannot be followed then differ by the first row, and not by rank.
        """
        kind = (module.training, torch.is_grad_enabled(), tuple(map(_KIND, leaves)))
        has_own_draws = rows is None and self.randomness != "per_rank"
        sizes = tuple(map(_SHAPE, leaves))
        scope = DrawScope(
            rows,
            self.randomness,
            self._rank if key is None or rows is None else rows.start,
            self._plans.get(kind, ()) if plan is None else plan,
            self._masks.get(kind, ()),
            has_graph=torch.is_grad_enabled(),
            key=key,
            on_first_draw=self._warn_of_own_draws if has_own_draws and not self._has_warned else None,
            part=self._part,
            splits=self._splits.get((kind, sizes)) or self._splits.get(kind, ()),
        )
        follower = splitter = None
        if plan is None and rows is not None and rows.num > 0 and kind not in self._plans and self._can_follow(module):
            self._num_followed += 1
            follower = BatchTracer(scope, rows.num, list(zip(leaves, layouts_of_inputs(leaves, rows), strict=True)))
            scope.tracers.append(follower)
        is_known = (kind, sizes) in self._splits or (kind in self._splits and kind not in self._sized)
        if self._part is not None and not is_known and self._can_follow(module):
            self._num_followed += 1
            splitter = SplitTracer(scope)
            scope.tracers.append(splitter)
        self._open.append((kind, scope, follower, splitter, (kind, sizes)))
        enter(None if self._needs_loader and rows is None and self._part is None else scope)
        for tracer in scope.tracers:
            tracer.__enter__()
        return scope

    def after(self, module: nn.Module, *_: object) -> None:
        """Draw as before the forward pass. Called by torch, also after one that raised."""
        if not self._open:
            return
        kind, scope, follower, splitter, sized_kind = self._open.pop()
        if scope.made and not scope.is_per_rank:
            _since.has_drawn = True
            self._masks[kind] = scope.masks
        is_done = sys.exception() is None  # else it may have raised before it drew
        if not (self._has_warned or scope.made or scope.is_per_rank) and module.training and is_done:
            # No draw was seen: layers that drop draw in compiled code or in fused kernels.
            self._has_warned = True
            if self._session.world.world_size > 1:
                warn_of_dropout(module)
        for tracer in reversed(scope.tracers):
            tracer.__exit__(None, None, None)
        if splitter is not None or scope.is_off_splits:
            self._note_splits(kind, scope, sized_kind, is_traced=splitter is not None)
        if follower is None and scope.is_off_plan and self._can_follow(module):
            # Other draws than in the traced pass: trace the next one.
            self._plans.pop(kind, None)
        elif follower is not None or scope.is_off_plan:
            self._plans[kind] = tuple(scope.made)
        leave()

    def _note_splits(self, kind: PassKind, scope: DrawScope, sized_kind: object, *, is_traced: bool) -> None:
        """Keep which dims of the draws were divided, for the next passes of this kind."""
        if is_traced:
            draws = zip(scope.made, scope.made_splits, strict=False)
            if any(split and made.layout and split.dim == made.layout.dim for made, split in draws):
                self._sized.add(kind)
            self._splits[sized_kind if kind in self._sized else kind] = tuple(scope.made_splits)
        else:
            warn_of_parts()
            self._splits.pop(kind, None)
            self._splits.pop(sized_kind, None)

    def _abandon(self) -> None:
        """Leave a forward pass that was interrupted: Ctrl-C calls no hook."""
        while self._open:
            scope = self._open.pop()[1]
            for tracer in reversed(scope.tracers):
                tracer.__exit__(None, None, None)
            leave()

    def _can_follow(self, module: nn.Module) -> bool:
        is_plain = not (is_compiled(module) or is_transforming())
        return self.randomness != "per_rank" and self._num_followed < MOST_FOLLOWED and is_plain

    def _warn_of_own_draws(self) -> None:
        self._has_warned = True
        if self._is_data_divided:
            warn(
                f"{self._name} draws random numbers (dropout, noise) independently on each rank, because its "
                "samples do not come from rankwise.DataLoader: a run on a different number of ranks differs as a "
                "run with a different seed would"
            )


def rows_in_hand(known: Sequence[CurrentBatch], leaves: Sequence[torch.Tensor]) -> CurrentBatch | None:
    """Return the batch that a model is called with: the one that holds an input, else one of its length, else the last.

    Args:
        known: the batches of all loaders in use, the latest last.
        leaves: the tensors that the model is called with.
    """
    if len(known) > 1:
        latest = known[::-1]
        held = (rows for rows in latest if any(_dim_in_batch(leaf, rows) is not None for leaf in leaves))
        as_long = (rows for rows in latest if any(leaf.shape[0] == rows.num for leaf in leaves))
        return next(held, None) or next(as_long, latest[0])
    return known[0] if known else None


def _dim_in_batch(leaf: torch.Tensor, rows: CurrentBatch) -> int | None:
    """Return the dim of a view of a loader's batch that holds the samples; -1 if none does."""
    if is_transforming():  # the tensors of torch.func have no memory of their own
        return None
    for path, given in tensors_in(rows.values):
        if given.dim() and given.data_ptr() == leaf.data_ptr() != 0:
            held = rows.dim_of_samples(path, given)
            if held is None:
                return -1
            stride = given.stride(held)
            dims = [dim for dim in range(leaf.dim()) if leaf.stride(dim) == stride and leaf.shape[dim] == rows.num]
            return dims[0] if len(dims) == 1 else None
    return None


def layouts_of_inputs(leaves: Sequence[torch.Tensor], rows: CurrentBatch) -> list[list[SampleLayout]]:
    """Return the possible layouts of each input of a model, the likeliest first; ``[OWN_ROWS]`` if it is not followed.

    Tensors of the loader's are known. Others, which the script made of them, are taken to hold samples in the dim that
    is as long as the batch, or several batches one after another, unless the loader's own hold other rows.
    """
    given = [(one, rows.dim_of_samples(path, one)) for path, one in tensors_in(rows.values) if one.dim()]
    other_rows = {one.shape[0] for one, held in given if held is None}
    found: list[list[SampleLayout]] = []
    for leaf in leaves:
        dim = _dim_in_batch(leaf, rows)
        layouts = [SampleLayout(dim)] if dim is not None and dim >= 0 else []
        if dim is None:
            layouts = [one for one in layouts_of(leaf.shape, rows.num) if one.inner == 1]
            if rows.num > 0 and not (layouts or other_rows) and leaf.shape[0] % rows.num == 0 and leaf.shape[0]:
                # Batches one after another, as of real and generated samples.
                layouts.append(SampleLayout(0, outer=leaf.shape[0] // rows.num))
        is_lost = not layouts and (dim == -1 or leaf.shape[0] in other_rows)
        found.append([OWN_ROWS] if is_lost else layouts)
    return found


def agree_on_generators(exchange: Exchange, device: torch.device) -> None:
    """Give every rank the state of rank zero's generators, of the CPU and ``device``, if they differ.

    Called by: every rank of ``exchange``.
    """
    for generator in _generators(device):
        kind, state = generator.device.type, generator.get_state()
        facts = [_digest(state), int(generator.initial_seed() < LARGEST_SEED)]
        rows = numbers_of_all(exchange, facts, f"state of torch's {kind} generator")
        if len({digest for digest, _ in rows}) == 1:
            continue
        if any(is_small for _, is_small in rows):
            warn(
                f"torch's {kind} generator had different seeds on different ranks and now has the state of rank 0 "
                "on all of them, so that the numbers drawn by a replicated model belong to one batch; pass the "
                'same seed to torch.manual_seed() on every rank, or randomness="per_rank" to replicate() for '
                "independent numbers"
            )
        _copy_of_rank_zero(generator, exchange)


def _copy_of_rank_zero(generator: torch.Generator, exchange: Exchange) -> None:
    """Give a generator the state that it has on rank zero. Called by: every rank of ``exchange``."""
    what = f"state of torch's {generator.device.type} generator"
    generator.set_state(exchange.broadcast(generator.get_state(), 0, what=what))


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [default_generator(one) for one in dict.fromkeys((torch.device("cpu"), device))]
    return [one for one in found if one is not None]


class _Since:
    """Events since the world was joined."""

    has_drawn = False
    has_warned = False


_since = _Since()


def compare_generators(exchange: Exchange, session: Session) -> None:
    """Have ranks compare torch's generator while they train a model, from a model's first draw on.

    Called by: every rank of ``exchange``, the ranks that hold copies of the model.
    """

    def read() -> int | None:
        return _digest(torch.get_rng_state()) if _since.has_drawn and not is_short() else None

    def is_short() -> bool:
        """Return whether there are ranks without samples, on which dropout draws nothing."""
        return session.batches.current is not None and session.batches.current.num_global < exchange.world_size

    def repair(ranks: Exchange, *, is_expected: bool) -> None:
        for generator in _generators(torch.device(session.world.device)):
            _copy_of_rank_zero(generator, ranks)
        if not (is_expected or _since.has_warned):
            _since.has_warned = True
            warn(
                "the state of torch's random number generator differed between ranks and is now that of rank 0 "
                "on all: since the last comparison, models have drawn numbers that do not belong to one batch; "
                "draw on all ranks or on none; draw along the batch within `with rankwise.as_one_rank():`"
            )

    add_fact("The state of torch's random number generator", read, Repair(repair, is_short))


def forget_draws() -> None:
    """Start over: no model has drawn. Called when the world is left."""
    _since.has_drawn = _since.has_warned = False


def _digest(state: torch.Tensor) -> int:
    # Python's own hash differs between processes.
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest())
