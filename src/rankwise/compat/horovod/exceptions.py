# SPDX-License-Identifier: Apache-2.0
"""``horovod.common.exceptions``: the errors of Horovod's calls, besides those that every call of rankwise may raise."""

from __future__ import annotations

from rankwise.errors import ConfigurationError, RankwiseError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


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


class HostsUpdatedInterrupt(RuntimeError):
    """Machines have joined or left. ``elastic.run`` catches it, synchronizes and continues.

    Args:
        skip_sync: continue without synchronizing.
    """

    def __init__(self, skip_sync: bool) -> None:  # noqa: FBT001 - Horovod's argument
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Never raised here: nothing is built for one version of torch. Scripts may refer to it.

    Args:
        name: of the framework.
        version: the installed one.
        installed_version: the one that Horovod was built for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {version}, and Horovod was built for {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version


def not_initialized() -> ConfigurationError:
    """Return the error of a call that needs a world."""
    return ConfigurationError("Horovod's functions need hvd.init() first.", do="call hvd.init() first")
