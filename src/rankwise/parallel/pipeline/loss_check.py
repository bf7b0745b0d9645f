# SPDX-License-Identifier: Apache-2.0
"""Warns of losses that are not means over samples, by which a pipeline counts its micro-batches. Knows no other rank.

What one device would compute of several micro-batches is known only after the last of them; their gradients are on
their way to the other stages by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwise.log import warn
from rankwise.parallel.loss.nodes import ForwardCall
from rankwise.parallel.loss.on_ranks import model_numbers
from rankwise.parallel.loss.reading import mark_output
from rankwise.parallel.loss.terms import Reader
from rankwise.parallel.trained import tensors_with_grad
from rankwise.places import user_place, words

if TYPE_CHECKING:
    import torch

    from rankwise.parallel.loss.terms import Term

_INSTEAD = (
    "micro-batches are averaged by samples, which differs from what one device computes; return a mean over samples, "
    "or pass weight= to pipeline(): of the target of a micro-batch, what its loss is a mean over"
)


class LossCheck:
    """Reads the loss of each micro-batch, until there is something to warn of."""

    def __init__(self) -> None:
        self._number = next(model_numbers)
        self._ratios: dict[tuple[object, ...], list[float]] = {}
        """What each term is a mean over, per sample, by its operations and the shape of a sample's output."""
        self._is_done = False

    def __call__(self, loss: torch.Tensor, output: object, num_samples: int) -> None:
        """Read the loss of a micro-batch.

        Called by: ranks with the last stage, before backward.

        Args:
            loss: of the micro-batch.
            output: of the model, that the loss was computed from.
            num_samples: of the micro-batch.
        """
        if self._is_done or loss.grad_fn is None:
            return
        outputs = tensors_with_grad(output)
        mark_output(outputs, ForwardCall(self._number, float(num_samples)))
        reader = Reader(())
        reader.read(loss)
        found = self._finding(
            [term for term in reader.terms if term.kind != "same"],
            [tuple(one.shape[1:]) for one in outputs],
            num_samples,
        )
        if found is not None:
            self._is_done = True
            warn(f"the loss of the pipeline ({words(user_place())}) {found}: {_INSTEAD}", all_ranks=True)

    def _finding(self, terms: list[Term], shapes: list[tuple[int, ...]], num_samples: int) -> str | None:
        unknown = next((term for term in terms if term.kind == "unknown"), None)
        if unknown is not None:
            return f"is neither a mean nor a sum over samples because of {unknown.operation}"
        if any(term.kind == "sum" and not term.is_share for term in terms):
            return "is a sum over samples"
        key = tuple((term.kind, term.operation) for term in terms), tuple(shapes)
        ratios = [term.amount / num_samples for term in terms]
        known = self._ratios.setdefault(key, ratios)
        if all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(ratios, known, strict=True)):
            return None
        return "is a mean over what some samples have more of than others (tokens, class weights, a mask)"
