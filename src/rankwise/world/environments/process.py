# SPDX-License-Identifier: Apache-2.0
"""This process's own variables and words, handed to the pure part of this package.

The only place of rankwise that reads environment variables, but for the launcher's dictionaries of
its children.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankwise.errors import ConfigurationError
from rankwise.world.environments import arguments, env, explanation, rankwise, slurm, slurm_rank, table, torchrun
from rankwise.world.environments.horovod_variables import horovod_variables
from rankwise.world.environments.reading import Missing, ProcessContext, told
from rankwise.world.processes import stat_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from rankwise.world.environments.explanation import Explanation
    from rankwise.world.environments.reading import Reading

HYDRA_PROXY = "hydra_pmi_proxy"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
RPC_INTERFACE = "TP_SOCKET_IFNAME"
STOP_SIGNAL = "SIGUSR2"
"""What rankwise's own batch scripts have Slurm send ahead of the time limit."""


def read_process(environment: str | None = None) -> Reading:
    """Return who started this process.

    Args:
        environment: name of the row of the table to believe, whatever the others say; ``None``
            decides.

    Raises:
        EnvironmentConflict: two environments say different things about this process.
        ConfigurationError: a set of variables is incomplete, a value is bad, or rank 0 cannot be
            reached.
    """
    launcher = _ancestor(HYDRA_PROXY) if "PMI_RANK" in os.environ else None
    return _with_signals(table.read(dict(os.environ), sys.argv, environment, launcher_process=launcher))


def explain_process() -> Explanation:
    """Return who started this process, and what was looked at to tell. Raises nothing for what it finds."""
    launcher = _ancestor(HYDRA_PROXY) if "PMI_RANK" in os.environ else None
    return explanation.explain(dict(os.environ), sys.argv, launcher)


def explicit(init_method: str, rank: int | None, world_size: int | None) -> Reading:
    """Return what the user said outright; only ``env://`` looks at the variables of launchers.

    Args:
        init_method: ``tcp://host:port``, ``file:///path`` or ``env://``.
        rank: number of this process; with ``env://`` the variable ``RANK`` by default.
        world_size: number of processes; with ``env://`` the variable ``WORLD_SIZE`` by default.

    Raises:
        ConfigurationError: an argument is bad or missing.
    """
    return _with_signals(arguments.explicit(init_method, rank, world_size, variables=dict(os.environ), argv=sys.argv))


def _with_signals(reading: Reading) -> Reading:
    """Return ``reading`` with the signals that this process may be asked to stop by."""
    below_agent = reading.source == rankwise.ROW.name
    # Torchrun's agent ends its ranks by SIGTERM.
    if reading.source != torchrun.ROW.name:
        # Slurm sends its signals to every process of a step, also below an agent; Kubernetes to a pod's first.
        if os.environ.get(slurm.ROW.sign) or (in_kubernetes() and not below_agent):
            return replace(reading, stop_signals=(STOP_SIGNAL, "SIGTERM"))
        if below_agent:
            return replace(reading, stop_signals=(STOP_SIGNAL,))
    return reading


def read_launcher() -> Reading | None:
    """Return which of several launchers this process is, where a scheduler started one on each machine.

    Only Slurm's steps and plain ``RANK`` and ``WORLD_SIZE`` count: a launcher inside a rank of another launcher
    starts a job of its own.

    Raises:
        ConfigurationError: a set of variables is incomplete or bad, or the first machine's address is missing.
    """
    around = ProcessContext(variables=dict(os.environ))
    if rankwise.ROW.read(around) is not None or torchrun.ROW.read(around) is not None:
        return None
    for row in (env.ROW, slurm.ROW):
        said = row.read(around)
        if isinstance(said, Missing):
            # People export WORLD_SIZE alone for other libraries.
            if row is not env.ROW:
                raise table.incomplete(row, said, around.variables)
        elif said is not None and said.world_size > 1:
            return table.reachable(replace(said, reason=f"{row.title}: {told(around.variables, row.names)}"))
    return None


def nodes_of_job() -> int:
    """Return how many nodes a Slurm job has that this process is in, outside any step of it; 1 elsewhere."""
    variables = os.environ
    if not variables.get(slurm.ROW.sign) or (variables.get("SLURM_STEP_ID") and not slurm.is_leftover(variables)):
        return 1
    number = variables.get("SLURM_JOB_NUM_NODES", "1")
    return int(number) if number.isdecimal() else 1


