# SPDX-License-Identifier: Apache-2.0
"""What ranks that run the same script compare: arguments of calls, parameters, and whether a call can be split."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.collectives.objects import gather_json
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.health.call_site import user_call_site, words
from rankwise.tensors.checksum import checksums_of_each, combined
from rankwise.tools.auto.proof import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange

LONGEST_REASON = 160
SAME_ON_ALL = (
    "seed what the script draws (torch.manual_seed, random.seed, numpy.random.seed, numpy.random.default_rng(0)), sort "
    "what it lists, and decide nothing by time"
)


def agreed(exchange: Exchange, name: str, reason: str | None, facts: tuple[int, int]) -> list[str]:
    """Return every rank's reason not to split a call, empty if there is none. Called by: every rank.

    Args:
        exchange: the ranks.
        name: of the module that is called.
        reason: this rank's.
        facts: checksums of this rank's arguments and parameters.

    Raises:
        ReplicasDiffer: the ranks' arguments or parameters differ.
    """
    note = f"{facts[0]:x} {facts[1]:x} {(reason or '')[:LONGEST_REASON]}".encode()
    notes = exchange.gather_notes(note, what=f"a call of {name}")
    texts = [one.rstrip(b"\0").decode(errors="ignore").split(" ", 2) for one in notes]
    for place, fact in enumerate(("arguments", "parameters")):
        values = [text[place] for text in texts]
        if len(set(values)) > 1:
            raise ReplicasDiffer(
                f"{name} has different {fact} on different ranks, which all run the whole script.",
                where=words(user_call_site()),
                evidence=fold_values({rank: f"checksum {value}" for rank, value in enumerate(values)}),
                do=SAME_ON_ALL,
            )
    return [text[2] for text in texts]


def check_parameters(held: Mapping[str, int]) -> None:
    """Raise if the parameters of modules differ between ranks. Called by: every rank, at the end of the script.

    Args:
        held: by number and name of a module, the checksum of its parameters. Not all ranks need hold all modules: the
            memory of one that the script has dropped is not free on every rank at the same time.
    """
    on_ranks: list[dict[str, int]] = gather_json(dict(held), what="parameters at the end of the script")
    for name in held:
        values = {rank: f"checksum {of_rank[name]:x}" for rank, of_rank in enumerate(on_ranks) if name in of_rank}
        if len(set(values.values())) > 1:
            raise ReplicasDiffer(
                f"The parameters of {name.partition(' ')[2]} differ between ranks at the end of the script.",
                evidence=fold_values(values),
                do=SAME_ON_ALL,
            )


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return one number for the bits of dense tensors."""
    return combined(checksums_of_each([one.detach().contiguous() for one in tensors if one.layout == torch.strided]))


def digest(leaves: Sequence[Any]) -> int:
    """Return one number for the arguments of a call."""
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    facts = [
        (tuple(one.shape), str(one.dtype)) if isinstance(one, torch.Tensor) else one if isinstance(one, PLAIN) else ""
        for one in leaves
    ]
    return combined([checksum(tensors), zlib.crc32(repr(facts).encode())])
