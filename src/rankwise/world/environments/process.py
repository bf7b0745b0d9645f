# SPDX-License-Identifier: Apache-2.0
"""This process's own variables and arguments, and those of ``join()``, passed to the pure part of this package.

The only place in rankwise that reads environment variables, except for the launcher's dictionaries for
its children.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from rankwise.errors import ConfigurationError
from rankwise.world.device.kinds import SHARES_GPUS
from rankwise.world.environments import rankwise, siblings, slurm, table, torchrun
from rankwise.world.environments.reading import (
    Missing,
    ProcessContext,
    Reading,
    checked_port,
    job_secret,
    told,
)
from rankwise.world.environments.table import incomplete, reachable
from rankwise.world.network import LIST_OF_MACHINES
from rankwise.world.processes import stat_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from rankwise.world.environments.table import Explanation

PROXIES = {"PMI_RANK": "hydra_pmi_proxy", "MV2_COMM_WORLD_RANK": "mpispawn"}
"""The process on each machine that starts the ranks, by a variable of each rank."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
RPC_INTERFACE = "TP_SOCKET_IFNAME"
STOP_SIGNAL = "SIGUSR2"
"""The signal that rankwise's own batch scripts have Slurm send before the time limit."""


REPORT_OFF = "off"
"""In place of the folder of a report: measure nothing."""
_OF_BATCH_SCRIPTS = {"SLURM_JOB_ID", "SLURM_RESTART_COUNT"}
_OF_RANKS = frozenset(
    {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS"}
    | {name for row in table.TABLE if not row.yields for name in row.names} - _OF_BATCH_SCRIPTS
)
"""Variables by which a process recognizes that it is one of several, under any launcher."""


def read_process(environment: str | None = None) -> Reading:
    """Return what started this process. ``environment`` names the row of the table to use, whatever the others give.

    Raises:
        EnvironmentConflict: two environments contradict each other about this process.
        ConfigurationError: a set of variables is incomplete, a value is invalid, or rank 0 cannot be reached.
    """
    return _with_signals(table.read(dict(os.environ), sys.argv, environment, launcher_process=_proxy()))


def explain_process() -> Explanation:
    """Return what started this process, and what was checked. Never raises for what it finds."""
    return table.explain(dict(os.environ), sys.argv, _proxy())


def explicit(init_method: str, rank: int | None, world_size: int | None) -> Reading:
    """Return the reading of the arguments of ``join()``; only ``env://`` reads the variables of launchers.

    Raises:
        ConfigurationError: an argument is invalid or missing.
    """
    return _with_signals(reading_of_arguments(init_method, rank, world_size, variables=dict(os.environ), argv=sys.argv))


def _with_signals(reading: Reading) -> Reading:
    """Return ``reading`` with the signals that may ask this process to stop."""
    below_agent = reading.source == rankwise.ROW.name
    # Torchrun's agent ends its ranks with SIGTERM.
    if reading.source != torchrun.ROW.name:
        # Slurm sends its signals to every process of a step, also below an agent; Kubernetes to a pod's first process,
        # and its launcher passes SIGTERM on to the ranks.
        if os.environ.get(slurm.ROW.sign) or in_kubernetes():
            return replace(reading, stop_signals=(STOP_SIGNAL, "SIGTERM"))
        if below_agent:
            return replace(reading, stop_signals=(STOP_SIGNAL,))
    return reading


def read_launcher() -> Reading | None:
    """Return which of several launchers this process is, if a scheduler started one on each machine.

    Raises:
        EnvironmentConflict: as :func:`read_process`.
        ConfigurationError: as :func:`read_process`.
    """
    return table.read_launcher(dict(os.environ), _proxy())


def wants_no_color() -> bool:
    """Return whether the user asked for text without colors. Source: no-color.org."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def shows_all_frames() -> bool:
    """Return whether the user asked for tracebacks with the frames of torch and rankwise."""
    return os.environ.get("RANKWISE_TRACEBACK") == "full"


def nodes_of_job() -> int:
    """Return the number of nodes of the Slurm job that this process runs in, outside any of its steps; 1 elsewhere."""
    variables = os.environ
    if not variables.get(slurm.ROW.sign) or (variables.get("SLURM_STEP_ID") and not slurm.is_leftover(variables)):
        return 1
    number = variables.get("SLURM_JOB_NUM_NODES", "1")
    return int(number) if number.isdecimal() else 1


def slurm_variables_for(*, rank: int, local_rank: int, node_rank: int, ranks_per_node: Sequence[int]) -> dict[str, str]:
    """Return Slurm's variables for a rank of this launcher; none outside a Slurm job."""
    return rankwise.slurm_variables(
        os.environ, rank=rank, local_rank=local_rank, node_rank=node_rank, ranks_per_node=ranks_per_node
    )


def set_horovod_variables(timeline: str | None) -> None:
    """Set horovodrun's variables in this process, from those of its launcher; none without a launcher.

    Args:
        timeline: the file for a timeline of all ranks, if one was asked for.

    Raises:
        EnvironmentConflict: as :func:`read_process`.
        ConfigurationError: as :func:`read_process`.
    """
    reading = read_process()
    if reading.source != table.NOBODY:
        os.environ.update(rankwise.horovod_variables(reading))
    if timeline is not None:
        os.environ["HOROVOD_TIMELINE"] = timeline


def in_kubernetes() -> bool:
    """Return whether this process runs in a Kubernetes pod, as a variable in every pod shows."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def set_interface(name: str, *, is_loopback: bool) -> tuple[str, ...]:
    """Set which network interface torch's transports use, unless the user has; return the variables that were set.

    The variables remain set as long as groups may be opened: the user's own ``new_group()`` and device meshes read them
    too. With ``is_loopback`` all ranks are on one machine, where NCCL chooses its own transport.

    Source: torch 2.13's ``init_process_group`` takes no device for Gloo; ``ProcessGroupGloo`` looks up
    GLOO_SOCKET_IFNAME for every group it opens. NCCL matches a name exactly after ``=``, else as a prefix.
    """
    wanted = {GLOO_INTERFACE: name, RPC_INTERFACE: name}
    if not is_loopback:
        wanted[NCCL_INTERFACE] = f"={name}"
    unset = {variable: value for variable, value in wanted.items() if not os.environ.get(variable)}
    os.environ.update(unset)
    return tuple(unset)


def gloo_interfaces() -> list[str]:
    """Return the interfaces that the user set for Gloo, by name; none if unset."""
    return [name for name in os.environ.get(GLOO_INTERFACE, "").split(",") if name]


def unset(names: Iterable[str]) -> None:
    """Remove variables."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def replaced(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables inside the block, for user code that reads them, and restore the previous values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        unset(name for name, value in before.items() if value is None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def of_one_process() -> Generator[None]:
    """Remove inside the block what shows that this process is one of several ranks, to a script and what it starts."""
    variables = dict(os.environ)
    names = _OF_RANKS | table.names_of_several(variables) | siblings.numbers(variables).keys()
    hidden = {
        name: value
        for name, value in variables.items()
        if name in names or name.startswith(("TORCHELASTIC_", rankwise.AGENT_PREFIX))
    }
    if rankwise.ROW.sign in hidden:
        hidden |= {name: os.environ[name] for name in rankwise.OWN_NAMES if name in os.environ}
    unset(hidden)
    try:
        yield
    finally:
        os.environ.update(hidden)


def splits_always() -> bool:
    """Return whether --auto splits calls also where it saves no time: ``RANKWISE_AUTO_SPLIT=always``."""
    return os.environ.get("RANKWISE_AUTO_SPLIT", "") == "always"


def checks_collectives() -> bool:
    """Return whether ranks compare every collective before it begins: ``RANKWISE_CHECK=1``."""
    return os.environ.get("RANKWISE_CHECK", "0").strip() not in {"", "0"}


def asked_device() -> str | None:
    """Return the device that ranks use unless their script names one: ``RANKWISE_DEVICE=cpu``."""
    return os.environ.get("RANKWISE_DEVICE") or None


def device_mask(variable: str) -> list[str] | None:
    """Return the entries of a variable that limits which devices this process sees; ``None`` if it is not set."""
    text = os.environ.get(variable) if variable else None
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


def may_share_gpus() -> bool:
    """Return whether NCCL was told to accept several ranks per GPU."""
    return os.environ.get(SHARES_GPUS, "0").strip() not in {"", "0"}


def asked_torch_store() -> Literal["auto", "on", "off"]:
    """Return whether a launcher also serves torch's store, unless its options say: ``RANKWISE_TORCH_STORE=off``.

    Raises:
        ConfigurationError: the variable has another value.
    """
    asked = os.environ.get("RANKWISE_TORCH_STORE") or "auto"
    if asked == "auto" or asked == "on" or asked == "off":  # noqa: PLR1714 - the type follows from these
        return asked
    raise ConfigurationError(
        f"RANKWISE_TORCH_STORE must be on, off or auto, got {asked!r}.", do="correct RANKWISE_TORCH_STORE, or unset it"
    )


def job_of_process() -> tuple[str, int]:
    """Return the unique name of rankwise's own job, and the number of its restart.

    Other launchers give several jobs the same name: empty below them, and without a launcher.
    """
    attempt = os.environ.get("RANKWISE_ATTEMPT", "")
    return os.environ.get("RANKWISE_RUN_ID", ""), int(attempt) if attempt.isdecimal() else 0


def asked_report() -> str:
    """Return the folder that ranks record their steps in, or ``"off"``: ``RANKWISE_REPORT``; empty by default."""
    return os.environ.get("RANKWISE_REPORT", "")


def launcher() -> str:
    """Return what rankwise's launcher calls itself in the folder of a report; empty without one."""
    return os.environ.get("RANKWISE_LAUNCHER", "")


def stack_file() -> str:
    """Return the file this rank writes its stack into if rankwise's launcher asks for it; empty without one."""
    return os.environ.get("RANKWISE_STACK_FILE", "")


def note_echo() -> None:
    """Record for rankwise's launcher that this rank fails only because another one did; does nothing without one.

    A rank that runs with Python options, or below a shell, can report only this and its exit code.
    """
    error_file = os.environ.get("RANKWISE_ERROR_FILE")
    if error_file:
        # A full disk must not keep a rank from exiting.
        with suppress(OSError):
            Path(rankwise.echo_note(error_file)).touch()


def _proxy() -> str | None:
    """Return id and start time of the nearest ancestor process that starts ranks, if this process may be one."""
    name = next((proxy for variable, proxy in PROXIES.items() if variable in os.environ), None)
    if name is None:
        return None
    number = os.getppid()
    while number > 1:
        stat = stat_of(number)
        if stat is None:
            return None
        if stat.name == name:
            return f"{number}-{stat.start_time}"
        number = stat.parent
    return None


def given_horovod_variables() -> dict[str, str]:
    """Return Horovod's variables, which may be set for scripts written for it."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


def keep_nccl_from_exiting() -> None:
    """Have torch not end the process when a collective on a GPU fails, unless the user wants it: rankwise raises.

    Source: the note on torch.distributed.distributed_c10d._abort_process_group.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def make_cublas_deterministic() -> None:
    """Have cuBLAS compute the same bits in every run. Takes effect if this process has not used a GPU yet.

    Source: torch.use_deterministic_algorithms.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


# -- the arguments of join() -----------------------------------------------------------------------

_INIT_METHODS = "tcp://gpu-01:29500, file:///shared/job-42, or env://"
EXPLICIT = "explicit"
"""The source of a reading in which every rank was given the same address."""


def reading_of_arguments(
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
            raise _refused(
                init_method,
                "it has a list of machines in place of one; for the first one of a Slurm job: "
                "scontrol show hostnames | head -n 1",
            ) from None
        raise _refused(init_method, str(error)) from None
    if parts.scheme == "env" and init_method == "env://":
        return _from_variables(rank, world_size, ProcessContext(variables=variables, argv=argv))
    if parts.scheme not in {"tcp", "file"}:
        raise _refused(init_method, "its scheme is unknown")
    checked_rank, checked_size = _checked_numbers(init_method, rank, world_size)
    numbers = f"rank={checked_rank} world_size={checked_size}"
    reason = f"explicit: init_method={init_method!r} {numbers}, because join() was given them"
    reading = Reading(rank=checked_rank, world_size=checked_size, source=EXPLICIT, reason=reason)
    if parts.scheme == "tcp":
        return replace(reading, address=_tcp_address(init_method), secret=job_secret(variables))
    if parts.netloc or not parts.path.strip("/"):
        raise _refused(init_method, "file:// needs an absolute path, which starts with a third slash")
    return replace(reading, file=unquote(parts.path))


def _refused(init_method: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"init_method={init_method!r} cannot be used: {why}.", do=f"for example {_INIT_METHODS}")


def _tcp_address(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refused(init_method, "its port is not a number from 1 to 65535") from None
    if not host or port is None or parts.path.strip("/") or parts.query:
        raise _refused(init_method, "tcp:// needs a host and a port, and nothing more")
    return host, checked_port(port, "init_method")


def _checked_numbers(init_method: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
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
    _checked_numbers("env://", said.rank, said.world_size)
    from_arguments = f", {' and '.join(given)} from the arguments of join()" if given else ""
    reason = f"{row.title}: {told(merged.variables, row.names)}{from_arguments}, because join() was given env://"
    return reachable(replace(said, reason=reason))
