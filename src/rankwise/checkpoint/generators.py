# SPDX-License-Identifier: Apache-2.0
"""The states of the random number generators in a checkpoint: torch's, NumPy's and Python's global ones.

A resumed run draws what an uninterrupted one draws.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import CheckpointError
from rankwise.log import log
from rankwise.world.device.accelerator import random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from rankwise.checkpoint.manifest import Json
    from rankwise.comm.agreement import CheckpointRanks

_NUMPY_WORDS = 624


@runtime_checkable
class _LoopPosition(Protocol):
    """A loader or a sampler."""

    @property
    def is_in_loop(self) -> bool: ...

    def when_resumed(self, action: Callable[[], object]) -> None: ...


def digests_of(states: Mapping[str, Json]) -> dict[str, str]:
    """Return a short digest of each state, by which ranks find those that differ."""
    return {name: hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16] for name, state in states.items()}


def in_loop(objects: Mapping[str, object]) -> list[str]:
    """Return the names of the objects over which a loop is running."""
    return [name for name, item in objects.items() if isinstance(item, _LoopPosition) and item.is_in_loop]


def generators_restorer(
    ranks: CheckpointRanks, saved: Mapping[str, Any], objects: Mapping[str, object]
) -> Callable[[], None]:
    """Return a function that continues from saved states, once the objects are loaded.

    It does nothing unless the objects are those of a training: an optimizer, a loader or a sampler. If a loop over a
    loader was running, it sets the states again when that loop continues: the code before the loop, which runs for the
    second time then, may draw.

    Raises:
        CheckpointError: the states are not valid.
    """
    positions = {name: item for name, item in objects.items() if isinstance(item, _LoopPosition)}
    is_training = bool(positions) or any(isinstance(item, torch.optim.Optimizer) for item in objects.values())
    if not saved or not is_training:
        return lambda: None
    here = generator_states()
    of_ranks: dict[str, Any] = {name: held for name, held in saved["states"].items() if name in here}
    unfit = [name for name, held in of_ranks.items() if len(held) not in (1, ranks.world_size)]
    setters = [
        setter
        for name, held in of_ranks.items()
        if name not in unfit and (setter := _setter(name, held[ranks.rank % len(held)])) is not None
    ]

    def resume() -> None:
        for setter in setters:
            setter()

    def restore() -> None:
        if unfit:
            log(
                f"the random number generators of {', '.join(unfit)} were not restored: the checkpoint has one state "
                f"for each of its {len(of_ranks[unfit[0]])} ranks, and this job has {ranks.world_size}; this matters "
                "only if the script draws from them"
            )
        resume()
        for name in saved["in_loop"]:
            if name in positions:
                positions[name].when_resumed(resume)

    return restore


def _device() -> torch.device:
    session = current_or_none()
    return torch.device("cpu" if session is None else session.world.device)


def generator_states() -> dict[str, Json]:
    """Return the state of each generator of this process."""
    version, words, gauss = random.getstate()
    found: dict[str, Json] = {
        "torch": _encoded(torch.get_rng_state().numpy()),
        "Python": [version, _encoded(np.array(words, np.uint32)), gauss],
    }
    device = _device()
    if device.type != "cpu":
        found[f"torch on {device.type}"] = _encoded(random_state(device).numpy())
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002 - the generator that scripts draw from
    if numpys["bit_generator"] == "MT19937":
        inner = numpys["state"]
        found["NumPy"] = [_encoded(inner["key"]), int(inner["pos"]), int(numpys["has_gauss"]), float(numpys["gauss"])]
    return found


def _setter(name: str, state: Any) -> Callable[[], object] | None:
    """Return a function that gives a generator a state, after giving it to another one of its kind."""
    try:
        if state is None:  # a rank without this generator
            return None
        if name == "Python":
            version, words, gauss = state
            pythons = (version, tuple(_decoded(words, np.uint32).tolist()), gauss)
            random.Random().setstate(pythons)  # noqa: S311 - not for secrets
            return lambda: random.setstate(pythons)
        if name == "NumPy":
            key, position, has_gauss, gauss = state
            # NumPy does not check the position, and would read other memory.
            numpys = ("MT19937", _decoded(key, np.uint32), range(_NUMPY_WORDS + 1)[max(position, 0)], has_gauss, gauss)
            np.random.RandomState().set_state(numpys)
            return lambda: np.random.set_state(numpys)  # noqa: NPY002 - as in generator_states()
        device = torch.device("cpu") if name == "torch" else _device()
        torchs = torch.from_numpy(_decoded(state, np.uint8))
        torch.Generator(device).set_state(torchs)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint holds an invalid state of {name}'s random number generator: {error}.",
            evidence="no object has changed",
            do="load another checkpoint",
        ) from error
    return lambda: set_random_state(device, torchs)


def _encoded(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decoded(text: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