def slurm_variables_for(*, rank: int, local_rank: int, node_rank: int, ranks_per_node: Sequence[int]) -> dict[str, str]:
    """Return Slurm's variables for a rank of the launcher that this process is; none where no Slurm job is around."""
    return slurm_rank.variables_for_rank(
        os.environ, rank=rank, local_rank=local_rank, node_rank=node_rank, ranks_per_node=ranks_per_node
    )


def set_horovod_variables() -> None:
    """Give this process the variables of horovodrun, from those of whatever launched it; none where nobody did.

    Raises:
        EnvironmentConflict: as :func:`read_process`.
        ConfigurationError: as :func:`read_process`.
    """
    reading = read_process()
    if reading.source != table.NOBODY:
        os.environ.update(horovod_variables(reading))


def in_kubernetes() -> bool:
    """Return whether this process runs in a pod of Kubernetes, which says so in every pod."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def set_interface(name: str, *, is_loopback: bool) -> tuple[str, ...]:
    """Tell torch's transports which network interface to use, where the user has not; return what was set.

    The variables stay for as long as groups may be opened: the user's own ``new_group()`` and device meshes read
    them too.

    Args:
        name: the interface.
        is_loopback: whether all ranks are on one machine, within which NCCL finds its own way.

    Source: torch 2.13's ``init_process_group`` takes no device for Gloo; ``ProcessGroupGloo`` looks up
        GLOO_SOCKET_IFNAME for every group it opens. NCCL matches a name exactly after ``=``, else as a beginning.
    """
    wanted = {GLOO_INTERFACE: name, RPC_INTERFACE: name}
    if not is_loopback:
        wanted[NCCL_INTERFACE] = f"={name}"
    unset = {variable: value for variable, value in wanted.items() if not os.environ.get(variable)}
    os.environ.update(unset)
    return tuple(unset)


def gloo_interfaces() -> list[str]:
    """Return the interfaces that the user has Gloo use, by name; none where the user has not said."""
    return [name for name in os.environ.get(GLOO_INTERFACE, "").split(",") if name]


def unset(names: Iterable[str]) -> None:
    """Remove variables."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def replaced(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables inside the block, for code of the user's that reads them, and put back what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        unset(name for name, value in before.items() if value is None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def checks_collectives() -> bool:
    """Return whether ranks are to compare every collective before it begins: ``RANKWISE_CHECK=1``."""
    return os.environ.get("RANKWISE_CHECK", "0").strip() not in {"", "0"}


def asked_device() -> str | None:
    """Return the device that ranks are to have unless their script names one: ``RANKWISE_DEVICE=cpu``."""
    return os.environ.get("RANKWISE_DEVICE") or None


def asked_torch_store() -> Literal["auto", "on", "off"]:
    """Return whether a launcher serves torch's store too, unless its options say: ``RANKWISE_TORCH_STORE=off``.

    Raises:
        ConfigurationError: the variable says something else.
    """
    asked = os.environ.get("RANKWISE_TORCH_STORE") or "auto"
    if asked == "auto" or asked == "on" or asked == "off":  # noqa: PLR1714 - the type follows from these
        return asked
    raise ConfigurationError(f"RANKWISE_TORCH_STORE={asked!r} is not known.", do="set it to on, off or auto")


def job_of_process() -> tuple[str, int]:
    """Return the name of rankwise's own job, which no other job has, and the number of its restart.

    Other launchers give several jobs one name: empty below them, and without a launcher.
    """
    attempt = os.environ.get("RANKWISE_ATTEMPT", "")
    return os.environ.get("RANKWISE_RUN_ID", ""), int(attempt) if attempt.isdecimal() else 0


def stack_file() -> str:
    """Return what this rank writes its stack into when rankwise's launcher asks for it; empty without one."""
    return os.environ.get("RANKWISE_STACK_FILE", "")


def note_echo() -> None:
    """Note for rankwise's launcher that this rank fails only because another one did; nothing without a launcher.

    A rank that runs below options of Python, or a shell, has only this and its exit code to report.
    """
    error_file = os.environ.get("RANKWISE_ERROR_FILE")
    if error_file:
        # A full disk keeps no rank from exiting.
        with suppress(OSError):
            Path(rankwise.echo_note(error_file)).touch()


def _ancestor(name: str) -> str | None:
    """Return number and start time of the nearest process above this one called ``name``."""
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
    """Return Horovod's variables, which scripts that were written for it may be started with."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
