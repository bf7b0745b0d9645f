# SPDX-License-Identifier: Apache-2.0
"""NumPy's global generator inside ``as_one_rank()``: its functions draw for the whole batch and return a rank's rows.

Its numbers are those of plain NumPy on one rank, whatever ``randomness`` says.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise.errors import ConfigurationError
from rankwise.places import user_place, words

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.batch_in_hand import BatchInHand

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
def drawn_by_row(rows: BatchInHand) -> Generator[None]:
    """Have functions of ``numpy.random`` draw the rows of one rank's batch inside the block."""
    if rows.num == rows.num_global:
        yield
        return
    before = {name: getattr(np.random, name) for name in (*_SIZE_AT, *_BY_DIMS, *_MIXING)}
    for name, draw in before.items():
        setattr(np.random, name, _replaced(name, draw, rows))
    try:
        yield
    finally:
        for name, draw in before.items():
            setattr(np.random, name, draw)


def _replaced(name: str, draw: Callable[..., Any], rows: BatchInHand) -> Callable[..., Any]:
    @wraps(draw)
    def by_dims(*dims: int) -> Any:  # noqa: ANN401 - as NumPy
        return _own(draw(rows.num_global, *dims[1:]), rows) if dims and dims[0] == rows.num else draw(*dims)

    @wraps(draw)
    def by_size(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as NumPy
        at = _SIZE_AT[name]
        size = args[at] if len(args) > at else kwargs.get("size")
        dims = (size,) if isinstance(size, int | np.integer) else tuple(size or ())
        if not dims or dims[0] != rows.num:
            _check_scalars(name, (*args[:at], *kwargs.values()), rows)
            return draw(*args, **kwargs)
        whole = (rows.num_global, *dims[1:])
        if len(args) > at:
            return _own(draw(*args[:at], whole, *args[at + 1 :], **kwargs), rows)
        return _own(draw(*args, **{**kwargs, "size": whole}), rows)

    @wraps(draw)
    def mix(values: Any) -> Any:  # noqa: ANN401 - as NumPy
        if (values if isinstance(values, int | np.integer) else len(values)) == rows.num:
            raise ConfigurationError(
                f"numpy.random.{name} at {words(user_place())} permutes this rank's samples among themselves.",
                evidence=f"this rank has {rows.num} of {rows.num_global} samples; one rank would permute all of them",
                do="gather the batch (rankwise.all_gather_uneven), permute it, and take this rank's rows",
            )
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
