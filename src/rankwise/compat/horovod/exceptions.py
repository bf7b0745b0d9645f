# SPDX-License-Identifier: Apache-2.0
"""``horovod.common.exceptions``: the exceptions that elastic scripts name."""

from __future__ import annotations

from rankwise.compat.horovod.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


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
