# SPDX-License-Identifier: Apache-2.0
"""``rankwise show``: a checkpoint, a mesh, or the layouts of a run, as pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.report import write_page
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse

    from rankwise.insight.page import Page

HELP = "show a checkpoint, a mesh or the layouts of a run as pictures"
DESCRIPTION = """\
Write a page with pictures: what a checkpoint contains and which file holds it; how ranks are laid out along the axes
of a mesh; or the layouts of a run with --report: its mesh, the devices of its model, a step of its pipeline."""
EPILOG = """\
examples:
  rankwise show runs/net                            what is in the newest checkpoint of rw.Checkpointer("runs/net")
  rankwise show runs/net/checkpoint-000010          what is in this one
  rankwise show runs/a                              the layouts of a run
  rankwise show dp_shard=4,tp=2 --ranks-per-host 4  a mesh, before a run"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("what", metavar="DIR | AXIS=N,...", help="a checkpoint, the folder of a report, or axes")
    parser.add_argument("-o", dest="output", metavar="FILE", default="show.html", help="the page (default: show.html)")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="of a mesh: which ranks share a host (default: all)"
    )
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the page (default: en)")


def execute(options: argparse.Namespace) -> int:
    """Write the page, print its first sentence, and return the exit code."""
    page = _page(options)
    output = Path(options.output)
    write_page(output, page.html)
    sys.stdout.write(f"{page.headline}\n{output}\n")
    return 0


def _page(options: argparse.Namespace) -> Page:
    # Imported here: they cost import time that only this command should pay.
    from rankwise.checkpoint.folder import find, list_numbered  # noqa: PLC0415
    from rankwise.checkpoint.manifest import MANIFEST_NAME  # noqa: PLC0415
    from rankwise.insight.checkpoint_contents import page_of_checkpoint  # noqa: PLC0415
    from rankwise.insight.layouts import page_of_layouts, page_of_mesh  # noqa: PLC0415
    from rankwise.insight.run_records import read_run  # noqa: PLC0415
    from rankwise.meter import SUFFIX  # noqa: PLC0415

    folder = find(Path(options.what))
    newest = next(iter(list_numbered(folder).values()), folder) if folder.is_dir() else folder
    if (newest / MANIFEST_NAME).is_file():
        return page_of_checkpoint(newest, options.language)
    if any(folder.glob(f"*{SUFFIX}")):
        return page_of_layouts(read_run(folder), options.language)
    if "=" not in options.what or folder.exists():
        raise ConfigurationError(
            f"{options.what} is no checkpoint, no folder of a report, and no axes of a mesh.",
            do="pass one of them, such as dp_shard=4,tp=2",
        )
    return page_of_mesh(options.what, options.ranks_per_host, options.language)
