# SPDX-License-Identifier: Apache-2.0
"""``rankwise report``: what a run has recorded, as a page; ``rankwise show``: checkpoints and meshes as pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.arguments import Command
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse

    from rankwise.insight.page import Page


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="DIR", help="the folder that --report was given")
    parser.add_argument("-o", dest="output", metavar="FILE", help="the page (default: DIR/report.html)")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="DIR", help="folders of other runs, to show side by side"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="also write a timeline of all ranks, for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--with",
        dest="profiles",
        nargs="+",
        default=[],
        metavar="FILE",
        help="traces of torch's profiler, one per rank, to show in the timeline",
    )
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the page (default: en)")


def _run_report(options: argparse.Namespace) -> int:
    """Write the page, print what matters most of it, and return the exit code."""
    # Imported here: they cost import time that only this command should pay.
    from rankwise.insight.page import page_of  # noqa: PLC0415
    from rankwise.insight.run_records import read_run  # noqa: PLC0415
    from rankwise.insight.trace_events import timeline_of  # noqa: PLC0415

    if options.profiles and not options.trace:
        raise ConfigurationError("--with is for a timeline.", do="pass --trace FILE too")
    folder = Path(options.folder)
    page = Path(options.output) if options.output else folder / "report.html"
    if options.trace and Path(options.trace).absolute() == page.absolute():
        raise ConfigurationError(f"{page} would be the report and its timeline.", do="pass another file to --trace")
    others = [Path(name) for name in options.compare]
    for one in (folder, *others):
        if not one.is_dir():
            state = "is not a folder" if one.exists() else "does not exist"
            raise ConfigurationError(f"{one} {state}.", do=f"record a run first: rankwise run --report {one} train.py")
    run = read_run(folder)
    written = page_of(run, options.language, [read_run(one) for one in others])
    write_page(page, written.html)
    if options.trace:
        write_page(Path(options.trace), timeline_of(run.ranks, [Path(name) for name in options.profiles]))
    sys.stdout.write(f"{written.headline}\n\n{written.text}\n{page}\n")
    sys.stdout.write(f"{options.trace}\n" if options.trace else "")
    return 0


def write_page(path: Path, text: str) -> None:
    """Write a page; raise ConfigurationError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.", do="choose another file") from error


REPORT = Command(
    name="report",
    help="write a page about a run, and print its key numbers: where its time went, and what to change",
    description="""\
Write a page about a run that was started with `rankwise run --report DIR`, or recorded by
`rankwise.join(report=DIR)`: where the time of a step goes, which rank the others wait for and why, what to change.

The run may still be running, or may have failed.""",
    epilog="""\
examples:
  rankwise run -n 4 --report runs/a train.py    record a run
  rankwise report runs/a                        write runs/a/report.html
  rankwise report runs/a -o a.html --language zh
  rankwise report runs/4 --compare runs/1 runs/2
                                                how much faster with more ranks, or after a change
  rankwise report runs/a --trace a.json         open a.json at https://ui.perfetto.dev
  rankwise report runs/a --trace a.json --with profiler/*.json""",
    add_options=_add_report_options,
    execute=_run_report,
)


def _add_show_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("what", metavar="DIR | AXIS=N,...", help="a checkpoint, the folder of a report, or axes")
    parser.add_argument("-o", dest="output", metavar="FILE", default="show.html", help="the page (default: show.html)")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="of a mesh: which ranks share a host (default: all)"
    )
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the page (default: en)")


def _run_show(options: argparse.Namespace) -> int:
    """Write the page, print its tables, and return the exit code."""
    page = _page(options)
    output = Path(options.output)
    write_page(output, page.html)
    sys.stdout.write(f"{page.headline}\n\n{page.text}\n{output}\n")
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
            f"{options.what!r} is not a checkpoint, a folder of a report or a mesh such as dp_shard=4,tp=2.",
            do="pass one of them",
        )
    return page_of_mesh(options.what, options.ranks_per_host, options.language)


SHOW = Command(
    name="show",
    help="show a checkpoint, a mesh or the layouts of a run as tables and pictures",
    description="""\
Print tables, and write a page with pictures: what a checkpoint contains and which file holds it; how ranks are laid out
along the axes of a mesh; or the layouts of a run with --report: its mesh, the devices of its model, a step of its
pipeline.""",
    epilog="""\
examples:
  rankwise show runs/net                            what is in the newest checkpoint of rw.Checkpointer("runs/net")
  rankwise show runs/net/checkpoint-000010          what is in this one
  rankwise show runs/a                              the layouts of a run
  rankwise show dp_shard=4,tp=2 --ranks-per-host 4  a mesh, before a run""",
    add_options=_add_show_options,
    execute=_run_show,
)
