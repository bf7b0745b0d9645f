# SPDX-License-Identifier: Apache-2.0
"""What ``rankwise.compat.horovod`` raises beside ``ValueError`` and what every call of rankwise may raise."""

from __future__ import annotations

from rankwise.errors import ConfigurationError, RankwiseError


class HorovodInternalError(RankwiseError, RuntimeError):
    """An operation could not be carried out: ranks gave different things for one name, or wait for each other.

    Scripts raise it themselves, without words.
    """

    def __init__(self, what: str = "An operation failed.", **fields: str | None) -> None:
        super().__init__(what, **fields)


class Refused(ConfigurationError, HorovodInternalError):
    """An operation was given what it cannot do: a bad argument, and what Horovod calls an internal error."""


class NotOffered(RankwiseError, NotImplementedError):
    """Something of Horovod that is not here; ``do`` names what takes its place."""


def not_initialized() -> ConfigurationError:
    """Return the error of a call that needs a world."""
    return ConfigurationError("Horovod's functions need hvd.init() first.", do="call hvd.init() first")
