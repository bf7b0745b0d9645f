# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries: the same kind comes back from every collective.

JAX is the real one; the real TensorFlow is in tests/frameworks, where it is installed. What no library here does (no
way back, memory torch cannot read) is stood in for.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import rankwise as rw
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange


def _jax_everywhere(world: World) -> None:
    import jax
    import jax.numpy as jnp

    own = jnp.arange(4.0) + world.rank
    tree = {"w": own, "layers": (own * 2, [np.ones(2, np.float32), torch.ones(1)])}
    reduced = rw.all_reduce(tree)
    assert isinstance(reduced["w"], jax.Array)
    assert isinstance(reduced["layers"][0], jax.Array)
    assert isinstance(reduced["layers"][1][0], np.ndarray)
    total = world.world_size * (world.world_size - 1) / 2
    assert reduced["w"].tolist() == [world.world_size * i + total for i in range(4)]
    assert reduced["w"].dtype == own.dtype
    assert own.tolist() == [i + float(world.rank) for i in range(4)]
    for given, exact in ((own, jnp.float32), (own.astype(jnp.bfloat16), jnp.bfloat16), (own > 1, jnp.bool_)):
        gathered = rw.all_gather(given)
        assert [part.dtype for part in gathered] == [exact] * world.world_size
        assert gathered[world.rank].tolist() == given.tolist()
    last = world.world_size - 1
    assert rw.broadcast(own, source=last).tolist() == [i + float(last) for i in range(4)]
    assert isinstance(rw.broadcast(jnp.float32(2.5)), jax.Array)
    assert rw.reduce_scatter(own).tolist() == reduced["w"].tolist()[world.rank * 2 : world.rank * 2 + 2]
    sent = rw.all_to_all([own[: to + 1] for to in range(world.world_size)])
    assert [part.tolist() for part in sent] == [
        [i + float(source) for i in range(world.rank + 1)] for source in range(world.world_size)
    ]
    assert [part.shape for part in rw.all_gather_uneven(own[: world.rank])] == [(r,) for r in range(world.world_size)]
    strided = rw.all_reduce(jnp.ones((2, 3)).T)
    assert strided.shape == (3, 2)


def test_every_collective_takes_and_returns_jax_arrays(run_ranks: RunRanks) -> None:
    for result in run_ranks(_jax_everywhere, 2):
        result.get()


def _inside_of_jit(_: World) -> None:
    import jax
    import jax.numpy as jnp

    for transformed in (jax.jit(rw.all_reduce), jax.grad(lambda x: rw.all_reduce(x).sum()), jax.vmap(rw.all_gather)):
        with pytest.raises(ConfigurationError, match="jit, grad and vmap, not inside"):
            transformed(jnp.ones(3))
    assert rw.all_reduce(1) == 2


def test_a_jax_tracer_is_refused(run_ranks: RunRanks) -> None:
    for result in run_ranks(_inside_of_jit, 2):
        result.get()


@pytest.mark.parametrize(
    "value",
    [
        np.arange(4, dtype=">f8"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3)[::-1],
        np.array(1.5),
        np.complex64(1 + 2j),
        1 + 2j,
        True,
    ],
    ids=repr,
)
def test_arrays_and_numbers_come_back_as_they_were(value: Any) -> None:
    with rw.join():
        came = rw.all_gather(value)[0]
    assert type(came) is type(value)
    np.testing.assert_array_equal(came, value)
    assert np.asarray(came).dtype == np.asarray(value).dtype


class _NoWayBack:
    """Memory that torch can read, of a library without from_dlpack()."""

    def __dlpack__(self, **options: Any) -> object:
        return torch.ones(2).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class _OfAPackage(_NoWayBack):
    """Memory of a library that has from_dlpack() of its own, and no namespace."""

    __module__ = "arrays.inner"


def _from_memory(memory: Any) -> _OfAPackage:
    assert torch.from_dlpack(memory).tolist() == [1.0, 1.0]
    return _OfAPackage()


def test_other_libraries_read_their_arrays_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arrays", SimpleNamespace(from_dlpack=_from_memory))
    with rw.join():
        assert type(rw.all_reduce(_OfAPackage())) is _OfAPackage


class _Unreadable(_NoWayBack):
    """Memory of a device that torch does not know."""

    def __array_namespace__(self) -> object:
        return torch

    def __dlpack__(self, **_: Any) -> object:
        raise BufferError("it lies on a device of another kind")


def test_arrays_that_cannot_be_read_or_returned_are_refused() -> None:
    with rw.join():
        for value, words in (
            (_NoWayBack(), "pass it as a NumPy array"),
            (_Unreadable(), "it lies on a device of another kind"),
            (np.array(["text"]), "torch has no such dtype"),
            (np.ma.array([1.0, 2.0], mask=[False, True]), r"array\.filled"),
            (torch.ones(2, device="meta"), "meta device"),
            (torch.eye(2).to_sparse(), r"to_dense\(\)"),
            ({"count": 2**63}, "64 bits"),
            ("text", "got str"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                rw.all_gather(value)
