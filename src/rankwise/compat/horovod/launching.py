# SPDX-License-Identifier: Apache-2.0
"""``horovod.run``: runs a function on several ranks of this machine, by ``rankwise.launch``."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.compat.horovod.exceptions import NotOffered
from rankwise.errors import ConfigurationError
from rankwise.launch.function.launch import launch
from rankwise.launch.hosts import host_list
from rankwise.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launch.hosts.host_list import Slots

T = TypeVar("T")
N = TypeVar("N", int, int | None)

RESTARTS = 3
"""The number of restarts of an elastic job without ``reset_limit``."""


def run(  # noqa: PLR0917 - as people write and call it
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # noqa: FBT001 - Horovod's arguments, here and below
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,  # noqa: FBT001
    use_mpi: bool | None = None,  # noqa: FBT001
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Run ``func(*args, **kwargs)`` on several ranks of this machine, and return the value of each.

    Called by: one process that is not a rank, from any thread. The function calls ``hvd.init()`` itself.

    Args:
        func: the function that every rank calls; functions of a script or notebook are pickled by value.
        args: its arguments; every rank gets a copy.
        kwargs: its keyword arguments.
        num_proc: the number of ranks.
        min_num_proc: makes the job elastic: after a failure all ranks restart, from the newest commit.
        max_num_proc: for an elastic job: use all slots of ``hosts``, up to this number.
        slots: not needed: ``hosts`` and ``hostfile`` name the slots.
        reset_limit: the number of restarts after failures; by default 3 in an elastic job, otherwise none.
        cooldown_range: has no effect on one machine.
        hosts: ``"localhost:4"``; this machine only.
        hostfile: the same, as a file with a line ``localhost slots=4``.
        start_timeout: has no effect on one machine.
        ssh_port: has no effect on one machine.
        ssh_identity_file: has no effect on one machine.
        disable_cache: has no effect: nothing is cached.
        output_filename: a folder for the output of each rank.
        verbose: has no effect: rankwise logs what it decides.
        use_gloo: has no effect: the devices determine torch's backend.
        use_mpi: has no effect: nothing is sent by MPI.
        mpi_args: not offered.
        network_interface: has no effect on one machine.
        executable: the Python that runs this process; another one is not offered.
        np: the older name of ``num_proc``.
        min_np: the older name of ``min_num_proc``.
        max_np: the older name of ``max_num_proc``.

    Returns:
        The values that the function returned, one per rank, in rank order.

    Raises:
        ConfigurationError: an argument is bad, contradicts another or cannot be pickled, or this process is a rank.
        NotOffered: ``hosts`` or ``hostfile`` names another machine; ``mpi_args`` or ``executable`` was given.
        RankFailed: a rank was killed, or ended without returning.
        Exception: the exception of the first rank to fail, with that rank's traceback as a note.

    Source: rankwise.launch.
    """
    num_proc = _newer("num_proc", num_proc, "np", np, default=1)
    min_num_proc = _newer("min_num_proc", min_num_proc, "min_np", min_np, default=None)
    max_num_proc = _newer("max_num_proc", max_num_proc, "max_np", max_np, default=None)
    _check_start(use_gloo=use_gloo, use_mpi=use_mpi, mpi_args=mpi_args, executable=executable)
    offered = _offered(hosts, hostfile)
    num_ranks = _num_ranks(num_proc, min_num_proc, max_num_proc, offered)
    without_effect = {
        "slots": slots,
        "cooldown_range": cooldown_range,
        "start_timeout": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "disable_cache": disable_cache,
        "verbose": verbose,
        "use_gloo": use_gloo,
        "use_mpi": use_mpi,
        "network_interface": network_interface,
    }
    if given := [name for name, value in without_effect.items() if value]:
        log(f"hvd.run(): without effect here: {', '.join(given)}")
    return launch(
        functools.partial(func, *args, **(kwargs or {})),
        ranks=num_ranks,
        log_dir=output_filename,
        max_restarts=reset_limit if reset_limit is not None else RESTARTS if min_num_proc is not None else 0,
    )


def _check_start(*, use_gloo: bool | None, use_mpi: bool | None, mpi_args: str | None, executable: str | None) -> None:
    if use_gloo and use_mpi:
        raise ConfigurationError("use_gloo and use_mpi were both given.", do="omit both: they have no effect here")
    if mpi_args is not None:
        raise NotOffered(
            "hvd.run() does not take mpi_args: it does not use mpirun.",
            do="start a script with mpirun itself: mpirun ... python -m rankwise.compat.horovod train.py",
        )
    if executable is not None and executable != sys.executable:
        raise NotOffered(
            f"hvd.run() starts ranks with the Python that runs this process, not {executable}.",
            evidence=f"this process runs under {sys.executable}",
            do="run the script with the other Python, and omit executable",
        )


def _newer(name: str, value: N, old_name: str, old: int | None, *, default: N) -> N | int:
    """Return the value of an argument, or of its older name if it was passed by that name."""
    if old is None:
        return value
    # Begins as Horovod's, which people filter on.
    warnings.warn(f"{old_name} is deprecated, use {name} instead", DeprecationWarning, stacklevel=3)
    if value not in (default, old):
        raise ConfigurationError(f"{name}={value} and {old_name}={old} contradict each other.", do=f"pass {name} only")
    return old


def _offered(hosts: str | None, hostfile: str | None) -> Slots:
    """Return the hosts, which are all this machine, and their slots; none if none were named."""
    if hosts is not None and hostfile is not None:
        raise ConfigurationError(
            "hosts and hostfile were both given.", evidence=f"hosts={hosts!r}, hostfile={hostfile!r}", do="pass one"
        )
    if hosts is None and hostfile is None:
        return []
    offered = host_list.read_slots(hostfile) if hostfile is not None else host_list.parse_slots(hosts or "", "hosts=")
    if not host_list.are_here(offered):
        raise NotOffered(
            "hvd.run() starts ranks on this machine only: values received over the network are never unpickled.",
            evidence=", ".join(f"{host}: {number}" for host, number in offered),
            do="for several machines put the function into a script and type rankwise horovodrun -np 4 -H a:2,b:2 "
            "python train.py, or call rankwise.launch(fn, num_nodes=2, rendezvous=...) on each of them",
        )
    return offered


def _num_ranks(num_proc: int, fewest: int | None, most: int | None, offered: Slots) -> int:
    room = sum(number for _, number in offered)
    for name, value in (("num_proc", num_proc), ("min_num_proc", fewest), ("max_num_proc", most)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if most is not None and fewest is None:
        raise ConfigurationError("max_num_proc requires min_num_proc.", do="pass min_num_proc too, or num_proc alone")
    if offered and num_proc > room:
        raise ConfigurationError(
            f"num_proc={num_proc} asks for more ranks than there are slots: {room}.",
            evidence=", ".join(f"{host}: {number}" for host, number in offered),
            do=f"pass num_proc={room}, or more slots",
        )
    # Horovod's elastic job uses every slot that it finds.
    number = min(most or room, room) if fewest is not None and offered else num_proc
    if fewest is not None and number < fewest:
        raise ConfigurationError(
            f"min_num_proc={fewest} is more than the {number} ranks there can be.",
            do="pass a smaller min_num_proc, or more slots",
        )
    if most is not None and number > most:
        raise ConfigurationError(
            f"num_proc={number} is more than max_num_proc={most}.",
            do="pass a larger max_num_proc",
        )
    return number
