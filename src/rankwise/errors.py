# SPDX-License-Identifier: Apache-2.0
"""Every exception of rankwise, their class tree, and the one place that formats them.

An error states what happened, on which rank, the evidence, and what to do. Raise sites pass these as
fields; only :meth:`RankwiseError.__str__` turns them into text. Imported by everything, imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def rank_prefix(rank: int, world_size: int, hostname: str | None = None) -> str:
    """Return ``[rank 3/16 on gpu-01]``, the prefix of every line about a rank."""
    where = f" on {hostname}" if hostname else ""
    return f"[rank {rank}/{world_size}{where}]"


def fold_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with runs folded: ``[0, 1, 2, 5]`` gives ``ranks 0-2, 5``."""
    runs = runs_of(ranks)
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each run of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def fold_values(value_of_rank: Mapping[int, object]) -> str:
    """Return one line per distinct value, the ranks that hold it first.

    ``{0: "a", 1: "a", 2: "b"}`` gives ``ranks 0-1: a`` and ``rank 2: b`` on two lines.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in sorted(value_of_rank.items()):
        ranks_of.setdefault(str(value), []).append(rank)
    return "\n".join(f"{fold_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())


def bytes_text(num_bytes: int) -> str:
    """Return a number of bytes as text: ``1.5 GiB``."""
    for power, word in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.4g} {word}"
    return f"{num_bytes} B"


class RankwiseError(Exception):
    """Base class of all rankwise errors.

    Args:
        what: one plain sentence that is complete by itself.
        where: the rank it happened on, formatted by :func:`rank_prefix`, or any place (a file, a variable).
        evidence: what was found, one fact per line.
        do: the fix: the exact argument, variable or command.
    """

    def __init__(
        self, what: str, *, where: str | None = None, evidence: str | None = None, do: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.evidence = evidence
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        for name, text in (("on", self.where), ("evidence", self.evidence), ("do", self.do)):
            if text:
                first, *rest = text.splitlines()
                lines.append(f"  {name:<9} {first}")
                lines.extend(f"  {'':<9} {line}" for line in rest)
        return "\n".join(lines)

    def supplement(self, *, where: str | None = None, evidence: str | None = None, do: str | None = None) -> Self:
        """Replace the given fields with what only a caller further up knows; return the error."""
        self.where = where or self.where
        self.evidence = evidence or self.evidence
        self.do = do or self.do
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the keyword fields when the error is pickled."""
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[RankwiseError], args: tuple[Any, ...], fields: dict[str, Any]) -> RankwiseError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigurationError(RankwiseError, ValueError):
    """An argument or setting is invalid, or two contradict each other."""


class TorchTooOld(RankwiseError, ImportError):
    """The installed torch lacks functions that rankwise needs."""


class UntestedTorch(UserWarning):
    """The installed torch is newer than any version that rankwise was tested on."""


class WrongGradients(RankwiseError, RuntimeError):
    """On this version of torch, a strategy computes different gradients than one device does."""


class EnvironmentConflict(ConfigurationError):
    """The variables of two launchers contradict each other about this process."""


class SecretRefused(ConfigurationError):
    """Two processes of a job do not hold the same secret."""


class NotSigned(RankwiseError, RuntimeError):
    """Bytes arrived as a rank's object that the rank has not signed."""


class NotRankwise(ConfigurationError):
    """Another program listens where a process of the job should."""


class NotJoined(RankwiseError, RuntimeError):
    """A function that needs a world was called before ``rankwise.join()``."""


class LaunchError(RankwiseError, RuntimeError):
    """The ranks could not be started."""


class RankFailed(RankwiseError, RuntimeError):
    """A rank of ``rankwise.launch`` returned no value and raised no exception; ``rank`` is its number."""

    def __init__(self, what: str, *, rank: int, **fields: str | None) -> None:
        super().__init__(what, **fields)
        self.rank = rank


class CollectiveMismatch(RankwiseError, RuntimeError):
    """Ranks called different collectives, or the same one with different tensors."""


class PeerFailed(RankwiseError, RuntimeError):
    """Another rank failed; its error is in ``evidence``, its number in ``rank``."""

    def __init__(self, what: str, *, rank: int, **fields: str | None) -> None:
        super().__init__(what, **fields)
        self.rank = rank


class PeerMissing(RankwiseError, RuntimeError):
    """Some ranks never reached a collective, or left before it; ``ranks`` lists them."""

    def __init__(self, what: str, *, ranks: Sequence[int], **fields: str | None) -> None:
        super().__init__(what, **fields)
        self.ranks = tuple(ranks)


class ModelMismatch(RankwiseError, ValueError):
    """The model is not the same on every rank."""


class ReplicasDiffer(RankwiseError, RuntimeError):
    """Replicas of a model have diverged: parameters, hyperparameters or other state differ between ranks."""


class DatasetError(RankwiseError, ValueError):
    """A dataset is empty, or not the same on every rank."""


class ReportError(RankwiseError, ValueError):
    """The records of a run cannot be read, or there are none."""


class CheckpointError(RankwiseError, RuntimeError):
    """A checkpoint could not be written, is unfinished or damaged, or belongs to another model."""
