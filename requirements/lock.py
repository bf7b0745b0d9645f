# SPDX-License-Identifier: Apache-2.0
"""Write dev.lock: install dev.in into an empty environment and list what came."""

from __future__ import annotations

import subprocess
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
HEAD = "# Pins of everything dev.in pulls in. Written by `make lock`; do not edit.\n"
# They come with the environment, or by a tool that is in nobody's requirements.
LEFT_OUT = {"pip", "wheel"}


def main() -> None:
    """Write dev.lock beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "-r", str(HERE / "dev.in")], check=True)
        listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, stdout=subprocess.PIPE, text=True).stdout
    # A local label such as +cpu names one index's build: the plain version is found on every index.
    pins = [line.split("+")[0] for line in listed.split() if line.split("==")[0] not in LEFT_OUT]
    (HERE / "dev.lock").write_text(HEAD + "\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
