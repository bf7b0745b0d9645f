# SPDX-License-Identifier: Apache-2.0
"""The public call for random numbers in a training loop."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rankwise.comm.session import CurrentBatch, current
from rankwise.errors import ConfigurationError
from rankwise.parallel.randomness.draw_warnings import SinglesInBlock, notice_in_block
from rankwise.parallel.randomness.kernels import install
from rankwise.parallel.randomness.library_draws import drawn_by_row
from rankwise.parallel.randomness.scope import DrawScope, check_randomness, enter, leave

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.comm.session import Session
    from rankwise.parallel.randomness.scope import Randomness


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
    elif session.latest_batch is not None:
        rows = session.latest_batch
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
        with drawn_by_row(rows, singles):
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
