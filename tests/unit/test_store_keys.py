# SPDX-License-Identifier: Apache-2.0
"""Waits for keys that will not be set, on one event loop."""

from __future__ import annotations

import asyncio

import pytest

from rankwise.store.keys import GivenUp, Keys

LIMIT_SECONDS = 20.0


def test_a_wait_ends_when_its_key_is_given_up_and_so_do_later_ones() -> None:
    async def wait_and_give_up() -> None:
        keys = Keys()
        waiting = [asyncio.ensure_future(keys.wait([key], LIMIT_SECONDS)) for key in ("lost/a", "lost/b", "kept/a")]
        await asyncio.sleep(0)
        keys.give_up("lost/", 3, "rank 3 has ended")
        for one in waiting[:2]:
            with pytest.raises(GivenUp, match="rank 3 has ended"):
                await asyncio.wait_for(one, LIMIT_SECONDS / 4)
        assert not waiting[2].done()
        keys.set("kept/a", b"")
        await waiting[2]
        with pytest.raises(GivenUp):
            await keys.wait(["lost/c"], LIMIT_SECONDS)

    asyncio.run(wait_and_give_up())
