# SPDX-License-Identifier: Apache-2.0
"""``launch`` and ``launcher``: a function on several ranks, from a script, a notebook or another program.

Starts the launcher as a separate process, which runs the ranks as ``rankwise run`` does, and turns
the results into values or an exception. Starts no rank itself. Imported by users, as ``rankwise.launch``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError, LaunchError, RankFailed, rank_prefix
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.function.call import (
    FunctionCall,
    caller_context,
    dump,
    exception,
    message_of,
    plain_function,
    refusal,
    unpicklable_part,
    write,
)
from rankwise.launch.function.launcher_process import CallerReporter, LauncherProcess
from rankwise.launch.options import LaunchOptions
from rankwise.world.environments.reading import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launch.function.call import CallerMessage, Raised
    from rankwise.launch.hosts.ray_cluster import RayNeeds

P = ParamSpec("P")
T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: object,
    ranks: int | None = None,
    device: Literal["auto", "cpu"] = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    num_nodes: int = 1,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    on: Literal["here", "ray"] = "here",
    cpus_per_rank: int = 1,
) -> list[T]:
    """Run ``fn(*args)`` on several ranks and return what each of them returned.

    Every rank is a fresh process in which the function runs as a script would: it calls ``rankwise.join()``
    itself. Its ``__main__`` is empty: the caller's script or notebook is not run again, with or without
    ``if __name__ == "__main__"``. Functions and classes of ``__main__`` are sent by value, those of modules
    by name. The output of the ranks appears where the caller's prints appear.

    >>> values = rw.launch(train, model, functools.partial(loss, weight=2), ranks=4)  # doctest: +SKIP

    Args:
        fn: what every rank calls; for its keyword arguments use ``functools.partial``.
        args: picklable, including functions and classes of a notebook; every rank gets a copy.
        ranks: number of ranks on this machine; ``None`` starts one per GPU, or one if there is no GPU.
        device: ``"cpu"`` hides the GPUs from the ranks.
        log_dir: a folder for ``rank-0.out``, ``rank-0.err`` and so on.
        max_restarts: how often all ranks are restarted after a failure.
        num_nodes: how many machines call this, each for its own ranks. If a scheduler started one caller on
            each machine, it provides their number and the rendezvous.
        node_rank: number of this machine; ``None`` numbers them in the order they join.
        rendezvous: ``"host:port"``, an address of one of the machines, the same on all of them.
        on: ``"ray"`` runs the ranks on the cluster of Ray that this process is connected to, or that this machine
            belongs to. ``ranks`` then counts all ranks, by default one per GPU of the cluster, and ``num_nodes`` the
            nodes to divide them among, by default as few as hold them.
        cpus_per_rank: CPUs that Ray reserves for each rank.

    Returns:
        The values of this machine's ranks, in rank order. With several machines each caller gets those of
        its own: nothing received over the network is ever unpickled. On Ray those of all ranks, which come through
        Ray.

    Raises:
        ConfigurationError: an argument is invalid or cannot be pickled, or this is itself a rank; Ray has no such
            cluster. Nothing ran.
        LaunchError: the ranks could not be started, the launcher was terminated, or the ranks saved and stopped early.
        RankFailed: a rank was killed, exited without returning, or returned a value that cannot be pickled.
        Exception: the exception of the first rank to fail, with that rank's traceback as a note; also if the
            others continued without it.
        KeyboardInterrupt: Ctrl-C; every rank has exited.

    Called by: one process, from any thread; with several machines, by one process on each; on Ray by one alone.
    """
    needs = _needs(on, cpus_per_rank, num_nodes, node_rank, rendezvous)
    options = _options(
        ranks=ranks,
        device=device,
        log_dir=log_dir,
        max_restarts=max_restarts,
        num_nodes=num_nodes if needs is None else 1,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )
    return _run(FunctionCall(fn=fn, args=args, kwargs={}, is_decorated=False), options, needs)


@overload
def launcher(fn: Callable[P, T], /) -> Callable[P, list[T]]: ...
@overload
def launcher(
    *,
    ranks: int | None = None,
    device: Literal["auto", "cpu"] = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    num_nodes: int = 1,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    on: Literal["here", "ray"] = "here",
    cpus_per_rank: int = 1,
) -> Callable[[Callable[P, T]], Callable[P, list[T]]]: ...
def launcher(
    fn: Callable[P, T] | None = None,
    /,
    *,
    ranks: int | None = None,
    device: Literal["auto", "cpu"] = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    num_nodes: int = 1,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    on: Literal["here", "ray"] = "here",
    cpus_per_rank: int = 1,
) -> Callable[P, list[T]] | Callable[[Callable[P, T]], Callable[P, list[T]]]:
    """Make a function run on several ranks each time it is called, as :func:`launch` runs it.

    The arguments of each call, including keyword arguments, are passed to the function; it returns every rank's value.
    Without arguments, ``@rw.launcher``, it starts one rank per GPU, or one if there is no GPU.

    >>> @rw.launcher(ranks=2)  # doctest: +SKIP
    ... def main(learning_rate): ...
    >>> values = main(0.1)  # doctest: +SKIP

    Args:
        fn: the function, if the decorator has no arguments.
        ranks: as for :func:`launch`, like all that follow.
        device: see there.
        log_dir: see there.
        max_restarts: see there.
        num_nodes: see there.
        node_rank: see there.
        rendezvous: see there.
        on: see there.
        cpus_per_rank: see there.

    Raises:
        ConfigurationError: an argument is invalid; raised when the function is defined, not when it is called.
    """
    needs = _needs(on, cpus_per_rank, num_nodes, node_rank, rendezvous)
    options = _options(
        ranks=ranks,
        device=device,
        log_dir=log_dir,
        max_restarts=max_restarts,
        num_nodes=num_nodes if needs is None else 1,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )

    def decorate(inner: Callable[P, T]) -> Callable[P, list[T]]:
        _check_callable(inner)

        @functools.wraps(inner)
        def on_ranks(*args: P.args, **kwargs: P.kwargs) -> list[T]:
            # The name in the module refers to the decorated function, so that is what is sent.
            call = FunctionCall(fn=on_ranks, args=args, kwargs=kwargs, is_decorated=True)
            return _run(call, options, needs)

        return on_ranks

    return decorate if fn is None else decorate(fn)


def _options(
    *,
    ranks: int | None,
    device: Literal["auto", "cpu"],
    log_dir: str | os.PathLike[str] | None,
    max_restarts: int,
    num_nodes: int,
    node_rank: int | None,
    rendezvous: str | None,
) -> LaunchOptions:
    for name, value, least in (
        ("ranks", ranks, 1),
        ("max_restarts", max_restarts, 0),
        ("num_nodes", num_nodes, 1),
        ("node_rank", node_rank, 0),
    ):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigurationError(
                f"{name} must be an int >= {least}, got {value!r}.", do=f"pass {name}={least} or more"
            )
    if device not in {"auto", "cpu"}:
        raise ConfigurationError(
            f'device must be "auto" or "cpu", got {device!r}.', do='pass device="auto" or device="cpu"'
        )
    if num_nodes > 1 and rendezvous is None:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a rendezvous.",
            do='pass rendezvous="host:port", an address of one of the machines, the same on all',
        )
    return LaunchOptions(
        num_ranks=ranks,
        device=device,
        log_dir=None if log_dir is None else os.fspath(log_dir),
        max_restarts=max_restarts,
        nodes=(num_nodes, num_nodes),
        node_rank=node_rank,
        rendezvous=None if rendezvous is None else parse_address(rendezvous, "rendezvous"),
    )


def _needs(
    on: str, cpus_per_rank: int, num_nodes: int, node_rank: int | None, rendezvous: str | None
) -> RayNeeds | None:
    """Return what a job on Ray needs there; ``None`` for ranks of this machine."""
    if on not in {"here", "ray"}:
        raise ConfigurationError(f'on must be "here" or "ray", got {on!r}.', do='pass on="ray", or omit it')
    if on == "here":
        if cpus_per_rank != 1:
            raise ConfigurationError("cpus_per_rank is for Ray.", do='pass on="ray" too, or set OMP_NUM_THREADS')
        return None
    if node_rank is not None or rendezvous is not None:
        raise ConfigurationError(
            'node_rank and rendezvous are for one call per machine, and on="ray" is one call for all.',
            do="omit them: the caller serves the job, and Ray places its nodes",
        )
    from rankwise.launch.hosts.ray_cluster import RayNeeds  # noqa: PLC0415 - only where Ray is used

    return RayNeeds(nodes=(num_nodes, num_nodes) if num_nodes > 1 else None, cpus_per_rank=cpus_per_rank)


def _check_callable(fn: object) -> None:
    if not callable(fn):
        raise ConfigurationError(f"{fn!r} is not a function.", do="pass the function, then its arguments")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise ConfigurationError(
            f"{fn.__qualname__} does not run when called: it is asynchronous, or a generator.",
            do="launch a plain function that runs it: asyncio.run(...), list(...)",
        )


def _refuse_in_a_rank() -> None:
    if "RANKWISE_RUN_ID" in os.environ:
        raise ConfigurationError(
            "This process is already a rank and cannot launch others.",
            evidence="RANKWISE_RUN_ID is set: rankwise started this process",
            do="run the script with python instead of rankwise run, or remove launch() from it",
        )
    open_session = current_or_none()
    if open_session is not None:
        raise ConfigurationError(
            "This process has joined a world and cannot launch ranks of another.",
            where=rank_prefix(open_session.world.rank, open_session.world.world_size),
            do="call rankwise.join() in the launched function, not around launch(); or rankwise.leave() first",
        )


def _run(call: FunctionCall, options: LaunchOptions, needs: RayNeeds | None) -> list[Any]:
    _check_callable(call.fn)
    _refuse_in_a_rank()
    name = getattr(plain_function(call.fn), "__qualname__", type(call.fn).__name__)
    outcome = _outcome_here(name, call, options) if needs is None else _outcome_on_ray(name, call, options, needs)
    # Raised here and not where it is found, so that the user sees fewer of rankwise's frames.
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _outcome_here(name: str, call: FunctionCall, options: LaunchOptions) -> list[Any] | BaseException:
    with LauncherProcess() as process:
        try:
            file = write(caller_context(name, call.fn, options), call)
        except OSError as error:
            raise LaunchError(
                f"{name} and its arguments could not be written to {tempfile.gettempdir()}: {error.strerror}.",
                do="free space there, or set TMPDIR to a folder with more",
            ) from None
        except Exception:  # noqa: BLE001 - pickling runs any code of the user's
            raise _unpicklable(name, call) from None
        with file:
            process.give(file)
        process.wait()
        return _outcome(process.messages, process.exit_code)


def _unpicklable(name: str, call: FunctionCall) -> ConfigurationError:
    part, problem = unpicklable_part(call.fn, call.args, call.kwargs)
    return ConfigurationError(
        f"{name} cannot be sent to the ranks: {part} cannot be pickled.",
        evidence=problem,
        do="create it inside the function, or pass what it is created from",
    )


def _outcome_on_ray(
    name: str, call: FunctionCall, options: LaunchOptions, needs: RayNeeds
) -> list[Any] | BaseException:
    from rankwise.launch.hosts.on_ray import launch_on_ray  # noqa: PLC0415 - only where Ray is used

    pickled = io.BytesIO()
    try:
        dump(call, pickled)
    except Exception:  # noqa: BLE001 - as above
        raise _unpicklable(name, call) from None
    context, reporter = caller_context(name, call.fn, options), CallerReporter()
    end = launch_on_ray(context, pickled.getvalue(), needs, reporter, takes_signals=False)
    with ExitStack() as closing:
        said = [closing.enter_context(contextlib.closing(message_of(*answer))) for answer in end.answers]
        ends = [message for message in said if message.header["kind"] == "ended"]
        failed = {rank: how for message in ends for rank, how in message.read()[1].items()}
        body = io.BytesIO()
        dump((reporter.last_report, failed), body)
        header = {"kind": "ended", "exit_code": end.exit_code, "blamed": reporter.blamed}
        ended = closing.enter_context(contextlib.closing(message_of(header, body.getvalue())))
        of_ranks = [message for message in said if message.header["kind"] != "ended"]
        return _outcome([ended, *of_ranks], end.exit_code)


def _outcome(said: Sequence[CallerMessage], exit_code: int | None) -> list[Any] | BaseException:
    for message in said:
        if message.header["kind"] == "refused":
            return refusal(message.read())
    ended = next((message for message in said if message.header["kind"] == "ended"), None)
    if ended is None:
        return LaunchError(
            f"The launcher exited before its ranks, which were terminated with it: exit code {exit_code}.",
            do="check its output above, and `dmesg` for the out-of-memory killer",
        )
    # Of several attempts only the last counts.
    of_ranks = [message for message in said if "rank" in message.header]
    last = max((message.header["attempt"] for message in of_ranks), default=0)
    of_ranks = [message for message in of_ranks if message.header["attempt"] == last]
    report, failed = ended.read()
    if ended.header["exit_code"]:
        return _error(ended.header, report, of_ranks)
    values = {message.header["rank"]: message for message in of_ranks if message.header["kind"] == "value"}
    # In the order in which they failed: the others continued without these.
    for rank, how in failed.items():
        if rank not in values:
            return _error_of_rank(rank, how, report, of_ranks)
    for rank in _ranks_here(of_ranks):
        if rank not in values:
            return RankFailed(
                f"Rank {rank} exited with code 0 before the function returned.",
                rank=rank,
                do="return from the function; os._exit() in it discards the value",
            )
    return [_value(message) for _, message in sorted(values.items())]


def _ranks_here(of_ranks: Sequence[CallerMessage]) -> Sequence[int]:
    """Return the ranks of the machines that have sent something, of which each has sent nothing else or a value."""
    firsts = {one.header["rank"] - one.header["local_rank"]: one.header["local_world_size"] for one in of_ranks}
    return [rank for first, size in sorted(firsts.items()) for rank in range(first, first + size)] or [0]


def _value(message: CallerMessage) -> Any:
    try:
        return message.read()
    except Exception as error:
        error.add_note(f"while reading what rank {message.header['rank']} returned")
        raise


def _error(ended: Mapping[str, Any], report: str, of_ranks: Sequence[CallerMessage]) -> BaseException:
    """Return the exception of the first rank to fail, or an error with the way it exited."""
    blamed, exit_code = ended["blamed"], ended["exit_code"]
    if blamed is None and exit_code == STOPPED_EXIT_CODE:
        return LaunchError("The ranks saved and stopped early, as requested.", do="call it again to continue")
    if blamed is None:
        return LaunchError(
            f"The launcher was terminated, and every rank with it: exit code {exit_code}.", evidence=report or None
        )
    rank, how = blamed
    return _error_of_rank(rank, how, report, of_ranks)


def _error_of_rank(rank: int, how: str, report: str, of_ranks: Sequence[CallerMessage]) -> BaseException:
    for message in of_ranks:
        header = message.header
        if header["rank"] == rank and header["kind"] == "error":
            where = rank_prefix(rank, header["world_size"], header["hostname"])
            return _reraised(message.read(), rank, where, how)
    return RankFailed(f"Rank {rank} failed: {how}.", rank=rank, evidence=report or None)


def _reraised(raised: Raised, rank: int, where: str, how: str) -> BaseException:
    if raised.type == SystemExit.__name__:
        # If raised here, it would end the caller.
        return RankFailed(f"Rank {rank} failed: {how}.", rank=rank, where=where, evidence=raised.message)
    error = exception(raised.pickled)
    if error is None:
        what = f"Rank {rank} failed: {raised.type}: {raised.message}"
        return RankFailed(what, rank=rank, where=where, evidence=raised.traceback)
    if not isinstance(error, RankFailed):
        error.add_note(f"{where} {raised.traceback.rstrip()}")
    return error
