# SPDX-License-Identifier: Apache-2.0
"""The batch script that ``rankwise submit`` writes, word for word, and what it refuses to write."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.cli import main
from rankwise.errors import ConfigurationError
from rankwise.launch.slurm import JobOptions, batch_script, directive_name, exit_code, fields_of, seconds_of

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=net
#SBATCH --output=net-%j.log
#SBATCH --time=2:00:00
#SBATCH --partition=gpu
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
# If preempted or stopped early, the job is requeued, and appends to its log.
#SBATCH --requeue
#SBATCH --open-mode=append
# This long before the limit, or up to 60 s earlier, the ranks are told to save and stop.
#SBATCH --signal=USR2@120
#SBATCH --qos=high

# Generated here, so that it is in no file: the agents and ranks of this job authenticate with it.
export RANKWISE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')

# One agent per node, which starts the ranks there. If one exits, the others are not killed: they have been
# notified, and may still be saving.
srun --export=ALL --cpus-per-task=16 --kill-on-bad-exit=0 \\
    /env/python -m rankwise run -n 4 train.py --name 'two words'
code=$?

# 75: the ranks were asked to stop, and have saved. The job is requeued.
if [ $code = 75 ]; then
    scontrol requeue $SLURM_JOB_ID
fi
exit $code
"""


def test_the_script_is_this() -> None:
    options = JobOptions(
        nodes=8, gpus_per_node=4, cpus_per_rank=4, time="2:00:00", partition="gpu", job_name="net", more=["--qos=high"]
    )
    assert batch_script(options, "/env/python", ["train.py", "--name", "two words"]) == SCRIPT


@pytest.mark.parametrize("option", ["--array=0-3", "-a0-3"])
def test_a_task_of_an_array_requeues_itself_alone(option: str) -> None:
    script = batch_script(JobOptions(more=[option]), "python", ["train.py"])
    assert "\n    scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\n" in script


def test_the_shown_command_runs_in_bash(tmp_path: Path) -> None:
    script = batch_script(JobOptions(job_name='a "name"'), "/a folder/python", ["it's.py", "$HOME"])
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=True)
    assert checked.stderr == ""
    assert '#SBATCH --job-name="a \\"name\\""' in script


def test_a_dry_run_shows_the_script_and_submits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "--nodes", "2", "--ranks-per-node", "3", "--dry-run", "train.py", "--nodes", "5"]) == 0
    shown = capsys.readouterr().out
    assert f"{sys.executable} -m rankwise run -n 3 train.py --nodes 5" in shown
    assert "#SBATCH --job-name=train" in shown
    assert main(["submit", "train.py"]) == 2
    assert "sbatch was not found on this machine" in capsys.readouterr().err
    assert main(["submit", "nowhere.py"]) == 2
    assert "Script 'nowhere.py' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "--nodes must be >= 1, got 0"),
        ({"ranks_per_node": 0}, "--ranks-per-node must be >= 1, got 0"),
        ({"ranks_per_node": 4, "gpus_per_node": 2}, "4 ranks per node need one GPU each, but --gpus-per-node is 2"),
        ({"time": "3:00"}, "notified to stop as soon as they start"),
        ({"partition": "a\nb"}, "cannot be written in an #SBATCH line"),
        ({"account": ""}, "cannot be written in an #SBATCH line"),
        ({"more": ["qos=high"]}, "not an sbatch option"),
        ({"more": ["--nodes=4"]}, r"(?s)#SBATCH --nodes=1\n.*pass --nodes to rankwise submit"),
        ({"more": ["-N4"]}, "rankwise writes #SBATCH --nodes=1"),
        ({"time": "2:00:00", "more": ["-t 1:00:00"]}, "rankwise writes #SBATCH --time=2:00:00"),
        ({"more": ["--no-requeue"]}, "(?s)rankwise writes #SBATCH --requeue.*remove it"),
        ({"more": ["--signal=B:USR1@60"]}, "pass --save-seconds to rankwise submit"),
        ({"more": ["--ntasks-per-node 4"]}, "pass --ranks-per-node to rankwise submit"),
        ({"more": ["--qos=high", "--qos=low"]}, "A directive was given two values"),
    ],
)
def test_contradictory_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        JobOptions(**options)


def test_no_directive_is_written_twice() -> None:
    more = ["--requeue", "--qos=high", "--nodes=2", "--qos=high", "--open-mode=append", "--signal=USR1@60"]
    script = batch_script(JobOptions(nodes=2, save_seconds=0, more=more), "python", ["train.py"])
    names = [directive_name(line.removeprefix("#SBATCH ")) for line in script.splitlines() if "#SBATCH" in line]
    assert sorted(names) == sorted(set(names))
    assert {"qos", "nodes", "requeue", "signal"} <= set(names)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("3:20", 200),
        ("1:0:5", 3605),
        ("2-3", 183600),
        ("1-0:30", 88200),
        ("1-1:1:1", 90061),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, expected: int | None) -> None:
    assert seconds_of(time) == expected


@pytest.mark.parametrize(
    ("state", "told", "expected"),
    [("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3), ("CANCELLED", "0:15", 143), ("TIMEOUT", "0:0", 1)],
)
def test_the_exit_code_is_that_of_the_job(state: str, told: str, expected: int) -> None:
    assert exit_code(state, told) == expected


def test_fields_with_spaces_are_read_whole() -> None:
    line = (
        "JobId=7 JobName=a b JobState=RUNNING Reason=None StdOut=/with spaces/net-7.log NtasksPerN:B:S:C=1:0:* Power="
    )
    found = fields_of(line)
    assert (found["JobName"], found["StdOut"], found["Power"]) == ("a b", "/with spaces/net-7.log", "")
