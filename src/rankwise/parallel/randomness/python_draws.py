# SPDX-License-Identifier: Apache-2.0
"""Python's global generator inside ``as_one_rank()``: ``choices`` gives a rank's rows, and what draws singly is named.

Its numbers are those of plain Python on one rank, whatever ``randomness`` says.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.parallel.randomness.notice import permutes_a_part
from rankwise.parallel.randomness.replacing import replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.batch_in_hand import BatchInHand
    from rankwise.parallel.randomness.notice import SinglesInBlock

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
def drawn_in_python(rows: BatchInHand, singles: SinglesInBlock) -> Generator[None]:
    """Have functions of ``random`` draw the rows of one rank's batch inside the block, or count what they draw.

    Args:
        rows: the samples in hand.
        singles: counts draws of one number.
    """
    if rows.num == rows.num_global:
        yield
        return

    def replace(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python
            singles.count()
            return draw(*args, **kwargs)

        def choices(*args: Any, k: int = 1, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python
            if k != rows.num:
                return draw(*args, k=k, **kwargs)
            return draw(*args, k=rows.num_global, **kwargs)[rows.start : rows.start + rows.num]

        def shuffle(values: Any) -> None:  # noqa: ANN401 - as Python
            if len(values) == rows.num:
                raise permutes_a_part("random.shuffle", rows)
            draw(values)

        def sample(population: Any, k: int, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python
            if len(population) == k == rows.num:
                raise permutes_a_part("random.sample", rows)
            return draw(population, k, **kwargs)

        return {"choices": choices, "shuffle": shuffle, "sample": sample}.get(name, count)

    with replacing(random, (*_SINGLE, *_OTHERS), replace):
        yield
