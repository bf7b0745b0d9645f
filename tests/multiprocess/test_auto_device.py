# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto`` on a device: tensors of calls travel through host memory, and gradients by the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from on_standin import python_with_standin

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
device = sys.argv[1]
model = nn.Sequential(
    nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3)
).double().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
x, y = torch.randn(33, 5, dtype=torch.float64), torch.randint(0, 3, (33,))
for epoch in range(3):
    model.train()
    for rows in torch.randperm(33).split(9):
        loss = nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.mul_(0.999)
    model.eval()
    with torch.no_grad():
        print(loss.item(), model(x.to(device)).sum().item())
"""


@pytest.mark.parametrize(("num_ranks", "strict"), [(2, True), (3, False)], ids=["as_nccl", "gloo"])
def test_a_script_trains_on_a_device_as_on_the_cpu(
    num_ranks: int, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_AUTO_SPLIT", "always")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = python_with_standin("-c", SCRIPT, "cpu")
    assert alone.returncode == 0, alone.stderr
    words = ("-W", "ignore", "-m", "rankwise", "run", "-n", str(num_ranks), "--auto", str(script), "standin")
    found = python_with_standin(*words, strict=strict)
    assert found.returncode == 0, found.stderr
    assert "runs whole" not in found.stderr
    numbers = [[float(word) for word in one.stdout.split()] for one in (alone, found)]
    assert len(numbers[0]) == 6
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-10)
