# SPDX-License-Identifier: Apache-2.0
"""The public call for random numbers in a training loop: of torch, NumPy and Python.

Inside it NumPy's and Python's global generators draw for all ranks and return this rank's rows. Their numbers are those
of one rank without rankwise, whatever ``randomness`` is.
"""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.comm.current_batch import CurrentBatch
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.random_numbers.draw_warnings import SinglesInBlock, notice_in_block, permutes_a_part
from rankwise.replicate.random_numbers.kernels import install
from rankwise.replicate.random_numbers.scope import DrawScope, check_randomness, enter, leave

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import ModuleType

    from rankwise.comm.session import Session
    from rankwise.replicate.random_numbers.scope import Randomness

    Draw = Callable[..., Any]


_SIZE_AT = {
    **dict.fromkeys(("random", "random_sample", "ranf", "sample", "standard_exponential", "standard_normal"), 0),
    **dict.fromkeys(("chisquare", "choice", "exponential", "geometric", "poisson", "rayleigh", "standard_t"), 1),
    **dict.fromkeys(("beta", "binomial", "gamma", "gumbel", "laplace", "logistic", "lognormal", "normal"), 2),
    **dict.fromkeys(("negative_binomial", "randint", "uniform", "vonmises"), 2),
    "triangular": 3,
}
"""Which argument of each function is the size."""
_BY_DIMS = ("rand", "randn")
_MIXING = ("permutation", "shuffle")
_SINGLE = tuple(
    name
    for name in (
        *("random", "uniform", "triangular", "randint", "randrange", "choice", "getrandbits", "gauss"),
        *("normalvariate", "lognormvariate", "expovariate", "betavariate", "gammavariate", "vonmisesvariate"),
        *("paretovariate", "weibullvariate", "binomialvariate"),
    )
    if hasattr(random, name)  # the last one since Python 3.12
)
_OTHERS = ("shuffle", "sample", "choices")


@contextmanager
def as_one_rank(*, num_samples: int | None = None, randomness: Randomness = "counter") -> Generator[None]:
    """Draw random numbers along the batch as one rank would draw them for the global batch.

    Called by: every rank, around the same draws; waits for the others only with ``num_samples``.

    For noise in a training loop: a GAN's latent vectors, negative labels, noise added to inputs. Inside the block, a
    draw of torch with as many rows (the first dim) as this rank has samples returns this rank's rows of the numbers
    that one rank would draw; draws of other shapes are the same on every rank. Models that went through
    :func:`rankwise.replicate` need no block. The same holds for functions of ``numpy.random``, by their ``size``, and
    Python's ``random.choices``, by its ``k``. A warning names lines that draw a single number of NumPy or Python for
    each sample. Generators made with ``numpy.random.default_rng`` or ``random.Random`` are not changed.

    Args:
        num_samples: of this rank, for batches that do not come from :class:`rankwise.DataLoader`.
        randomness: as for :func:`rankwise.replicate`.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ConfigurationError: no batch is known; or a permutation of this rank's samples is drawn inside.
    """
    session = current()
    check_randomness(randomness, "as_one_rank")
    install(session)
    if num_samples is not None:
        rows: CurrentBatch | None = _rows_of(session, num_samples)
    elif session.batches.latest is not None:
        rows = session.batches.latest
    elif session.world.world_size == 1:
        rows = None
    else:
        raise ConfigurationError(
            "as_one_rank() cannot tell how many samples the ranks have.",
            evidence="no loop over a rankwise.DataLoader is running",
            do="use it inside `for batch in loader`, or pass this rank's number of samples: "
            "as_one_rank(num_samples=len(x))",
        )
    if randomness == "torch" and session.world.world_size == 1:
        yield
        return
    rows = rows or CurrentBatch(0, 0, 0, 0, 0, 0)
    scope = DrawScope(rows, randomness, session.world.rank, has_graph=torch.is_grad_enabled())
    singles = SinglesInBlock()
    enter(scope)
    try:
        with _drawn_by_row(rows, singles):
            yield
    finally:
        leave()
    if rows.num < rows.num_global:
        notice_in_block(scope.num_single, rows.num)
        singles.notice(rows.num)


def _rows_of(session: Session, num_samples: int) -> CurrentBatch:
    """Exchange how many samples each rank has. Called by: every rank."""
    if session.exchange is None:
        return CurrentBatch(0, 0, 0, num_samples, num_samples, 0)
    numbers = session.exchange.all_gather(torch.tensor([num_samples]), what="numbers of samples").flatten().tolist()
    return CurrentBatch(0, 0, 0, num_samples, sum(numbers), sum(numbers[: session.world.rank]))


