# SPDX-License-Identifier: Apache-2.0
"""The errors of ``rankwise.compat.horovod``, besides those that every call of rankwise may raise."""

from __future__ import annotations

from rankwise.errors import ConfigurationError, RankwiseError


class HorovodInternalError(RankwiseError, RuntimeError):
    """An operation could not be carried out: ranks passed different arguments for one name, or wait for each other.

    Scripts raise it themselves, without a message.
    """

    def __init__(self, what: str = "An operation failed.", **fields: str | None) -> None:
        super().__init__(what, **fields)


class Refused(ConfigurationError, HorovodInternalError):
    """An operation cannot be done with these arguments; Horovod calls this an internal error."""


class NotOffered(RankwiseError, NotImplementedError):
    """A part of Horovod that is not offered; ``do`` names a replacement."""


def not_initialized() -> ConfigurationError:
    """Return the error of a call that needs a world."""
    return ConfigurationError("Horovod's functions need hvd.init() first.", do="call hvd.init() first")
