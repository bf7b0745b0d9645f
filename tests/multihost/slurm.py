# SPDX-License-Identifier: Apache-2.0
"""A real Slurm over hosts that are network namespaces: its controller on the first, a node on each.

Partitions: ``main``, and ``high``, whose jobs preempt those of ``main`` and have them requeued. Own ports, own munge,
own folder; nothing is left. Commands run on the first host, as on a login node.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hosts import Hosts, HostsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.warm import Started

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
}
"""What the rig calls, and the Debian package it is in."""
START_SECONDS = 30.0
JOB_SECONDS = 90.0
"""How long a job may take to come to what a test waits for."""
KILL_WAIT_SECONDS = 5
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait_seconds}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=200000
NodeName={names} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    exit_code: int
    stdout: str
    stderr: str


class Slurm:
    """A cluster for as long as the block lasts.

    Args:
        num_nodes: how many hosts, each a node with four CPUs.
    """

    def __init__(self, num_nodes: int) -> None:
        self.hosts = Hosts(num_nodes)
        self.folder = Path()
        self._made = ExitStack()

    def __enter__(self) -> Self:
        _check_machine()
        try:
            self.folder = Path(self._made.enter_context(tempfile.TemporaryDirectory(prefix="rankwise-slurm-")))
            self._made.enter_context(self.hosts)
            self._configure()
            self._serve(0, "munged", *_munge_options(self.folder))
            self._await("munge", (self.folder / "munge.socket").exists)
            self._serve(0, "slurmctld", "-D", "-i", "-c")
            for index, name in enumerate(self.hosts.hostnames):
                self._serve(index, "slurmd", "-D", "-N", name)
            self._await("idle nodes", self._is_idle)
        except BaseException:
            self._made.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def start(self, *argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> Started:
        """Start a command on the first host, in a folder, with its output in pipes."""
        argv = ("env", "-C", str(cwd), *argv)
        variables = {**self._variables(), **(env or {})}
        return self.hosts.start(0, argv, variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(
        self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_seconds: float = 80.0
    ) -> Ran:
        """Run a command on the first host to its end."""
        process = self.start(*argv, cwd=cwd or self.folder, env=env)
        stdout, stderr = process.communicate(timeout=timeout_seconds)
        return Ran(process.returncode, stdout, stderr)

    def job(self, job_id: str) -> dict[str, str]:
        """Return what the controller tells of a job: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        words = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_job(
        self, job_id: str, has_come: Callable[[dict[str, str]], bool], seconds: float = JOB_SECONDS
    ) -> dict[str, str]:
        """Return what the controller tells of a job once it is so."""
        found: dict[str, str] = {}

        def look() -> bool:
            found.update(self.job(job_id))
            return has_come(found)

        self._await(f"job {job_id}", look, seconds)
        return found

    def await_file(self, path: Path) -> None:
        """Return once a file is there that a job writes."""
        self._await(str(path), path.exists, JOB_SECONDS)

    def skip_begin_time(self, job_id: str) -> None:
        """Let a job that has been requeued start soon: Slurm has it wait two minutes."""
        self.await_job(job_id, lambda job: job["JobState"] == "PENDING")
        # Not at once: nodes take no new start within the second in which they heard of the old one's end.
        self.run("scontrol", "update", f"jobid={job_id}", "StartTime=now+2")

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        for name in self.hosts.hostnames:
            (self.folder / f"spool.{name}").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        # munge refuses a socket that not everybody can reach.
        self.folder.chmod(0o711)
        text = CONFIGURATION.format(
            folder=self.folder,
            controller=f"{self.hosts.hostnames[0]}({self.hosts.addresses[0]})",
            names=",".join(self.hosts.hostnames),
            kill_wait_seconds=KILL_WAIT_SECONDS,
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        # No cgroup is used, but slurmd needs a plugin that it can load.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")

    def _serve(self, host_index: int, *argv: str) -> None:
        with (self.folder / f"{argv[0]}.{host_index}.err").open("w") as errors:
            self.hosts.start(host_index, argv, self._variables(), stdout=errors, stderr=errors)

    def _variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def _is_idle(self) -> bool:
        found = self.run("sinfo", "-hN", "-p", "main", "-t", "idle")
        return len(found.stdout.splitlines()) == self.hosts.number

    def _await(self, what: str, has_come: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not has_come():
            if time.monotonic() > deadline:
                said = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.err")]
                said += [f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log")]
                raise HostsError(f"Slurm: {what} did not come within {seconds:.0f} s.\n" + "\n".join(said))
            time.sleep(0.02)


def _munge_options(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
    return [*options, "--num-threads=2", "--force", "--foreground"]


def _check_machine() -> None:
    """Name what this machine lacks, all at once."""
    missing = [f"{name} (Debian's {package})" for name, package in PACKAGES.items() if not shutil.which(name)]
    if missing:
        raise HostsError("The Slurm of tests/multihost cannot be made. Missing: " + ", ".join(missing) + ".")
