# SPDX-License-Identifier: Apache-2.0
"""A real Slurm: its steps train to the one-rank result, and a job that is asked to stop resumes where it stopped."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from interrupted import TOLERANCE, check_resumed, largest_difference
from training import CASES, Parameters, train_all

from rankwise.testing import run_ranks
from tests import plain_script

if TYPE_CHECKING:
    from slurm import Slurm

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
ON_THIS_CLUSTER = {
    "--partition=gpu": "--partition=main",
    "#SBATCH --gpus-per-node=4\n": "",
    "--cpus-per-task=32": "--cpus-per-task=2",
    "run -n 4 train.py": f"run -n 1 {Path(__file__).with_name('interrupted.py')} .",
}
"""What differs from the page's cluster: its partition, GPUs and CPUs, and the script."""
TRAINING = Path(__file__).with_name("training.py")
INTERRUPTED = Path(__file__).with_name("interrupted.py")
NUM_RANKS = 4
SRUN = ("srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1")


@pytest.fixture(scope="module")
def reference() -> list[Parameters]:
    """What one rank comes to."""
    return run_ranks(train_all, 1)[0].get()


def check_trained(folder: Path, reference: list[Parameters], num_ranks: int) -> None:
    """Hold what every rank has written against the one-rank run."""
    for rank in range(num_ranks):
        trained = torch.load(folder / f"{rank}.pt")
        for case, got, expected in zip(CASES, trained, reference, strict=True):
            assert largest_difference(got, expected) < TOLERANCE, (rank, case)


def submit(slurm: Slurm, folder: Path, text: str, *options: str) -> str:
    """Submit a batch script and return the number of the job; its output is the file ``out``."""
    script = folder / "job.sh"
    script.write_text("#!/bin/bash\n" + textwrap.dedent(text), encoding="utf-8")
    own = ("--parsable", "--nodes=2", "--output=out", "--open-mode=append")
    ran = slurm.run("sbatch", *own, *options, str(script), cwd=folder)
    assert ran.exit_code == 0, ran.stderr
    return ran.stdout.strip()


def test_srun_trains_to_the_one_rank_result(slurm: Slurm, tmp_path: Path, reference: list[Parameters]) -> None:
    ran = slurm.run(*SRUN, sys.executable, str(TRAINING), str(tmp_path), "{}")
    assert ran.exit_code == 0, ran.stderr
    assert "4 ranks: started by Slurm; " in ran.stderr
    check_trained(tmp_path, reference, NUM_RANKS)


def test_mpirun_within_sbatch_trains_to_the_one_rank_result(
    slurm: Slurm, tmp_path: Path, reference: list[Parameters]
) -> None:
    # Slurm's own variables number the daemons of mpirun here.
    where = f"-x MASTER_ADDR={slurm.hosts.hostnames[0]} -x MASTER_PORT=29533"
    text = f"mpirun --allow-run-as-root -n 2 --map-by node {where} {sys.executable} {TRAINING} {tmp_path} {{}}"
    job_id = submit(slurm, tmp_path, text, "--ntasks-per-node=1")
    job = slurm.await_job(job_id, lambda job: job["JobState"] in {"COMPLETED", "FAILED"})
    said = (tmp_path / "out").read_text()
    assert job["JobState"] == "COMPLETED", said
    assert "2 ranks: started by Open MPI" in said
    check_trained(tmp_path, reference, 2)


def test_srun_runs_a_script_for_one_device_once(slurm: Slurm, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "rankwise.auto", plain_script.__file__, str(tmp_path), "0")
    ran = slurm.run(*SRUN, *words, env={"RANKWISE_AUTO_SPLIT": "always"})
    assert ran.exit_code == 0, ran.stderr
    assert "runs whole" not in ran.stderr
    plain_script.check(tmp_path, ran.stdout)


