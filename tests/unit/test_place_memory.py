# SPDX-License-Identifier: Apache-2.0
"""What of a placed model is in memory and on disk, and for how long."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from placed_models import batch_of, net, step_of, tower
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.place import fetch
from rankwise.place.place import place
from rankwise.place.weights import OffloadFiles

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.place.fetch import OffloadedPart

pytestmark = pytest.mark.usefixtures("one_thread")


class Live:
    """Counts fetched bytes that are in memory, and who fetched."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.most_bytes = 0
        self.fetched_by: list[str] = []
        self._lock = threading.Lock()

    def count(self, change: int) -> None:
        with self._lock:
            self.now_bytes += change
            self.most_bytes = max(self.most_bytes, self.now_bytes)

    def take(self) -> tuple[int, int, int]:
        """Return the bytes now, the most since the last call, and how many parts a thread fetched since then."""
        taken = self.now_bytes, self.most_bytes, self.fetched_by.count("rankwise-fetch")
        self.most_bytes = self.now_bytes
        self.fetched_by.clear()
        return taken


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    counts = Live()
    copies = fetch._copies

    def counted(away: OffloadedPart) -> list[torch.Tensor]:
        data = copies(away)
        counts.fetched_by.append(threading.current_thread().name)
        for tensor in data:
            counts.count(tensor.nbytes)
            # The storage lives as long as anything that shares its memory.
            weakref.finalize(tensor.untyped_storage(), counts.count, -tensor.nbytes)
        return data

    monkeypatch.setattr(fetch, "_copies", counted)
    return counts


def test_at_most_two_layers_are_in_memory_and_none_waits_for_backward(live: Live, tmp_path: Path) -> None:
    layer_bytes = 20 * 20 * 8
    model = place(tower(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    for step in range(3):
        loss = model(x).square().mean()
        now, most, ahead = live.take()
        assert now == 0
        assert most <= 2 * layer_bytes
        # In the first forward nobody knows yet what comes next.
        assert ahead == (5 if step else 0)
        loss.backward()
        now, most, ahead = live.take()
        assert now == 0
        assert most <= 2 * layer_bytes
        assert ahead == 5
    with torch.no_grad():
        model(x)
    assert live.take()[0] == 0
    tight = place(tower(), "auto", budgets={"cpu": layer_bytes}, offload_folder=tmp_path)
    for _ in range(2):
        tight(x).sum().backward()
    assert live.take() == (0, layer_bytes, 0)


def test_nothing_that_was_fetched_stays(live: Live, tmp_path: Path) -> None:
    """Not even in what torch's recurrent layers keep for themselves."""
    model = place(net(), {"": "disk"}, offload_folder=tmp_path)
    with torch.no_grad():
        model(batch_of(0)[0])
    now, most, _ = live.take()
    assert now == 0
    assert most > 0
    step_of(model, 0)
    assert live.take()[0] == 0


def test_a_model_that_is_one_block(live: Live, tmp_path: Path) -> None:
    seen: list[int] = []

    class Single(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.data_ptr())
            return super().forward(x)

    model = place(Single(3, 2), {"": "disk"}, offload_folder=tmp_path)
    model(torch.ones(1, 3)).sum().backward()
    assert seen != [model.weight.data_ptr()]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    assert live.take()[0] == 0


def test_space_on_disk_is_taken_before_it_is_written(tmp_path: Path) -> None:
    files = OffloadFiles(tmp_path)
    files.tensors({"weight": (torch.float32, (100_000,))})
    (file,) = files.folder.glob("*.safetensors")
    assert file.stat().st_blocks * 512 >= 400_000
    with pytest.raises(ConfigurationError, match=r"not support torch\.complex128"):
        files.tensors({"weight": (torch.complex128, (1,))})


def test_running_a_placed_model_does_not_import_the_compiler(tmp_path: Path) -> None:
    program = (
        "import sys, torch, rankwise\n"
        "model = rankwise.place(torch.nn.Linear(2, 2), {'': 'disk'}, offload_folder=sys.argv[1])\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


@pytest.mark.parametrize("plan", ["cpu", "disk"])
def test_a_model_is_freed_with_its_last_name(plan: str, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = place(net(), {"": plan}, offload_folder=tmp_path)
        step_of(model, 0)
        left = weakref.ref(model)
        del model
        assert left() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
