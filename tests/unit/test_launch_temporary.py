# SPDX-License-Identifier: Apache-2.0
"""Where a rank's multiprocessing keeps its sockets."""

from __future__ import annotations

import multiprocessing
from multiprocessing import util
from multiprocessing.connection import Listener

import pytest

from rankwise.launch.fork_server.worker import keep_sockets_in


@pytest.fixture
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", "before")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_unchanged")
def test_a_folder_that_leaves_room_for_a_sockets_name_is_used(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = tmp_path_factory.mktemp("short")
    longest = 107 - len("/listener-12345678")
    folder = outer / ("x" * (longest - len(str(outer)) - 1))
    folder.mkdir()
    keep_sockets_in(f"{folder}x")
    assert util.get_temp_dir() == "before"
    keep_sockets_in(str(folder))
    assert util.get_temp_dir() == str(folder)
    with Listener(None, "AF_UNIX") as listener:
        assert str(listener.address).startswith(f"{folder}/")
