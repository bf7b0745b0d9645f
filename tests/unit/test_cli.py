# SPDX-License-Identifier: Apache-2.0
"""The command line's words, frozen; and what it does with them before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise.cli import COMMANDS, main
from rankwise.errors import ConfigurationError
from rankwise.launch.hosts import ssh
from rankwise.launch.start import LaunchOptions, num_ranks_here
from rankwise.version import VERSION

HELP = """\
usage: rankwise run [options] script.py [arguments]
       rankwise run [options] -m module [arguments]

Run a training script or a module on several ranks, on this machine or on several machines.

Each rank is a separate process, which behaves as under `python script.py arguments`.
The exit code is that of the first rank to fail; its traceback is shown last.

positional arguments:
  script.py | module    what every rank runs, and its arguments

options:
  -h, --help            show this help message and exit
  -n N                  number of ranks (default: one per GPU, else one)
  --device {auto,cpu}   cpu hides the GPUs from the ranks (default: auto, one GPU per rank if
                        there are GPUs)
  --log-dir DIR         write DIR/rank-0.out, DIR/rank-0.err and so on
  --max-restarts R      restart all ranks after a failure, at most R times (default: 0)
  --check               have ranks compare their collectives, including gradients, before they
                        send (RANKWISE_CHECK=1)
  --guard               have the ranks of a torch.distributed script compare parameters and
                        learning rates during training
  --auto                run an unedited script for one device on rank 0; each rank computes its
                        models for a part of each batch
  --report DIR | off    record in DIR where the time of each step goes, for `rankwise report DIR`;
                        off measures nothing (RANKWISE_REPORT)
  --progress            show one line about the whole job, on the machine with rank 0: its pace,
                        the values it logs, the slowest rank
  --torch-store {on,off}
                        whether MASTER_ADDR and MASTER_PORT point to torch's own store, which
                        accepts every process that reaches it (default: RANKWISE_TORCH_STORE,
                        else, on one machine, a store for processes of this user)
  -m                    run a module

several machines:
  --nodes N | MIN:MAX   number of machines; with MIN:MAX the job continues if some are lost and
                        grows when they rejoin
  --rendezvous HOST:PORT
                        where the machines meet: an address of the first machine, the same on all
  --node-rank R         number of this machine (default: in the order they join)
  --hosts A,B:RANKS,...
                        start all machines from here, over ssh; the first one serves the job
  --ssh COMMAND         the ssh command for --hosts, with its options (default: ssh)
  --ray [HOST:PORT]     start all ranks from here, on a cluster of Ray (default: the one of this
                        machine); -n then counts all ranks, and --nodes the nodes they are divided
                        among (default: as few as hold them)
  --cpus-per-rank N     CPUs that Ray reserves for each rank (default: 1); with a GPU if the
                        cluster has some
  --interface NAME      network interface for traffic between ranks (default: the one that leads
                        to the rendezvous)
  --rendezvous-timeout SECONDS
                        how long the machines wait for one another at the start (default: 600)

examples:
  rankwise run train.py                  every GPU here, or one rank on a machine without GPUs
  rankwise run -n 4 train.py --epochs 3  four ranks; arguments after the script belong to it
  rankwise run -n 2 -m pkg.train         a module, as `python -m pkg.train` runs it
  rankwise run --nodes 2 --rendezvous gpu-01:29400 train.py
                                         the same command on each of two machines
  rankwise run --hosts gpu-01,gpu-02 -n 4 train.py
                                         once for both machines: started over ssh
  rankwise run --ray -n 16 train.py      16 ranks on the cluster of Ray that this machine belongs to
  srun rankwise run -n 4 train.py        under Slurm: one launcher per node, four ranks each

output of the ranks:
  Lines on stdout are passed through unchanged, lines on stderr are prefixed with the rank
  (with --auto, those of the script are not).
  With one rank, nothing is changed. Rank 0 writes to a terminal directly: progress bars work.
  With --log-dir, the terminal shows rank 0 only, and every rank has its own files.
  stdin is empty if there are several ranks.
