# SPDX-License-Identifier: Apache-2.0
"""Where the secret of several machines comes from."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from rankwise.errors import ConfigurationError
from rankwise.launch.auth import SECRET_BYTES, SECRET_NAME, secret_shared_by_machines

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(SECRET_NAME, raising=False)
    return tmp_path / "rankwise" / "secret"


def test_the_file_is_made_once_and_for_its_owner_alone(file: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(secret_shared_by_machines())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 2 * SECRET_BYTES
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_the_variable_goes_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAME, "given")
    assert secret_shared_by_machines() == "given"
    monkeypatch.setenv(SECRET_NAME, "")
    with pytest.raises(ConfigurationError, match="RANKWISE_SECRET is set but empty"):
        secret_shared_by_machines()
    assert not file.exists()


@pytest.mark.parametrize(("mode", "text", "words"), [(0o644, "abc", "Other users"), (0o600, " \n", "is empty")])
def test_a_file_that_keeps_no_secret_is_refused(file: Path, mode: int, text: str, words: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=words) as error:
        secret_shared_by_machines()
    assert error.value.do is not None
    assert str(file) in error.value.do
    assert "abc" not in str(error.value)
