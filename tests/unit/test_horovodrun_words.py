# SPDX-License-Identifier: Apache-2.0
"""``rankwise horovodrun``: what horovodrun's options become, and what is said of those that become nothing."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest

from rankwise.cli import horovodrun, main
from rankwise.cli.horovodrun import NOTED, NOTED_WITH_VALUE, REFUSED
from rankwise.errors import ConfigurationError

HELP = """\
usage: rankwise horovodrun -np N [options] python train.py [arguments]

Run a Horovod script, unchanged, on several ranks, with horovodrun's options. `import horovod.torch` imports rankwise's.

Prints the equivalent `rankwise run` command.

positional arguments:
  python train.py       what every rank runs

options:
  -h, --help            show this help message and exit
  -np N, --num-proc N   total number of ranks
  --output-filename DIR
                        write DIR/rank-0.out and so on
  --timeline-filename FILE
                        write a timeline of all ranks, as trace events

several machines:
  -H A:SLOTS,..., --hosts A:SLOTS,...
                        hosts, and how many ranks each can run
  -hostfile FILE, --hostfile FILE
                        the same, one line per host: NAME slots=SLOTS
  --host-discovery-script SCRIPT
                        not supported: shows what to write instead
  -p PORT, --ssh-port PORT
                        ssh's port on the hosts
  -i FILE, --ssh-identity-file FILE
                        ssh's private key
  --network-interface NAME, --network-interfaces NAME
                        network interface for traffic between ranks
  --start-timeout SECONDS
                        how long machines wait for one another

elastic jobs:
  --min-np N, --min-num-proc N
                        continue with no fewer than N ranks
  --max-np N, --max-num-proc N
                        use no more than N ranks
  --slots-per-host N    for --host-discovery-script
  --reset-limit R       restart at most R times (default: 3)

examples:
  rankwise horovodrun -np 4 python train.py --epochs 3
  rankwise horovodrun -np 8 -H gpu-01:4,gpu-02:4 python train.py
  rankwise horovodrun -np 8 --min-np 4 --reset-limit 3 -H gpu-01:4,gpu-02:4 python train.py
"""


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    horovodrun.add_options(parser)
    return parser.parse_args(shlex.split(line))


def in_the_words_of_python_3_13(text: str) -> str:
    """Return argparse's help as newer versions write it: a value once for all names of its option, else in columns."""
    if sys.version_info < (3, 13):
        return text
    return " ".join(re.sub(r"(-\S+) (\S+), (--\S+) \2", r"\1, \3 \2", text).split())


def test_the_options_are_these(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["horovodrun", "--help"])
    assert in_the_words_of_python_3_13(capsys.readouterr().out) == in_the_words_of_python_3_13(HELP)


@pytest.mark.parametrize(
    ("line", "options", "command"),
    [
        ("-np 4 python train.py --lr 1 -np 3", "-n 4", "train.py --lr 1 -np 3"),
        ("-np 2 -H localhost:4 python3 -u -m pkg.train -m", "-n 2", "-m pkg.train -m"),
        ("-np 3 -H localhost:2,127.0.0.1:2 python train.py", "-n 3", "train.py"),
        ("--num-proc 2 --output-filename logs -- /usr/bin/python3.11 t.py", "-n 2 --log-dir logs", "t.py"),
        ("-np 2 --reset-limit 5 python t.py", "-n 2 --max-restarts 5", "t.py"),
        ("-np 2 --min-np 1 --reset-limit 0 python t.py", "-n 2 --max-restarts 0", "t.py"),
        ("-H a:2,b:3 python t.py", "--hosts a:2,b:3", "t.py"),
        ("-np 3 -H a:2,b:0,c:2,d:2 python t.py", "--hosts a:2,c:1", "t.py"),
        ("-np 2 -H a:2,b:2 python t.py", "--hosts a:2", "t.py"),
        (
            "-np 4 -H a:2,b:2 -p 2222 -i 'my key' --network-interface ib0 --start-timeout 60 python t.py",
            "--hosts a:2,b:2 --ssh \"ssh -p 2222 -i 'my key'\" --interface ib0 --rendezvous-timeout 60",
            "t.py",
        ),
        ("-np 4 --min-np 3 -H a:2,b:2 python t.py", "--hosts a:2,b:2 --max-restarts 3", "t.py"),
        ("-np 2 --min-np 2 -H a:2,b:2 python t.py", "--hosts a:2,b:2 --nodes 1:2 --max-restarts 3", "t.py"),
        (
            "-np 2 --min-np 2 --max-np 5 --reset-limit 9 -H a:1,b:2,c:4 python t.py",
            "--hosts a:1,b:2,c:2 --nodes 2:3 --max-restarts 9",
            "t.py",
        ),
        ("-np 4 --min-np 2 python t.py", "-n 4 --max-restarts 3", "t.py"),
        ("-np 2 bash -c 'exec python t.py -u'", "-n 2", "--no-python bash -c 'exec python t.py -u'"),
        ("-np 2 -- env LR=1 ./train.sh -m", "-n 2", "--no-python env LR=1 ./train.sh -m"),
        ("-np 2 python -W error -m pkg.train -W", "-n 2", "--no-python python -W error -m pkg.train -W"),
        ("-np 2 -H a:2 python3 -u -c 'import t'", "--hosts a:2", "--no-python python3 -u -c 'import t'"),
    ],
)
def test_words_become_these(line: str, options: str, command: str) -> None:
    words = horovodrun.translate(parsed(line))
    assert words == ["run", *shlex.split(options), "-m", "rankwise.compat.horovod", *shlex.split(command)]


