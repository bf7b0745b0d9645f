# SPDX-License-Identifier: Apache-2.0
"""The methods of compressing gradients, as values."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from rankwise.errors import ConfigurationError


@dataclass(frozen=True)
class Narrow:
    """Gradients are sent in a dtype of two bytes, ``"bf16"`` or ``"fp16"``, and added up in float32 if possible.

    Rounding errors are lost: bf16 keeps 8 bits of each number, fp16 keeps 11 and overflows above 65504.
    """

    dtype: str


@dataclass(frozen=True)
class Int8:
    """Gradients are sent as integers of one byte, with a scale for every 256 of them: a quarter of float32.

    Each rank adds its rounding errors to its next gradients (error feedback), so that nothing is lost over time.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), for the error feedback; sums are
        quantised in both directions.
    """


@dataclass(frozen=True)
class PowerSGD:
    """Matrices of gradients are sent as two thin factors, of ``rank`` columns each; vectors are sent as they are.

    A matrix [n, m] takes (n + m) * rank numbers instead of n * m. Each rank adds the error of its factors to its next
    gradients.

    Args:
        rank: columns of the factors; 1 to 4 are usual.

    Raises:
        ConfigurationError: ``rank`` is not an integer of at least one.

    Source: Vogels et al., "PowerSGD" (arXiv:1905.13727), algorithms 1 and 2, with warm start.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigurationError(
                f"rank of PowerSGD must be an integer of at least 1, got {self.rank!r}.",
                do="pass rank= the number of columns",
            )


@dataclass(frozen=True)
class TopK:
    """Only the largest gradients of each bucket are sent, with their places; the others are added to the next ones.

    Bytes grow with the number of ranks: each sends its own choice to every other.

    Args:
        share: of the gradients that are sent, above 0 and at most 1.

    Raises:
        ConfigurationError: ``share`` is outside these bounds.

    Source: Stich et al., "Sparsified SGD with Memory" (arXiv:1809.07599), algorithm 1.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, Real) or not 0.0 < self.share <= 1.0:
            raise ConfigurationError(
                f"share of TopK must be above 0 and at most 1, got {self.share!r}.", do="pass share=0.01, for example"
            )


Method = Narrow | Int8 | PowerSGD | TopK

NAMED: dict[str, Method] = {
    "bf16": Narrow("bf16"),
    "fp16": Narrow("fp16"),
    "int8": Int8(),
    "powersgd": PowerSGD(),
    "top-k": TopK(),
}


def method_of(compress: object) -> Method | None:
    """Return the method that ``compress=`` names.

    Raises:
        ConfigurationError: there is no such method; the error lists the known ones.
    """
    if compress is None or isinstance(compress, Narrow | Int8 | PowerSGD | TopK):
        return compress
    if isinstance(compress, str) and compress in NAMED:
        return NAMED[compress]
    raise ConfigurationError(
        f"Gradients cannot be compressed by {compress!r}.",
        do=f"pass compress= one of {', '.join(map(repr, NAMED))}, "
        "rankwise.PowerSGD(rank=...) or rankwise.TopK(share=...)",
    )
