# SPDX-License-Identifier: Apache-2.0
"""``python -m rankwise.compat.horovod train.py``: runs a Horovod script as Python would, on rankwise."""

from __future__ import annotations

import argparse
import sys

from rankwise.compat.horovod.alias import ON_PATH, provide
from rankwise.errors import RankwiseError
from rankwise.launch.fork_server.entrypoint import RankCommand, Target, find_command, find_target, run_as_main
from rankwise.world.environments.process import set_horovod_variables

USAGE_ERROR = 2

DESCRIPTION = """\
Run a Horovod script as `python train.py arguments` would, with `import horovod.torch` giving rankwise's.

Below any launcher:
  rankwise run -n 4 -m rankwise.compat.horovod train.py
  mpirun -n 4 python -m rankwise.compat.horovod train.py
  rankwise run -n 4 -m rankwise.compat.horovod --no-python bash train.sh"""


def _target(argv: list[str]) -> Target | RankCommand:
    parser = argparse.ArgumentParser(
        prog="python -m rankwise.compat.horovod",
        usage="python -m rankwise.compat.horovod train.py [arguments]\n"
        "       python -m rankwise.compat.horovod -m module [arguments]\n"
        "       python -m rankwise.compat.horovod --no-python command [arguments]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", dest="module", action="store_true", help="run a module")
    kind.add_argument(
        "--no-python",
        dest="no_python",
        action="store_true",
        help="the rest is a command, which replaces this process; Python programs that it starts find horovod too",
    )
    parser.add_argument("command", nargs=argparse.PARSER, metavar="train.py | module | command", help="what to run")
    parser.add_argument(
        "--timeline-filename", dest="timeline", metavar="FILE", help="write a timeline of all ranks: HOROVOD_TIMELINE"
    )
    options = parser.parse_args(argv)
    set_horovod_variables(options.timeline)
    name, *arguments = options.command
    if options.no_python:
        return find_command(name, arguments)
    return find_target(name, arguments, is_module=options.module)


def main() -> None:
    """Run the script, module or command that the arguments name; its exceptions are not caught."""
    try:
        provide()
        target = _target(sys.argv[1:])
    except RankwiseError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(USAGE_ERROR)
    if isinstance(target, RankCommand):
        target.replace_this_process([ON_PATH])
    else:
        run_as_main(target)


if __name__ == "__main__":
    main()
