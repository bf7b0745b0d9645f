# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint as a page: its files by object, its largest tensors, and every tensor in a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.charts import NUM_KEYS, Bar, memory, stacked_bars
from rankwise.checkpoint.load import read_manifest
from rankwise.insight import words
from rankwise.insight.html import TITLES, Page, Section, shown, tabled

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.checkpoint.manifest import Manifest, TensorEntry
    from rankwise.insight.html import Language

LARGEST = 20
"""How many tensors the picture shows."""
MOST_ROWS = 2000
SUFFIX = ".safetensors"
_LABEL_CHARACTERS = 24
"""Of a name that fits next to a bar."""


def page_of_checkpoint(folder: Path, language: Language) -> Page:
    """Return the page about a checkpoint.

    Raises:
        CheckpointError: the folder is no complete checkpoint.
    """
    saved = read_manifest(folder)
    whole = sum(one.size_bytes for one in saved.files.values())
    headline = words.checkpoint_headline(
        num_objects=len(saved.objects),
        num_tensors=len(saved.tensors),
        num_files=len(saved.files),
        world_size=saved.world_size,
        size=memory(whole),
        language=language,
    )
    sections = [_files(saved, language), *_tensors(saved, language)]
    versions = f"rankwise {saved.rankwise_version}, torch {saved.torch_version}"
    return shown(str(folder), versions, headline, sections, language)


def _label(name: str) -> str:
    return name if len(name) <= _LABEL_CHARACTERS else f"…{name[1 - _LABEL_CHARACTERS :]}"


def _bytes_of(entry: TensorEntry) -> int:
    dtype = getattr(torch, entry.dtype)
    return math.prod(entry.shape) * dtype.itemsize


def _object_of(name: str, objects: list[str]) -> str:
    """Return the object that a tensor belongs to: names begin with that of their object."""
    return max((one for one in objects if name == one or name.startswith(f"{one}.")), key=len, default=objects[0])


def _files(saved: Manifest, language: Language) -> Section:
    titles = TITLES[language]
    objects = list(saved.objects)
    held: dict[str, dict[str, float]] = {name: dict.fromkeys(objects, 0.0) for name in saved.files}
    for name, entry in saved.tensors.items():
        for part in entry.parts:
            share = part.region.num_elements / max(math.prod(entry.shape), 1)
            held[part.file][_object_of(name, objects)] += _bytes_of(entry) * share
    styles = {name: f"key{number % NUM_KEYS}" for number, name in enumerate(objects)}
    bars = [
        Bar(label=_label(name.removesuffix(SUFFIX)), parts=tuple((styles[one], size) for one, size in sizes.items()))
        for name, sizes in held.items()
    ]
    rows = tuple(
        (name, memory(saved.files[name].size_bytes), *(memory(size) for size in sizes.values()))
        for name, sizes in held.items()
    )
    return tabled(
        "files",
        titles["files"],
        (titles["file"], titles["bytes"], *objects),
        rows,
        chart=stacked_bars(bars, titles["files"], lambda _, length: memory(length)) if bars else None,
        legend=tuple({"style": styles[name], "name": f"{name}: {saved.objects[name].kind}"} for name in objects),
    )


def _tensors(saved: Manifest, language: Language) -> list[Section]:
    titles = TITLES[language]
    ordered = sorted(saved.tensors.items(), key=lambda item: (-_bytes_of(item[1]), item[0]))
    if not ordered:
        return []
    bars = [Bar(label=_label(name), parts=(("forward", float(_bytes_of(entry))),)) for name, entry in ordered[:LARGEST]]
    rows = tuple(
        (name, entry.dtype, str(list(entry.shape)), memory(_bytes_of(entry)), _where(entry))
        for name, entry in ordered[:MOST_ROWS]
    )
    left_out = len(ordered) - len(rows)
    return [
        tabled(
            "tensors",
            titles["tensors"],
            (titles["tensor"], "dtype", titles["shape"], titles["bytes"], titles["file"]),
            rows,
            note=titles["more tensors"].format(left_out) if left_out else "",
            chart=stacked_bars(bars, titles["tensors"], lambda _, length: memory(length)),
        )
    ]


def _where(entry: TensorEntry) -> str:
    files = list(dict.fromkeys(part.file for part in entry.parts))
    return ", ".join(files[:3]) + (f" + {len(files) - 3}" if len(files) > 3 else "")  # noqa: PLR2004 - a table's cell
