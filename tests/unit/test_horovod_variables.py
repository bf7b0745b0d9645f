# SPDX-License-Identifier: Apache-2.0
"""The variables of horovodrun, from what a rank's launcher says."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.world.environments.rankwise import horovod_variables, variables_for
from rankwise.world.environments.table import read

NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def numbers(variables: dict[str, str]) -> list[int | None]:
    found = horovod_variables(read(variables))
    assert set(found) <= {f"HOROVOD_{name}" for name in NAMES}
    return [int(found[f"HOROVOD_{name}"]) if f"HOROVOD_{name}" in found else None for name in NAMES]


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank", "cross"),
    [(0, 0, 0, (0, 3)), (1, 0, 1, (1, 3)), (2, 1, 1, (0, 2)), (3, 2, 1, (0, 1)), (4, 0, 2, (2, 3)), (5, 1, 2, (1, 2))],
)
def test_the_cross_rank_counts_machines_that_have_the_local_rank(
    rank: int, local_rank: int, node_rank: int, cross: tuple[int, int]
) -> None:
    counts = (1, 3, 2)
    common: dict[str, Any] = {"run_id": "job", "attempt": "0", "error_file": "x", "store": ("127.0.0.1", 4321)}
    variables = variables_for(
        rank=rank,
        world_size=6,
        local_rank=local_rank,
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        num_nodes=3,
        ranks_per_node=counts,
        **common,
    )
    assert numbers(variables) == [rank, 6, local_rank, counts[node_rank], *cross]


def test_settings_that_a_launcher_leaves_open_remain_open() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    torchrun |= {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert numbers(torchrun) == [3, 4, 1, None, None, None]
    even = {**torchrun, "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    assert numbers(even) == [3, 4, 1, 2, 1, 2]
    assert numbers({**even, "LOCAL_WORLD_SIZE": "3"}) == [3, 4, 1, 3, None, None]
