# SPDX-License-Identifier: Apache-2.0
"""Horovod's variables: those that are applied here, and those that are logged as without effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
LOG_LEVEL = "HOROVOD_LOG_LEVEL"
LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
INTERFACE = "HOROVOD_GLOO_IFACE"
TIMELINE = "HOROVOD_TIMELINE"
DYNAMIC = "DYNAMIC"
"""In place of a file: the script starts the timeline."""
FACTS = {
    f"HOROVOD_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "ELASTIC"),
        *("CONTROLLER", "CPU_OPERATIONS", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT"),
    )
}
"""Variables that a launcher sets for its ranks; they are not settings of the user."""


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """The settings in Horovod's variables."""

    log_level: int | None = None
    limit_seconds: float | None = None
    """The time after which a rank that waits for others raises an error."""
    interface: str = ""
    """The network interface that ranks use."""
    timeline: str = ""
    """The file that the timeline of all ranks is written to."""
    without_effect: tuple[str, ...] = ()
    """Names of variables that are set but have no effect here."""


def read(variables: Mapping[str, str], *, has_joined: bool) -> HorovodSettings:
    """Return the settings in variables; without limit and interface if the world was joined before ``hvd.init()``."""
    given = {name: value.strip() for name, value in variables.items() if name.startswith("HOROVOD_") and value.strip()}
    too_late = {LIMIT, INTERFACE} if has_joined else set[str]()
    honoured = {LOG_LEVEL, LIMIT, INTERFACE, TIMELINE} - too_late
    timeline = given.get(TIMELINE, "")
    return HorovodSettings(
        log_level=_level(given[LOG_LEVEL]) if LOG_LEVEL in given else None,
        limit_seconds=_seconds(given[LIMIT]) if LIMIT in given and not has_joined else None,
        interface="" if has_joined else given.get(INTERFACE, ""),
        timeline="" if timeline == DYNAMIC else timeline,
        without_effect=tuple(sorted(given.keys() - honoured - FACTS)),
    )


def _level(text: str) -> int:
    if text.lower() not in LEVELS:
        raise ConfigurationError(f"{LOG_LEVEL}={text!r} is not a level.", do="set it to one of " + ", ".join(LEVELS))
    return LEVELS[text.lower()]


def _seconds(text: str) -> float | None:
    """Return a limit in seconds; none for 0, as in Horovod."""
    if not text.isdecimal():
        raise ConfigurationError(f"{LIMIT}={text!r} is not a number of seconds.", do="set it to 600, for example")
    return float(text) or None