TERMINATED = """
import os, signal, sys
import torch
from torch import nn
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
received = []
signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
while not received:
    loss = model(torch.ones(8, 3)).square().mean()
    loss.backward()
    open("begun", "a").close()
torch.save(model.state_dict(), "partial")
os.replace("partial", f"saved-{loss.item():.9f}")
sys.exit(5)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["-m rankwise.auto", "-m rankwise run -n 2 --auto"])
def test_scancel_lets_a_script_of_auto_save(slurm: Slurm, tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(TERMINATED)
    tasks = "--ntasks-per-node=2" if "tools" in way else "--nodes=1 --ntasks=1"
    text = f"RANKWISE_AUTO_SPLIT=always srun {tasks} {sys.executable} {way} train.py"
    job_id = submit(slurm, tmp_path, text, "--ntasks-per-node=2")
    slurm.await_file(tmp_path / "begun")
    slurm.run("scancel", job_id)
    slurm.await_job(job_id, lambda job: job["JobState"] == "CANCELLED")
    assert len(list(tmp_path.glob("saved-*"))) == 1, (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "out").read_text()


def test_two_agents_on_a_machine_are_one_too_many(slurm: Slurm) -> None:
    # With labels, srun hands on whole lines. Each task ends by itself: one that srun ended would have another code.
    ran = slurm.run(
        *SRUN, "--kill-on-bad-exit=0", "--label", sys.executable, "-m", "rankwise", "run", "-n", "1", str(TRAINING)
    )
    assert ran.exit_code == 2
    assert "srun --ntasks-per-node=1 rankwise run -n RANKS_PER_NODE train.py" in ran.stderr


@pytest.mark.timeout(180)
def test_a_step_that_is_asked_to_stop_saves_and_its_job_resumes_there(slurm: Slurm, tmp_path: Path) -> None:
    # Exported as many people have it, for other libraries: these agree with the step's own.
    text = f"""
        export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
        export MASTER_PORT=29511 WORLD_SIZE=2
        srun {sys.executable} {INTERRUPTED} {tmp_path}
        code=$?
        echo "ended with $code"
        [ $code != 75 ] || scontrol requeue $SLURM_JOB_ID
        exit $code
    """
    job_id = submit(slurm, tmp_path, text, "--ntasks-per-node=1", "--requeue")
    slurm.await_file(tmp_path / "begun")
    slurm.run("scancel", "--signal=USR2", job_id)
    slurm.skip_begin_time(job_id)
    (tmp_path / "hurry").touch()
    job = slurm.await_job(job_id, lambda job: job["JobState"] in {"COMPLETED", "FAILED"})
    said = (tmp_path / "out").read_text()
    assert job["JobState"] == "COMPLETED", said
    assert said.count("ended with") == 2, said
    assert "stopped early because of SIGUSR2, and saved" in said
    assert len(list((tmp_path / "net").iterdir())) == 1
    check_resumed(tmp_path, 2)


@pytest.mark.timeout(180)
def test_the_batch_script_of_the_page_saves_and_puts_its_job_back_into_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("```bash\n#!/bin/bash\n")[2].partition("```")[0]
    for there, here in ON_THIS_CLUSTER.items():
        assert there in text
        text = text.replace(there, here)
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\n" + text, encoding="utf-8")
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH\n", encoding="utf-8")
    # Environment modules are a function of the shell.
    there = {"HOME": str(tmp_path), "BASH_FUNC_module%%": "() { echo module $*; }"}
    ran = slurm.run("sbatch", "--parsable", "train.sbatch", cwd=tmp_path, env=there)
    assert ran.exit_code == 0, ran.stderr
    job_id = ran.stdout.strip()
    slurm.await_file(tmp_path / "begun")
    slurm.run("scancel", "--signal=USR2", job_id)
    slurm.skip_begin_time(job_id)
    (tmp_path / "hurry").touch()
    job = slurm.await_job(job_id, lambda job: job["JobState"] in {"COMPLETED", "FAILED"})
    said = (tmp_path / f"train-{job_id}.log").read_text(encoding="utf-8")
    assert job["JobState"] == "COMPLETED", said
    assert said.count("module load cuda") == 2, said
    assert "stopped early because of SIGUSR2, and saved" in said
    check_resumed(tmp_path, 2)


@pytest.mark.timeout(180)
def test_a_submitted_job_that_is_stopped_and_then_preempted_resumes_where_it_stopped(
    slurm: Slurm, tmp_path: Path
) -> None:
    shape = ("--nodes", "2", "--ranks-per-node", "1", "--time", "1:00:00")
    command = (sys.executable, "-m", "rankwise", "submit", *shape, str(INTERRUPTED), str(tmp_path))
    following = slurm.start(*command, cwd=tmp_path)
    begun = tmp_path / "begun"
    slurm.await_file(begun)
    job_id = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    slurm.run("scancel", "--signal=USR2", job_id)
    slurm.skip_begin_time(job_id)
    begun.unlink()
    slurm.await_file(begun)
    high = slurm.run(
        "sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=high", "--wrap=true", cwd=tmp_path
    )
    assert high.exit_code == 0, high.stderr
    slurm.skip_begin_time(job_id)
    (tmp_path / "hurry").touch()
    shown, errors = following.communicate(timeout=120)
    assert following.returncode == 0, shown + errors
    assert f"job {job_id} has been submitted" in errors
    for number, signal_name in enumerate(("SIGUSR2", "SIGTERM"), 1):
        assert f"stopped early because of {signal_name}, and saved; exit code 75" in shown, shown
        assert f"restored {tmp_path}/net/checkpoint-{number:06}" in shown, shown
    assert slurm.job(job_id)["Restarts"] == "2"
    assert f"job {job_id}: COMPLETED" in shown
    check_resumed(tmp_path, 2)


def test_each_task_of_a_step_reports_its_launcher_and_all_are_examined_together(slurm: Slurm, tmp_path: Path) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1")
    rankwise = (sys.executable, "-m", "rankwise")
    # A file each: srun cuts lines at 1024 bytes, and mixes what tasks write there.
    told = slurm.run(*srun, "--output=env-%t", *rankwise, "env", "--json", cwd=tmp_path)
    assert told.exit_code == 0, told.stderr
    decided = [json.loads((tmp_path / f"env-{rank}").read_text())["decided"] for rank in range(2)]
    expected = [(rank, 2, "slurm") for rank in range(2)]
    assert [(one["rank"], one["world_size"], one["source"]) for one in decided] == expected
    ran = slurm.run(*srun, *rankwise, "doctor", "--json")
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    read = json.loads(ran.stdout)
    assert [(facts["rank"], facts["world_size"], facts["source"]) for facts in read["ranks"]] == expected
    assert [facts["machine"]["hostname"] for facts in read["ranks"]] == slurm.hosts.hostnames
    assert "error" not in {finding["level"] for finding in read["findings"]}


TASK = """
import os, sys, time
from pathlib import Path
folder, number = Path(sys.argv[1]), os.environ["SLURM_ARRAY_TASK_ID"]
(folder / f"task-{number}").touch()
while not (folder / "task-0").exists() or not (folder / "task-1").exists():
    time.sleep(0.02)
