# SPDX-License-Identifier: Apache-2.0
"""Files that an earlier rankwise wrote: trainings of every arrangement continue from them on real ranks.

``tests/kept/make.py`` says how they were written. Where one of these tests fails, users' files no longer load.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from kept_arrangements import ARRANGEMENTS, resume_arrangement
from kept_files import TOLERANCE, assert_close, assert_same_bits, expected, told
from kept_models import same_values
from kept_states import elastic_values, resume_elastic, serve
from kept_surroundings import resume_surroundings
from torch import nn

from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def sources_of(name: str) -> list[str]:
    """Return whose checkpoints an arrangement loads: one rank those of all with its optimizer, others their own."""
    if name not in {"one", "megengine"}:
        return [name]
    optimizer = type(ARRANGEMENTS[name].optimizer(nn.Linear(1, 1))).__name__
    return [
        source
        for source, arrangement in ARRANGEMENTS.items()
        if type(arrangement.optimizer(nn.Linear(1, 1))).__name__ == optimizer
    ]


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_training_continues_from_its_checkpoint(kept: Path, tmp_path: Path, name: str) -> None:
    sources = sources_of(name)
    arguments = name, sources, str(kept), str(tmp_path)
    results = [one.get() for one in run_ranks(resume_arrangement, ARRANGEMENTS[name].world_size, *arguments)]
    for source in sources:
        saved, after = expected(kept, source, "saved"), expected(kept, source, "after")
        has_outer = ARRANGEMENTS[name].has_islands
        own = {key: tensor for key, tensor in saved.items() if has_outer or not key.startswith("outer/")}
        found: set[str] = set()
        for result in results:
            loaded, later = result[source]
            assert_same_bits(loaded, {key: own[key] for key in loaded})
            found |= loaded.keys()
            if ARRANGEMENTS[source].has_islands == has_outer:
                assert_close(later, {key: after[key] for key in later})
        assert found == own.keys()


@pytest.mark.parametrize("world_size", [1, 3])
def test_everything_around_a_training_continues(kept: Path, world_size: int) -> None:
    """The newest checkpoint is where an interrupted save has left it, beside half of another."""
    wanted = told(kept, "surroundings")
    saved, after = (expected(kept, "surroundings", kind) for kind in ("saved", "after"))
    for result in run_ranks(resume_surroundings, world_size, str(kept / "surroundings")):
        found = result.get()
        assert_same_bits(found["state"], saved)
        # The digest of a drawn order is known, and compared, once the order is drawn again.
        drawn = {**wanted["positions"]["drawn"], "sampler_digest": None}
        assert json.loads(json.dumps(found["positions"])) == {**wanted["positions"], "drawn": drawn}
        assert (found["best"], found["same"]) == (0.25, True)
        assert_close(found["after"].pop("model"), after)
        assert found["after"].pop("lr") == pytest.approx(wanted["after"]["lr"], rel=TOLERANCE)
        assert found["after"] == {key: value for key, value in wanted["after"].items() if key != "lr"}


@pytest.mark.parametrize(("mode", "world_size", "num_servers"), [("sync", 4, 2), ("async", 2, 1)])
def test_parameter_servers_continue_from_a_snapshot(
    kept: Path, tmp_path: Path, mode: str, world_size: int, num_servers: int
) -> None:
    folder = shutil.copytree(kept / f"server-{mode}", tmp_path / "servers")
    results = run_ranks(serve, world_size, (mode, num_servers), 0.7, 12, str(folder))
    place = told(kept, f"server-{mode}")
    assert [len(result.get()) for result in results] == [2] * (world_size - num_servers) + [0] * num_servers
    for result in results[:-num_servers]:
        (started, began_at), (ended, _) = result.get()
        assert began_at == place
        assert_same_bits(started, expected(kept, f"server-{mode}", "saved"))
        assert_close(ended, expected(kept, f"server-{mode}", "after"))


def test_an_elastic_state_continues_from_a_commit(kept: Path) -> None:
    left = told(kept, "elastic")
    for rank, result in enumerate(run_ranks(resume_elastic, 2, str(kept / "elastic"))):
        found = result.get()
        assert_same_bits(found["tensors"], expected(kept, "elastic", "saved"))
        assert same_values(found["values"], elastic_values())
        assert found["left"] == left[rank]
        assert_close(found["after"], expected(kept, "elastic", "after"))
