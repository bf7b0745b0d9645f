# SPDX-License-Identifier: Apache-2.0
"""``python -m rankwise.auto [-m] train.py ...``: the same as ``rankwise run --auto``, under another launcher."""

from __future__ import annotations

import sys

from rankwise.auto.script import AutoScript
from rankwise.errors import ConfigurationError
from rankwise.launch.fork_server.entrypoint import find_target


def main() -> None:
    """Run the script named by the arguments on rank zero, and serve on the other ranks."""
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    name, *arguments = words[is_module:] or [""]
    if not name:
        raise ConfigurationError(
            "A script is missing.", do="pass it and its arguments: python -m rankwise.auto train.py --epochs 3"
        )
    AutoScript(find_target(name, arguments, is_module=is_module)).run()


if __name__ == "__main__":
    main()