if os.environ["SLURM_JOB_ID"] == os.environ["SLURM_ARRAY_JOB_ID"]:
    (folder / f"asked-{number}").touch()
    sys.exit(75)
time.sleep(600)
"""


@pytest.mark.timeout(120)
def test_a_task_of_an_array_that_was_asked_to_stop_requeues_itself_alone(slurm: Slurm, tmp_path: Path) -> None:
    """The number of one task's job is that of the whole array."""
    (tmp_path / "task.py").write_text(TASK)
    command = (sys.executable, "-m", "rankwise", "submit", "--sbatch=--array=0-1", "task.py", str(tmp_path))
    ran = slurm.run(*command, cwd=tmp_path)
    assert ran.exit_code == 0, ran.stderr
    job_id = slurm.run("squeue", "-h", "-o", "%F").stdout.split()[0]
    assert f"[rankwise] it is an array, whose jobs have a log each; to see them: squeue -j {job_id}\n" in ran.stderr
    slurm.await_job(f"{job_id}_0", lambda _: any(tmp_path.glob("asked-*")))
    (asked,) = (path.name.removeprefix("asked-") for path in tmp_path.glob("asked-*"))
    slurm.await_job(f"{job_id}_{asked}", lambda job: job["Restarts"] == "1")
    other = slurm.job(f"{job_id}_{1 - int(asked)}")
    slurm.run("scancel", job_id)
    for task in range(2):
        slurm.await_job(f"{job_id}_{task}", lambda job: job["JobState"] == "CANCELLED")
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")


def test_a_script_that_forgot_srun_is_warned_of_the_nodes_it_leaves_idle(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import rankwise as rw\nrw.join()\n")
    script = (sys.executable, "alone.py")
    ran = slurm.run("sbatch", "--wait", "--nodes=2", "--output=out", "--wrap", " ".join(script), cwd=tmp_path)
    assert ran.exit_code == 0, ran.stderr
    shell = slurm.run("salloc", "--nodes=2", *script, cwd=tmp_path)
    # The shell of salloc on a node, if the cluster has it there.
    step = slurm.run("salloc", "--nodes=2", "srun", "--interactive", "--preserve-env", *script, cwd=tmp_path)
    for told in ((tmp_path / "out").read_text(), shell.stderr, step.stderr):
        assert "SLURM_JOB_NUM_NODES=2, but this process is not in a Slurm step; start it with srun" in told
    one = slurm.run("salloc", "--nodes=1", *script, cwd=tmp_path)
    assert "not in a Slurm step" not in one.stderr


def test_an_error_of_slurm_is_shown_with_its_own_text(slurm: Slurm, tmp_path: Path) -> None:
    command = ("-m", "rankwise", "submit", "--partition", "nowhere", str(INTERRUPTED))
    ran = slurm.run(sys.executable, *command, cwd=tmp_path)
    assert ran.exit_code == 2
    assert "invalid partition specified: nowhere" in ran.stderr
    assert "\n  do        sinfo shows the partitions and their limits; --dry-run shows the script\n" in ran.stderr


def test_a_machine_without_a_controller_is_told_apart_from_a_refused_job(slurm: Slurm, tmp_path: Path) -> None:
    submit = ("env", "-u", "SLURM_CONF", sys.executable, "-m", "rankwise", "submit", str(INTERRUPTED))
    ran = slurm.run(*submit, cwd=tmp_path)
    assert ran.exit_code == 2
    assert ran.stderr.startswith("LaunchError: This machine cannot reach Slurm's controller.\n")
    assert "\n  do        run the command on a login node of the cluster, where `scontrol ping` answers;" in ran.stderr


def test_ctrl_c_stops_following_and_not_the_job(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(600)\n")
    following = slurm.start(sys.executable, "-m", "rankwise", "submit", "wait.py", cwd=tmp_path)
    assert following.stdout is not None
    assert "RUNNING" in next(line for line in following.stdout if "PENDING" not in line)
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=30)
    job_id = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    slurm.run("scancel", job_id)
    slurm.await_job(job_id, lambda job: job["JobState"] == "CANCELLED")
    assert following.returncode == 130
    assert f"job {job_id} continues; to cancel it: scancel {job_id}" in errors
