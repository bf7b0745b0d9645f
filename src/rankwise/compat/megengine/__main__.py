# SPDX-License-Identifier: Apache-2.0
"""``python -m rankwise.compat.megengine train.py``: runs a MegEngine script as Python would, on rankwise."""

from __future__ import annotations

import argparse
import sys

from rankwise.compat.megengine.alias import provide
from rankwise.errors import RankwiseError
from rankwise.launch.fork_server.entrypoint import Target, find_target, run_as_main

USAGE_ERROR = 2

DESCRIPTION = """\
Run a MegEngine script as `python train.py arguments` would, with `import megengine` giving rankwise's.

Below any launcher:
  rankwise run -n 4 -m rankwise.compat.megengine train.py
  mpirun -n 4 python -m rankwise.compat.megengine train.py"""


def _target(argv: list[str]) -> Target:
    parser = argparse.ArgumentParser(
        prog="python -m rankwise.compat.megengine",
        usage="python -m rankwise.compat.megengine train.py [arguments]\n"
        "       python -m rankwise.compat.megengine -m module [arguments]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="train.py | module", help="what to run")
    options = parser.parse_args(argv)
    name, *arguments = options.command
    return find_target(name, arguments, is_module=options.module)


def main() -> None:
    """Run the script or module that the arguments name; its exceptions are not caught."""
    try:
        provide()
        target = _target(sys.argv[1:])
    except RankwiseError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(USAGE_ERROR)
    run_as_main(target)


if __name__ == "__main__":
    main()
