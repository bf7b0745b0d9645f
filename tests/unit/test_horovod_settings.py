# SPDX-License-Identifier: Apache-2.0
"""Horovod's variables are applied, or logged as without effect."""

from __future__ import annotations

import logging

import pytest

from rankwise.compat.horovod.initialization import HorovodSettings, read_settings
from rankwise.errors import ConfigurationError


def test_supported_settings_are_honoured() -> None:
    given = {
        "HOROVOD_LOG_LEVEL": "WARNING",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_RANK": "1",
        "HOROVOD_TIMELINE": "/tmp/t.json",  # noqa: S108 - never opened
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_FUSION_THRESHOLD": "",
        "PATH": "/bin",
    }
    timeline = given["HOROVOD_TIMELINE"]
    assert read_settings(given, has_joined=False) == HorovodSettings(
        log_level=logging.WARNING,
        limit_seconds=90.0,
        interface="eth0",
        timeline=timeline,
        without_effect=("HOROVOD_CYCLE_TIME",),
    )
    late = ("HOROVOD_CYCLE_TIME", "HOROVOD_GLOO_IFACE", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    assert read_settings(given, has_joined=True) == HorovodSettings(
        log_level=logging.WARNING, timeline=timeline, without_effect=late
    )


def test_a_script_may_start_the_timeline_itself() -> None:
    assert read_settings({"HOROVOD_TIMELINE": "DYNAMIC"}, has_joined=False) == HorovodSettings()


def test_without_a_limit_there_is_none() -> None:
    assert read_settings({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, has_joined=False) == HorovodSettings()


@pytest.mark.parametrize(
    ("name", "value", "do"),
    [("LOG_LEVEL", "loud", "trace, debug, info"), ("STALL_SHUTDOWN_TIME_SECONDS", "soon", "600")],
)
def test_a_bad_value_is_an_error(name: str, value: str, do: str) -> None:
    with pytest.raises(ConfigurationError, match=value) as caught:
        read_settings({f"HOROVOD_{name}": value}, has_joined=False)
    assert do in str(caught.value.do)
