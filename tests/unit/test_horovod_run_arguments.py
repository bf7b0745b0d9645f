# SPDX-License-Identifier: Apache-2.0
"""The refusals of ``horovod.run`` before any rank starts, and the functions of ``horovod.common.util``."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

import rankwise.compat.horovod as hvd
from rankwise.compat.horovod import extensions, launching
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS_OF_HOROVOD = """
func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile start_timeout
ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args network_interface
executable np min_np max_np
"""


def test_run_takes_horovods_arguments_in_their_order() -> None:
    assert [*inspect.signature(hvd.run).parameters] == ARGUMENTS_OF_HOROVOD.split()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"num_proc": 0}, ConfigurationError, "num_proc must be a whole number of at least 1, got 0"),
        ({"num_proc": "2"}, ConfigurationError, "got '2'"),
        ({"num_proc": 3, "hosts": "localhost:2"}, ConfigurationError, "num_proc=3 asks for more ranks.*slots: 2"),
        ({"hosts": "localhost"}, ConfigurationError, "'localhost' in hosts=localhost is not a host with slots"),
        ({"hosts": "localhost:1", "hostfile": "hosts"}, ConfigurationError, "hosts and hostfile were both given"),
        ({"hostfile": "/nowhere"}, ConfigurationError, "'/nowhere' cannot be read"),
        ({"num_proc": 2, "hosts": "localhost:1,gpu-01:1"}, hvd.NotOffered, "horovodrun -np 4 -H a:2,b:2"),
        ({"use_gloo": True, "use_mpi": True}, ConfigurationError, "use_gloo and use_mpi were both given"),
        ({"mpi_args": "--bind-to none"}, hvd.NotOffered, "mpirun ... python -m rankwise.compat.horovod"),
        ({"executable": "/usr/bin/python9"}, hvd.NotOffered, "not /usr/bin/python9"),
        ({"max_num_proc": 4}, ConfigurationError, "max_num_proc requires min_num_proc"),
        ({"num_proc": 2, "min_num_proc": 3}, ConfigurationError, "min_num_proc=3 is more than the 2 ranks"),
        ({"num_proc": 4, "min_num_proc": 2, "max_num_proc": 3}, ConfigurationError, "num_proc=4 is more than"),
    ],
)
def test_run_refuses_invalid_arguments(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        hvd.run(print, **options)


def test_older_names_are_taken_with_a_warning_and_a_contradiction_is_not() -> None:
    with (
        pytest.warns(DeprecationWarning, match="^np is deprecated, use num_proc instead") as caught,
        pytest.raises(ConfigurationError, match="slots: 1"),
    ):
        hvd.run(print, np=2, hosts="localhost:1")
    assert caught[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="^min_np is deprecated, use min_num_proc instead"),
        pytest.raises(ConfigurationError, match="min_num_proc=2 and min_np=1 contradict"),
    ):
        hvd.run(print, min_num_proc=2, min_np=1)


def test_the_launched_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[tuple[Any, dict[str, Any]]] = []
    caplog.set_level("INFO")
    monkeypatch.setattr(launching, "launch", lambda fn, **options: launched.append((fn(), options)))
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots=3\n{socket.gethostname()} slots=2\n")

    def both(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int]]:
        return args, kwargs

    hvd.run(both, (1, 2), {"lr": 3}, 2, executable=sys.executable, output_filename="logs")
    hvd.run(both, num_proc=2, min_num_proc=2, max_num_proc=4, hostfile=str(hosts), ssh_port=22, verbose=2)
    hvd.run(both, num_proc=2, reset_limit=1)
    assert launched == [
        (((1, 2), {"lr": 3}), {"ranks": 2, "log_dir": "logs", "max_restarts": 0}),
        (((), {}), {"ranks": 4, "log_dir": None, "max_restarts": 3}),
        (((), {}), {"ranks": 2, "log_dir": None, "max_restarts": 1}),
    ]
    assert caplog.messages == ["hvd.run(): without effect here: ssh_port, verbose"]


def test_only_the_extension_for_torch_is_there() -> None:
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.tensorflow is not offered"):
        extensions.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    assert extensions.extension_available("torch")
    assert not extensions.extension_available("mxnet")
    assert not extensions.gpu_available("tensorflow")
    built = ("mpi", "gloo", "nccl", "ddl", "ccl")
    assert [getattr(extensions, f"{name}_built")(verbose=True) for name in built] == [
        getattr(hvd, f"{name}_built")() for name in built
    ]


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_A", "before")
    monkeypatch.delenv("HOROVOD_B", raising=False)

    def fail_inside() -> None:
        with extensions.env(HOROVOD_A="1", HOROVOD_B="2", HOROVOD_C=None):
            assert (os.environ["HOROVOD_A"], os.environ["HOROVOD_B"]) == ("1", "2")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert (os.environ["HOROVOD_A"], "HOROVOD_B" in os.environ) == ("before", False)


def test_small_functions() -> None:
    assert extensions.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert extensions.split_list([1], 2) == [[1], []]
    with pytest.raises(ConfigurationError, match="n must be at least 1, got 0"):
        extensions.split_list([1], 0)
    assert [number for number in range(9) if extensions.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert extensions.is_iterable("ab")
    assert not extensions.is_iterable(3)