@contextmanager
def _drawn_by_row(rows: CurrentBatch, singles: SinglesInBlock) -> Generator[None]:
    """Have functions of ``numpy.random`` and ``random`` draw this rank's ``rows``, and count draws of one number."""
    if rows.num == rows.num_global:
        yield
        return
    names = (*_SIZE_AT, *_BY_DIMS, *_MIXING)
    with (
        replacing(np.random, names, lambda name, draw: _replaced(name, draw, rows, singles)),
        replacing(random, (*_SINGLE, *_OTHERS), lambda name, draw: _replaced_in_python(name, draw, rows, singles)),
    ):
        yield


def _replaced(name: str, draw: Draw, rows: CurrentBatch, singles: SinglesInBlock) -> Draw:
    def by_dims(*dims: int) -> Any:
        if not dims or dims[0] != rows.num:
            if math.prod(dims) == 1:
                singles.count()
            return draw(*dims)
        return _own(draw(rows.num_global, *dims[1:]), rows)

    def by_size(*args: Any, **kwargs: Any) -> Any:
        at = _SIZE_AT[name]
        size = args[at] if len(args) > at else kwargs.get("size")
        dims = (size,) if isinstance(size, int | np.integer) else tuple(size or ())
        if not dims or dims[0] != rows.num:
            _check_scalars(name, (*args[:at], *kwargs.values()), rows)
            if math.prod(dims) == 1:
                singles.count()
            return draw(*args, **kwargs)
        whole = (rows.num_global, *dims[1:])
        if len(args) > at:
            return _own(draw(*args[:at], whole, *args[at + 1 :], **kwargs), rows)
        return _own(draw(*args, **{**kwargs, "size": whole}), rows)

    def mix(values: Any) -> Any:
        if (values if isinstance(values, int | np.integer) else len(values)) == rows.num:
            raise permutes_a_part(f"numpy.random.{name}", rows)
        return draw(values)

    return by_dims if name in _BY_DIMS else mix if name in _MIXING else by_size


def _own(drawn: np.ndarray[Any, Any], rows: CurrentBatch) -> np.ndarray[Any, Any]:
    return drawn[rows.start : rows.start + rows.num]


def _check_scalars(name: str, args: tuple[Any, ...], rows: CurrentBatch) -> None:
    if name != "choice" and any(np.ndim(one) and len(one) == rows.num for one in args):
        raise ConfigurationError(
            f"numpy.random.{name} at {words(user_call_site())} draws from arrays of this rank's samples.",
            evidence=f"this rank has {rows.num} of {rows.num_global} samples and not the values of the others",
            do="draw standard numbers (numpy.random.standard_normal, numpy.random.random) and scale them",
        )


def _replaced_in_python(name: str, draw: Draw, rows: CurrentBatch, singles: SinglesInBlock) -> Draw:
    def count(*args: Any, **kwargs: Any) -> Any:
        singles.count()
        return draw(*args, **kwargs)

    def choices(*args: Any, k: int = 1, **kwargs: Any) -> Any:
        if k != rows.num:
            return draw(*args, k=k, **kwargs)
        return draw(*args, k=rows.num_global, **kwargs)[rows.start : rows.start + rows.num]

    def shuffle(values: Any) -> None:
        if len(values) == rows.num:
            raise permutes_a_part("random.shuffle", rows)
        draw(values)

    def sample(population: Any, k: int, **kwargs: Any) -> Any:
        if len(population) == k == rows.num:
            raise permutes_a_part("random.sample", rows)
        return draw(population, k, **kwargs)

    return {"choices": choices, "shuffle": shuffle, "sample": sample}.get(name, count)


@contextmanager
def replacing(module: ModuleType, names: Iterable[str], replace: Callable[[str, Draw], Draw]) -> Generator[None]:
    """Replace functions of a module inside the block; other threads, as one that reads ahead, call the original ones.

    Args:
        module: the module.
        names: of the functions.
        replace: returns the function to call instead, given the name and the original function.
    """
    before = {name: getattr(module, name) for name in names}
    for name, draw in before.items():
        setattr(module, name, _in_this_thread(draw, replace(name, draw)))
    try:
        yield
    finally:
        for name, draw in before.items():
            setattr(module, name, draw)


def _in_this_thread(draw: Draw, replaced: Draw) -> Draw:
    thread = get_ident()

    # Without functools.wraps, which would take longer than everything else here.
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (replaced if get_ident() == thread else draw)(*args, **kwargs)

    return dispatch
