# SPDX-License-Identifier: Apache-2.0
"""Lesson 6 of the course: what a rank knows about itself and its machine.

rankwise run -n 2 examples/lesson6_machines.py
"""

from __future__ import annotations

import rankwise as rw


def main() -> None:
    with rw.join() as world:
        machine = f"machine {world.node_rank + 1} of {world.num_nodes}"
        place = f"rank {world.rank} of {world.world_size}: {machine}, local rank {world.local_rank}, on {world.device}"
        for line in rw.all_gather_object(place):
            rw.print(line)
        rw.print(f"the sum of all ranks' numbers is {rw.all_reduce(world.rank)}")


if __name__ == "__main__":
    main()
