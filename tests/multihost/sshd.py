# SPDX-License-Identifier: Apache-2.0
"""A real sshd on some of the hosts, with keys and settings of its own; nothing of the machine's is read or changed.

The last host has none: it stands for the laptop that commands are typed on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from hosts import Hosts, HostsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.warm import Started

PORT = 2222
PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
PRIVILEGE_FOLDER = Path("/run/sshd")
"""Where sshd locks in what has not logged in yet. Debian makes it when the service starts."""
MARK = "RANKWISE_TEST_RUN"
SERVER = """
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv {mark}={run}
"""
CLIENT = """
Host *
  Port {port}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
"""


class SshHosts:
    """Hosts that ssh leads to, and one to type on."""

    def __init__(self, number: int, folder: Path) -> None:
        self.hosts = Hosts(number + 1)
        self.config = folder / "ssh_config"
        self._number = number
        self._folder = folder
        self._made = ExitStack()

    def __enter__(self) -> Self:
        missing = [f"{name} (Debian's {package})" for name, package in PACKAGES.items() if not _which(name)]
        if missing:
            raise HostsError(f"ssh cannot be tested here. Missing: {', '.join(missing)}.")
        PRIVILEGE_FOLDER.mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / name], check=True)
        names = zip(self.hosts.hostnames, self.hosts.addresses, strict=True)
        known = "".join(f"Host {name}\n  HostName {address}\n" for name, address in names)
        own = CLIENT.format(port=PORT, folder=self._folder)
        self.config.write_text(known + own, encoding="utf-8")
        self._made.enter_context(self.hosts)
        try:
            for index in range(self._number):
                self._serve(index)
        except BaseException:
            self._made.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def run(
        self, *words: str, cwd: Path, stdout: IO[str] | int, stderr: IO[str], env: Mapping[str, str] | None = None
    ) -> Started:
        """Start ``rankwise run`` on the laptop, as the process that is returned."""
        become = ["env", "-C", str(cwd), "-u", "PWD"]
        command = [sys.executable, "-m", "rankwise", "run", "--ssh", f"ssh -F {self.config}", *words]
        return self.hosts.start(
            self._number, [*become, *command], {"OMP_NUM_THREADS": "1", **(env or {})}, stdout=stdout, stderr=stderr
        )

    def _serve(self, index: int) -> None:
        config = self._folder / f"sshd_config.{index}"
        address = self.hosts.addresses[index]
        text = SERVER.format(address=address, port=PORT, folder=self._folder, mark=MARK, run=os.environ[MARK])
        config.write_text(text, encoding="utf-8")
        sshd = self.hosts.start(index, [str(_which("sshd")), "-D", "-e", "-f", str(config)], stderr=subprocess.PIPE)
        said = ""
        for line in sshd.stderr or ():
            said += line
            if line.startswith("Server listening"):
                return
        raise HostsError(f"sshd has ended: {said}")


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