@pytest.mark.parametrize(
    ("line", "what", "do"),
    [
        ("python t.py", "The number of ranks is not given", "-np 4"),
        ("-np 0 python t.py", "-np must be >= 1, got 0", "1 or more"),
        ("-np 5 -H a:2,b:2 python t.py", "-np 5 asks for more ranks than there are slots: 4", "-np 4"),
        ("-np 2 -H a,b python t.py", "'a' in -H a,b is not a host with slots", "-H worker-0:2"),
        ("-np 2 --hostfile nowhere python t.py", "'nowhere' cannot be read", None),
        ("-np 2", "no command", "rankwise horovodrun -np 4 python train.py"),
        ("-np 2 python", "has no script", "python train.py"),
        ("-np 2 --max-np 4 python t.py", "--max-np is for an elastic job", "--min-np"),
        ("-np 4 --min-np 5 -H a:2,b:2 python t.py", "--min-np 5 is more than the 4 ranks", "smaller"),
        ("-np 4 --network-interfaces eth0,eth1 -H a:2,b:2 python t.py", "2 network interfaces", "eth0"),
        ("-np 4 --slots-per-host 2 python t.py", "discovery", "-H a:4,b:4"),
        (
            "-np 4 --min-np 2 --slots-per-host 2 --host-discovery-script f.sh python t.py --lr 1",
            "machines join by themselves",
            "-n 2 --max-restarts 3 -m rankwise.compat.horovod t.py --lr 1",
        ),
    ],
)
def test_impossible_arguments_are_reported(line: str, what: str, do: str | None) -> None:
    with pytest.raises(ConfigurationError) as error:
        horovodrun.translate(parsed(line))
    assert what in str(error.value)
    assert do is None or do in str(error.value.do)


def test_a_host_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb.example.org slots = 4  # new\n")
    words = horovodrun.translate(parsed(f"-np 3 -hostfile {path} python t.py"))
    assert words[:3] == ["run", "--hosts", "a:2,b.example.org:1"]
    path.write_text("a 2\n")
    with pytest.raises(ConfigurationError, match=r"Line 1 of .* is not a host with slots"):
        horovodrun.translate(parsed(f"-np 3 -hostfile {path} python t.py"))


def test_options_that_do_nothing_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    words = [*NOTED, *(f"{name}=1" for name in NOTED_WITH_VALUE)]
    options = parsed(f"-np 2 {shlex.join(words)} python t.py")
    assert horovodrun.translate(options)[:3] == ["run", "-n", "2"]
    known = NOTED | NOTED_WITH_VALUE
    assert horovodrun.notes(options) == [f"{name} has no effect: {why}" for name, why in known.items()]


def test_another_python_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.touch(mode=0o755)
    assert horovodrun.notes(parsed(f"-np 2 {path} t.py")) == [
        f"ranks run under the Python that runs rankwise: {sys.executable}, not {path}"
    ]


def test_a_command_other_than_python_prints_nothing_about_pythons() -> None:
    assert horovodrun.notes(parsed("-np 2 bash -c 'python t.py'")) == []


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_a_counterpart_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_values, do = REFUSED[name]
    with pytest.raises(SystemExit):
        parsed(f"-np 2 {name} {'1 ' * num_values} python t.py")
    assert f"{name} is not supported: {do}" in capsys.readouterr().err


def test_an_unknown_option_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("-np 2 --fusion-threshold 3 python t.py")
    assert "--fusion-threshold" in capsys.readouterr().err


def test_a_missing_script_is_reported_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "-np", "2", "python", "nowhere.py"]) == 2
    assert "Script 'nowhere.py' does not exist." in capsys.readouterr().err


def test_a_missing_command_is_reported_before_any_rank_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "-np", "2", "train.sh", "--lr", "1"]) == 2
    error = capsys.readouterr().err
    assert "ConfigurationError: Command 'train.sh' was not found." in error
    assert "./" in error
