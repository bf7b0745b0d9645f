# SPDX-License-Identifier: Apache-2.0
"""What the user passes explicitly: ``init_method``, ``rank`` and ``world_size``, as in torch.

Pure: arguments in, a reading out. Imported by this package's ``process``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from rankwise.errors import ConfigurationError
from rankwise.world.environments import rankwise, torchrun
from rankwise.world.environments.reading import Missing, ProcessContext, Reading, checked_port, job_secret, told
from rankwise.world.environments.table import incomplete, reachable
from rankwise.world.network import LIST_OF_MACHINES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES = "tcp://gpu-01:29500, file:///shared/job-42, or env://"
SOURCE = "explicit"


def explicit(
    init_method: str,
    rank: int | None,
    world_size: int | None,
    *,
    variables: Mapping[str, str],
    argv: Sequence[str] = (),
) -> Reading:
    """Return the reading of ``init_method``, ``rank`` and ``world_size``. Arguments take precedence over variables.

    ``init_method`` is ``tcp://host:port``, ``file:///path`` or ``env://``, which reads ``RANK``, ``WORLD_SIZE`` and
    ``argv`` too. The job's secret is among ``variables`` for ``tcp://`` as well.

    Raises:
        ConfigurationError: an argument is invalid or missing.
    """
    try:
        parts = urlsplit(init_method)
    except ValueError as error:
        if LIST_OF_MACHINES.search(init_method):
            raise _bad(
                init_method,
                "it has a list of machines in place of one; for the first one of a Slurm job: "
                "scontrol show hostnames | head -n 1",
            ) from None
        raise _bad(init_method, str(error)) from None
    if parts.scheme == "env" and init_method == "env://":
        return _from_variables(rank, world_size, ProcessContext(variables=variables, argv=argv))
    if parts.scheme not in {"tcp", "file"}:
        raise _bad(init_method, "its scheme is unknown")
    checked_rank, checked_size = _numbers(init_method, rank, world_size)
    numbers = f"rank={checked_rank} world_size={checked_size}"
    reason = f"explicit: init_method={init_method!r} {numbers}, because join() was given them"
    reading = Reading(rank=checked_rank, world_size=checked_size, source=SOURCE, reason=reason)
    if parts.scheme == "tcp":
        return replace(reading, address=_tcp_address(init_method), secret=job_secret(variables))
    if parts.netloc or not parts.path.strip("/"):
        raise _bad(init_method, "file:// needs an absolute path, which starts with a third slash")
    return replace(reading, file=unquote(parts.path))


def _bad(init_method: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"init_method={init_method!r} cannot be used: {why}.", do=f"for example {EXAMPLES}")


def _tcp_address(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _bad(init_method, "its port is not a number from 1 to 65535") from None
    if not host or port is None or parts.path.strip("/") or parts.query:
        raise _bad(init_method, "tcp:// needs a host and a port, and nothing more")
    return host, checked_port(port, "init_method")


def _numbers(init_method: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        missing = [name for name, value in (("rank", rank), ("world_size", world_size)) if value is None]
        raise ConfigurationError(
            f"init_method={init_method!r} also needs {' and '.join(missing)}.",
            do=f"join(init_method={init_method!r}, rank=..., world_size=...)",
        )
    for name, value in (("rank", rank), ("world_size", world_size)):
        # True is an int in Python, but a mistake here.
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigurationError(f"{name} must be an int, got {value!r}.", do=f"pass {name} as an int")
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank={rank} does not fit world_size={world_size}: ranks go from 0 to world_size - 1.",
            do="give each process its own rank, and all of them the same world_size",
        )
    return rank, world_size


def _from_variables(rank: int | None, world_size: int | None, around: ProcessContext) -> Reading:
    """Read the variables of ``env://``, which launchers set as well; arguments take precedence."""
    arguments = {"RANK": rank, "WORLD_SIZE": world_size}
    given = {name: str(value) for name, value in arguments.items() if value is not None}
    changed = any(around.variables.get(name, value) != value for name, value in given.items())
    # Local numbers belong to the rank in the variables: another rank has other ones.
    dropped = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"} if changed else set[str]()
    kept = {name: value for name, value in around.variables.items() if name not in dropped}
    merged = ProcessContext(variables={**kept, **given}, argv=() if changed else around.argv)
    row = torchrun.ENV_ROW
    said: Reading | Missing | None = None
    for row in (torchrun.ENV_ROW,) if changed else (rankwise.ROW, torchrun.ROW, torchrun.ENV_ROW):
        said = row.read(merged)
        if said is not None:
            break
    if said is None:
        said = Missing(names=("RANK", "WORLD_SIZE"))
    if isinstance(said, Missing):
        raise incomplete(row, said, merged.variables)
    _numbers("env://", said.rank, said.world_size)
    from_arguments = f", {' and '.join(given)} from the arguments of join()" if given else ""
    reason = f"{row.title}: {told(merged.variables, row.names)}{from_arguments}, because join() was given env://"
    return reachable(replace(said, reason=reason))