"""


def test_the_options_of_run_are_these(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == HELP


def test_the_commands_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["walk"])
    assert ended.value.code == 2
    assert "'walk' is not a command; rankwise --help lists them" in capsys.readouterr().err


def test_an_option_is_not_guessed_from_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--max", "1", "train.py"])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc-per-node", "2"], "use -n, the number of ranks on this machine"),
        (["--nprocs", "2"], "use -n, the number of ranks on this machine"),
        (["--nproc_per_node=2"], "use -n, the number of ranks on this machine"),
        (["--standalone"], "leave it out"),
        (["--rdzv_endpoint=a:1"], "use --rendezvous HOST:PORT, where the machines meet"),
        (["-np", "2"], "use -n in place of mpirun's -np"),
        (["-n", "two"], "'two' is not a number"),
    ],
)
def test_another_launcher_s_option_is_answered_with_ours(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words, "train.py"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: rankwise run [options] script.py")
    assert told in said


def test_a_script_without_a_command_gets_an_error_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train.py", "--epochs", "3"])
    assert "to run it: rankwise run train.py" in capsys.readouterr().err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rankwise {VERSION}\n"


def test_a_mistake_is_text_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "0", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "ConfigurationError: The number of ranks must be >= 1, got 0.\n"
        "  do        pass -n 1 or more, or omit -n: one rank per GPU, else one\n"
    )


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [(None, 0, 1), (None, 1, 1), (None, 8, 8), (3, 0, 3), (2, 8, 2)],
)
def test_one_rank_per_gpu_unless_asked_otherwise(asked: int | None, num_gpus: int, expected: int) -> None:
    assert num_ranks_here(LaunchOptions(num_ranks=asked), num_gpus) == expected


def test_more_ranks_than_gpus_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError) as error:
        num_ranks_here(LaunchOptions(num_ranks=4), 1)
    assert str(error.value) == (
        "4 ranks were requested on a machine with 1 GPU.\n"
        "  do        pass -n 1, or --device cpu to run the ranks without GPUs"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-n", "3"], {"num_ranks": 3}),
        (["--device", "cpu"], {"device": "cpu"}),
        (["--log-dir", "logs"], {"log_dir": "logs"}),
        (["--max-restarts", "2"], {"max_restarts": 2}),
        (["--rendezvous-timeout", "9"], {"rendezvous_timeout_seconds": 9.0}),
        (["--interface", "eth0"], {"interface": "eth0"}),
        (["--check"], {"check": True}),
        (["--guard"], {"guard": True}),
        (["--report", "off"], {"report": "off"}),
        (["--progress"], {"progress": True}),
        (["--torch-store", "off"], {"torch_store": "off"}),
    ],
)
def test_every_option_of_a_machine_is_handed_on_to_hosts(
    words: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LaunchOptions] = []

    def launch_on_hosts(command: object, hosts: object, options: LaunchOptions, **_: object) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr(ssh, "launch_on_hosts", launch_on_hosts)
    assert main(["run", "--hosts", "a,b", *words, "train.py"]) == 0
    assert started == [LaunchOptions(**expected)]


@pytest.mark.parametrize("words", [["-n", "2"], ["--nproc_per_node=2"], ["-np", "2", "--epochs", "3"]])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", "-n"),
        ("run --hosts gpu1,gpu2", "-n"),
        ("submit", "--ranks-per-node"),
        ("verify", "-n"),
    ],
)
def test_a_number_of_ranks_after_the_script_is_a_mistake(
    command: str, option: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert main([*command.split(), str(script), *words]) == 2
    error = capsys.readouterr().err
    assert "stands after the script, and would be passed to it: the job would not have 2 ranks" in error
    assert f"rankwise {command} {option} 2 {script}" in error
    assert f"rankwise {command} -- {script} {' '.join(words)}" in error


@pytest.mark.parametrize(
    ("before", "source", "after"),
    [
        (["--"], "", ["-n", "2"]),
        (["-n", "1"], "", ["-n", "2"]),
        ([], "parser.add_argument('-n', type=int)", ["-n", "2"]),
        ([], "", ["-n", "name"]),
        ([], "", ["--epochs", "2", "-n", "2"]),
        ([], "", []),
    ],
)
def test_a_script_keeps_an_option_of_its_own(
    before: list[str], source: str, after: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    given: list[Any] = []

    def refuse(name: str, arguments: list[str], **_: object) -> None:
        given.append((name, arguments))
        raise ConfigurationError("enough")

    monkeypatch.setattr("rankwise.cli.run.find_target", refuse)
    assert main(["run", *before, str(script), *after]) == 2
    assert given == [(str(script), after)]


def test_a_mistake_does_not_wait_for_torch_nor_for_other_commands() -> None:
    """With the public names left aside, whose import is not the command's."""
    program = (
        "import sys, types; package = types.ModuleType('rankwise'); "
        f"package.__path__ = [{str(Path(rankwise.__file__).parent)!r}]; "
        "sys.modules['rankwise'] = package; "
        "from rankwise.cli import main; code = main(['run', 'nowhere.py']); "
        "print(code, 'torch' in sys.modules, 'rankwise.cli.doctor' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "2 False False\n"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: rankwise [-h]")
    assert "rankwise run -n 4 train.py" in shown
    assert "documentation: " in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rnu", "train.py"], "'rnu' is not a command; did you mean 'run'?"),
        (["run", "--log-dri=logs", "train.py"], "unrecognized arguments: --log-dri=logs; did you mean '--log-dir'?"),
        (["stacks", "--jsno"], "did you mean '--json'?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_it_is_like(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words", "named"),
    [
        ("", ["--auto", "--log-dir=logs"], "--auto, --log-dir belong before the script"),
        ("parser.add_argument('--log-dir')", ["--log-dir", "logs"], ""),
        ("def main(log_dir): ...", ["--log-dir", "logs"], ""),
        ("", ["--epochs", "3"], ""),
        ("", ["--help"], ""),
        ("from lib.options import parse", ["--log-dir", "logs"], ""),
    ],
)
def test_an_option_after_a_script_that_has_none_of_this_name_is_pointed_out(  # noqa: PLR0917
    source: str,
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    monkeypatch.setattr("rankwise.cli.run.launch", lambda *_: 0)
    monkeypatch.setattr("rankwise.cli.run.os._exit", lambda code: None)
    main(["run", str(script), *words])
    said = capsys.readouterr().err
    assert named in said
    assert bool(named) == ("warning" in said)


def _completed(shell: str, *words: str) -> list[str]:
    script = subprocess.run(
        [sys.executable, "-m", "rankwise", "completion", shell], capture_output=True, text=True, check=True
    ).stdout
    ask = f"COMP_WORDS=(rankwise {' '.join(words)}); COMP_CWORD={len(words)}; _rankwise; echo ${{COMPREPLY[@]}}"
    ended = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_bash_completes_commands_and_options() -> None:
    assert _completed("bash", "ver") == ["verify"]
    assert _completed("bash", "run", "--log") == ["--log-dir"]
    assert _completed("bash", "run", "train.py", "--log") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "max-restarts" in script


@pytest.mark.parametrize(("no_color", "is_colored"), [("", True), ("1", False)])
def test_an_error_is_red_on_a_terminal_only(
    no_color: str, *, is_colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    main(["run", "-n", "0", "train.py"])
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["run", "-n", "0", "train.py"])
    assert capsys.readouterr().err.startswith("\x1b[31mConfigurationError\x1b[0m: " if is_colored else "Config")
