# SPDX-License-Identifier: Apache-2.0
"""Write NAME.lock for each NAME.in, or for those named: install it into an empty environment and list what came."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("demo", "dev", "docs", "frameworks", "peers", "release")
# They come with the environment, or by a tool that is in nobody's requirements.
LEFT_OUT = {"pip", "wheel"}


def lock(name: str) -> None:
    """Write one lock beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "-r", str(HERE / f"{name}.in")], check=True)
        listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, stdout=subprocess.PIPE, text=True).stdout
    # A local label such as +cpu names one index's build: the plain version is found on every index.
    pins = [line.split("+")[0] for line in listed.split() if line.split("==")[0] not in LEFT_OUT]
    head = f"# Pins of everything {name}.in pulls in. Written by `make lock`; do not edit.\n"
    (HERE / f"{name}.lock").write_text(head + "\n".join(pins) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        lock(name)
