# SPDX-License-Identifier: Apache-2.0
"""Whether every rank spreads its model by the same options: each would go on alone with its own, and mix numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.collectives import gather_json
from rankwise.errors import ConfigurationError, fold_values
from rankwise.session import current

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_same_options(strategy: str, options: Mapping[str, object]) -> None:
    """Raise the same error on every rank unless all were given the same options.

    Called by: every rank.

    Args:
        strategy: who asks, as ``rankwise.`` has it: ``"shard"``.
        options: by name; compared by their ``repr``.

    Raises:
        ConfigurationError: names the first option that differs, and what each rank has.
    """
    of_rank = gather_json({name: repr(value) for name, value in options.items()}, what=f"options of {strategy}()")
    for name in options:
        values = {rank: told[name] for rank, told in enumerate(of_rank)}
        if len(set(values.values())) > 1:
            raise ConfigurationError(
                f"{strategy}() was given different {name}= on different ranks.",
                where=f"reported on {current().world}",
                evidence=fold_values(values),
                do="pass the same on every rank",
            )
