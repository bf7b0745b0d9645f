# SPDX-License-Identifier: Apache-2.0
"""Write the records of a run of 8 ranks and 10,000 steps that never was, and its report: ``sample_report.py FOLDER``.

Also a page of a mesh and one of a checkpoint, as ``rankwise show`` makes them. ``check_report.py`` looks at the pages
in a browser. Numbers that the report must show are in ``numbers.json`` beside it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch

import rankwise
from rankwise.insight.checkpoint_contents import page_of_checkpoint
from rankwise.insight.layouts import page_of_mesh
from rankwise.insight.network import Traffic, as_json
from rankwise.insight.page import page_of
from rankwise.insight.run_records import read_run
from rankwise.insight.step_record import RecordFile, Step, row_of
from rankwise.insight.step_table import table_of
from rankwise.meter import DATA, EXCHANGE, PARTS, record_path

NUM_RANKS = 8
RANKS_PER_HOST = 4
NUM_STEPS = 10_000
SLOW = 3
PART_SECONDS = (0.0005, 0.001, 0.004, 0.008, 0.0, 0.001, 0.0, 0.0)
TRANSFER_SECONDS = 0.0005


def write_records(folder: Path) -> None:
    """Write the records of all ranks, of which one waits for its data."""
    draw = random.Random(0)  # noqa: S311 - no secrets
    records = [RecordFile(str(record_path(folder, "sample", 0, rank)), _facts(rank)) for rank in range(NUM_RANKS)]
    now = 100.0
    for number in range(1, NUM_STEPS + 1):
        own = [[seconds * draw.uniform(0.95, 1.05) for seconds in PART_SECONDS] for _ in records]
        own[SLOW][DATA] += 0.004
        arrivals = [sum(parts) for parts in own]
        end = max(arrivals) + TRANSFER_SECONDS
        for record, parts, arrival in zip(records, own, arrivals, strict=True):
            working = sum(parts)
            parts[EXCHANGE] = end - arrival
            step = Step(
                number=number,
                start=now,
                parts=tuple(parts),
                arrival=arrival,
                late_exchange=0.0,
                processor=working,
                queued=0.0,
                samples=32,
                sent_bytes=10**6,
                memory_bytes=2**30,
                major_faults=0,
            )
            record.add(row_of(step))
        now += end
    for start in range(1, NUM_STEPS, 100):
        steps = list(range(start, start + 100))
        values = [round(2.0 / step**0.3, 6) for step in steps]
        records[0].note({"kind": "values", "name": "loss", "steps": steps, "values": values})
    for layout in _layouts():
        records[0].note({"kind": "layout", **layout})
    records[0].note({"kind": "event", "time": time.time(), "text": "checkpoint saved in runs/net"})
    for rank, record in enumerate(records):
        if rank % RANKS_PER_HOST == RANKS_PER_HOST - 1:
            for steps in (1, NUM_STEPS):
                record.note({"kind": "network", "steps": steps, "traffic": [as_json(_traffic(rank, steps))]})
        record.close()


def _traffic(rank: int, num_steps: int) -> Traffic:
    """Return what the last rank of a host has sent to the first one of the next."""
    host = rank // RANKS_PER_HOST
    return Traffic(
        local=f"10.0.0.{host}",
        remote=f"10.0.0.{1 - host}",
        sent_bytes=10**6 * num_steps,
        busy_seconds=0.001 * num_steps,
        segments=700 * num_steps,
        retransmitted=0,
        round_trip_seconds=0.0002,
        least_round_trip_seconds=0.0001,
        bytes_per_second=1e9,
    )


def _facts(rank: int) -> dict[str, object]:
    host = {
        "hostname": f"node-{rank // RANKS_PER_HOST}",
        "device": "cpu",
        "backend": "gloo",
        "source": "rankwise",
        "times": "host",
        "threads": 1,
    }
    versions = {"cores": 8, "python": "3.11", "torch": "2.13.0", "rankwise": "0.0.0", "script": "train.py"}
    job = {"job": "sample", "attempt": 0, "pid": 100 + rank, "started": time.time(), "monotonic": 0.0}
    return {
        "rank": rank,
        "world_size": NUM_RANKS,
        "node_rank": rank // RANKS_PER_HOST,
        "num_nodes": 2,
        **host,
        **versions,
        **job,
    }


def _layouts() -> list[dict[str, object]]:
    """Return a mesh, a model on two devices, and a step of a pipeline of 2 stages and 4 micro-batches."""
    parts = [(f"layers.{number}", f"cuda:{number // 2}", 2**20 * (number + 1), "cuda", "given") for number in range(4)]
    spans = [
        (rank, kind, rank, micro_batch, 0.01 * (3 * micro_batch + rank + at), 0.01 * (3 * micro_batch + rank + at + 1))
        for rank in range(2)
        for micro_batch in range(4)
        for at, kind in enumerate(("forward", "backward of inputs", "backward of weights"))
    ]
    return [
        {"what": "mesh", "axes": {"pp": 2, "dp_shard": 2, "tp": 2}},
        {"what": "placement", "parts": parts},
        {"what": "schedule", "title": "1f1b: 2 stages on 2 ranks, 4 micro-batches", "spans": spans},
    ]


def write_shown(folder: Path) -> None:
    """Write the pages of a mesh and of a checkpoint."""
    (folder / "mesh.html").write_text(page_of_mesh("dp_shard=4,tp=2", 4, "en").html, encoding="utf-8")
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100), torch.nn.Linear(100, 10))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 300)).sum().backward()
    optimizer.step()
    saved = folder / "saved"
    with rankwise.join(report="off"):
        rankwise.save(saved, model=model, optimizer=optimizer)
    (folder / "checkpoint.html").write_text(page_of_checkpoint(saved, "en").html, encoding="utf-8")


def main(folder: Path) -> None:
    """Write records, pages and numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder)
    write_shown(folder)
    run = read_run(folder)
    for language in ("en", "zh"):
        (folder / f"report.{language}.html").write_text(page_of(run, language).html, encoding="utf-8")
    steady = table_of(run.ranks).steady()
    means = {name: steady.parts[:, :, part].mean(axis=1).tolist() for part, name in enumerate(PARTS)}
    means["waiting"] = steady.waiting.mean(axis=1).tolist()
    (folder / "numbers.json").write_text(json.dumps({"slow": SLOW, "num_steps": NUM_STEPS, "means": means}))


main(Path(sys.argv[1]).resolve())
