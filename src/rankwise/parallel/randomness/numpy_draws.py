# SPDX-License-Identifier: Apache-2.0
"""NumPy's global generator inside ``as_one_rank()``: its functions draw for the whole batch and return a rank's rows.

Its numbers are those of plain NumPy on one rank, whatever ``randomness`` says.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise.errors import ConfigurationError
from rankwise.parallel.randomness.notice import permutes_a_part
from rankwise.parallel.randomness.replacing import replacing
from rankwise.places import user_place, words

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.batch_in_hand import BatchInHand
    from rankwise.parallel.randomness.notice import SinglesInBlock

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


@contextmanager
def drawn_by_row(rows: BatchInHand, singles: SinglesInBlock) -> Generator[None]:
    """Have functions of ``numpy.random`` draw the rows of one rank's batch inside the block.

    Args:
        rows: the samples in hand.
        singles: counts draws of one number.
    """
    if rows.num == rows.num_global:
        yield
        return
    names = (*_SIZE_AT, *_BY_DIMS, *_MIXING)
    with replacing(np.random, names, lambda name, draw: _replaced(name, draw, rows, singles)):
        yield


def _replaced(name: str, draw: Callable[..., Any], rows: BatchInHand, singles: SinglesInBlock) -> Callable[..., Any]:
    def by_dims(*dims: int) -> Any:  # noqa: ANN401 - as NumPy
        if not dims or dims[0] != rows.num:
            if math.prod(dims) == 1:
                singles.count()
            return draw(*dims)
        return _own(draw(rows.num_global, *dims[1:]), rows)

    def by_size(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as NumPy
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

    def mix(values: Any) -> Any:  # noqa: ANN401 - as NumPy
        if (values if isinstance(values, int | np.integer) else len(values)) == rows.num:
            raise permutes_a_part(f"numpy.random.{name}", rows)
        return draw(values)

    return by_dims if name in _BY_DIMS else mix if name in _MIXING else by_size


def _own(drawn: np.ndarray[Any, Any], rows: BatchInHand) -> np.ndarray[Any, Any]:
    return drawn[rows.start : rows.start + rows.num]


def _check_scalars(name: str, args: tuple[Any, ...], rows: BatchInHand) -> None:
    if name != "choice" and any(np.ndim(one) and len(one) == rows.num for one in args):
        raise ConfigurationError(
            f"numpy.random.{name} at {words(user_place())} draws from arrays of this rank's samples.",
            evidence=f"this rank has {rows.num} of {rows.num_global} samples, and does not know the others' values",
            do="draw standard numbers (numpy.random.standard_normal, numpy.random.random) and scale them",
        )
