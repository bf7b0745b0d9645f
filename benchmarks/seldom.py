# SPDX-License-Identifier: Apache-2.0
"""Ways of training over slow networks, against a hand-written DDP: bytes, time to an accuracy, a slow worker, growth.

`python benchmarks/seldom.py` prints all tables, `python benchmarks/seldom.py time` one of them: bytes, time, slow,
growth. What trains is a perceptron of 1.1 million parameters on scikit-learn's digits, with Adam, from the same start
in the same order. The hosts are network namespaces of this machine, one rank of one thread each. With a parameter
server the last rank is the server, and the others train. Needs root and iproute2.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Row, machine, median_ratio, seconds, show
from seldom_rank import EVERY, MAX_STALENESS, SLOWED, Ran, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RANKS = 4
ACCURACY = 0.95
MOST_STEPS = 300
NETWORKS: dict[str, dict[str, float]] = {
    "no limit": {},
    "1 Gbit/s": {"mbit": 1000},
    "100 Mbit/s, 20 ms": {"mbit": 100, "delay_seconds": 0.02},
}
SEEDS = {"no limit": (0, 1, 2), "1 Gbit/s": (0, 1, 2), "100 Mbit/s, 20 ms": (0,)}
"""Where the network decides how long a step takes, one run is like the next, and long."""
WORDS = {
    "DDP": "DDP",
    "replicate": "replicate",
    "bf16": "compress='bf16'",
    "int8": "compress='int8'",
    "powersgd": "compress='powersgd'",
    "top-k": "compress='top-k'",
    "local_sgd": f"local_sgd, every {EVERY}",
    "diloco": f"local_sgd, DiLoCo, every {EVERY}",
    "server, sync": "parameter_server, sync",
    "server, async": "parameter_server, async",
    "server, stale": f"parameter_server, async, max_staleness={MAX_STALENESS}",
}
TIMED = ("DDP", "replicate", "bf16", "powersgd", "diloco", "server, sync", "server, async", "server, stale")
REACHES = {
    ("replicate", "no limit"): 1.05,
    ("replicate", "1 Gbit/s"): 1.05,
    ("replicate", "100 Mbit/s, 20 ms"): 1.05,
    ("bf16", "100 Mbit/s, 20 ms"): 1.0,
    ("diloco", "100 Mbit/s, 20 ms"): 0.5,
}
"""The ratios of times to DDP's to stay below, where a way is meant for such a network."""
BYTES_REACHES = {
    "replicate": 1.05,
    "bf16": 0.55,
    "int8": 0.3,
    "powersgd": 0.1,
    "top-k": 0.1,
    "local_sgd": 1.05 / EVERY,
    "diloco": 1.05 / EVERY,
}
NUM_COUNTED_STEPS = 2 * EVERY
SERVED = ("server, sync", "server, async", "server, stale")
SLOWED_WAYS = ("DDP", "replicate", *SERVED)
SLOW_BATCH_SIZE = 384
SLOW_SGD_RATE = 0.3
SLOW_RANK = 1
SLOW_REACH = 1.0
NUM_WORKERS = (1, 2, 4)
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def ran_on_hosts(runs: Sequence[Run], num_hosts: int, network: dict[str, float]) -> list[list[Ran | None]]:
    """Return how each run went on each rank: [run][rank]."""
    # The hosts that the tests use, too.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multihost"))
    from hosts import Hosts  # noqa: PLC0415 - found just now

    with tempfile.TemporaryDirectory(prefix="seldom-") as folder:
        marked = [asdict(replace(run, mark=str(Path(folder) / str(number)))) for number, run in enumerate(runs)]
        script = Path(__file__).with_name("seldom_rank.py")
        with Hosts(num_hosts, **network) as hosts:
            all_ended = hosts.run_ranks(script, 1, json.dumps(marked), timeout_seconds=1200)
    for rank, ended in enumerate(all_ended):
        if ended.exit_code:
            raise SystemExit(f"rank {rank} ended with exit code {ended.exit_code}:\n{ended.stderr}")
    by_rank: list[list[dict[str, Any] | None]] = [
        json.loads(ended.stdout.strip().splitlines()[-1]) for ended in all_ended
    ]
    return [[one and Ran(**one) for one in of_run] for of_run in zip(*by_rank, strict=True)]


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


def bytes_table() -> list[Row]:
    """Return the rows of what the network cards send in a step."""
    names = list(WORDS)
    runs = [Run(way=name, num_steps=NUM_COUNTED_STEPS) for name in names]
    found = dict(zip(names, ran_on_hosts(runs, NUM_RANKS, {}), strict=True))

    def sent(name: str, rank: int) -> float:
        ran = found[name][rank]
        return ran.sent_bytes / NUM_COUNTED_STEPS if ran else 0.0

    def row(name: str, who: str, num_bytes: float) -> Row:
        ddp = sent("DDP", 0)
        what = f"sent per step by {who}, {WORDS[name]}, {NUM_RANKS} hosts"
        return Row(what, mebibytes(num_bytes), mebibytes(ddp), num_bytes / ddp, BYTES_REACHES.get(name, math.inf))

    rows = []
    for name in names[1:]:
        if name in SERVED:
            rows += [row(name, "a worker", sent(name, 0)), row(name, "the server", sent(name, NUM_RANKS - 1))]
        else:
            rows.append(row(name, "a rank", max(sent(name, rank) for rank in range(NUM_RANKS))))
    return rows


def timed(names: Sequence[str], run: Run, network: str) -> dict[str, list[Ran]]:
    """Return how each way went on rank zero, seed by seed, the order of the ways turning."""
    seeds = SEEDS[network]
    orders = [list(names) if number % 2 == 0 else list(names)[::-1] for number in range(len(seeds))]
    # What is loaded when a way first runs is no part of it.
    runs = [replace(run, way=name, num_steps=2, accuracy=None) for name in names]
    runs += [replace(run, way=name, seed=seed) for seed, order in zip(seeds, orders, strict=True) for name in order]
    found: dict[str, list[Ran]] = {name: [] for name in names}
    for asked, (first, *_) in zip(runs, ran_on_hosts(runs, NUM_RANKS, NETWORKS[network]), strict=True):
        if asked.accuracy is not None and first is not None:
            found[asked.way].append(first)
    return found


def time_rows(found: dict[str, list[Ran]], peer: str, what: str, reaches: dict[str, float]) -> list[Row]:
    """Return a row for each way but the peer; one that did not arrive is a row without a ratio."""

    def cell(name: str) -> str:
        missed = sum(not ran.is_reached for ran in found[name])
        taken, steps = (statistics.median(getattr(ran, of) for ran in found[name]) for of in ("seconds", "num_steps"))
        least = f", not reached in {missed} of {len(found[name])}" if missed else ""
        return f"{seconds(taken)} in {steps:.0f} steps{least}"

    def ratio(name: str) -> float:
        if not all(ran.is_reached for ran in [*found[name], *found[peer]]):
            return math.inf
        return median_ratio(*([ran.seconds for ran in found[of]] for of in (name, peer)))

    return [
        Row(
            f"time to {ACCURACY:.2f}, {WORDS[name]}, {what}",
            cell(name),
            cell(peer),
            ratio(name),
            reaches.get(name, math.inf),
        )
        for name in found
        if name != peer
    ]


def time_table() -> list[Row]:
    """Return the rows of the time to an accuracy, on each network."""
    run = Run(way="", num_steps=MOST_STEPS, accuracy=ACCURACY)
    rows = []
    for network in NETWORKS:
        reaches = {way: reach for (way, of), reach in REACHES.items() if of == network}
        rows += time_rows(timed(TIMED, run, network), "DDP", f"{NUM_RANKS} hosts, {network}", reaches)
    return rows


def slow_table() -> list[Row]:
    """Return the rows of the time to an accuracy with one slow rank: against DDP, and against a server that waits."""
    run = Run(
        way="",
        num_steps=MOST_STEPS,
        accuracy=ACCURACY,
        global_batch_size=SLOW_BATCH_SIZE,
        sgd_rate=SLOW_SGD_RATE,
        slowed=SLOW_RANK,
    )
    found = timed(SLOWED_WAYS, run, "no limit")
    rows = time_rows(found, "DDP", f"{NUM_RANKS} hosts, one rank {SLOWED:g} times slower", {})
    served = {name: found[name] for name in SERVED}
    what = f"one of {NUM_RANKS - 1} workers {SLOWED:g} times slower, against sync"
    return rows + time_rows(served, "server, sync", what, dict.fromkeys(SERVED, SLOW_REACH))


def growth_table() -> list[Row]:
    """Return the rows of what one card carries with more workers; draw them, unless only the rows are asked for."""
    servers = [Run(way="server, sync", num_steps=NUM_COUNTED_STEPS, num_ranks=1 + number) for number in NUM_WORKERS]
    rings = [Run(way="replicate", num_steps=NUM_COUNTED_STEPS, num_ranks=number) for number in NUM_WORKERS]
    found = ran_on_hosts([*servers, *rings], 1 + max(NUM_WORKERS), {})
    carried = {"server": [], "rank": []}
    for kind, of_kind in (("server", found[: len(servers)]), ("rank", found[len(servers) :])):
        for number, ran in zip(NUM_WORKERS, of_kind, strict=True):
            one = ran[number if kind == "server" else 0]
            both_ways = one.sent_bytes + one.received_bytes if one else 0
            carried[kind].append(both_ways / NUM_COUNTED_STEPS)
    if "--json" not in sys.argv:
        draw({"workers": list(NUM_WORKERS), "machine": machine(), **carried})
    rows = []
    for kind, words, first in (("server", "the server of", 0), ("rank", "one of", 1)):
        peer = carried[kind][first]
        for number, num_bytes in list(zip(NUM_WORKERS, carried[kind], strict=True))[first + 1 :]:
            what = f"sent and received per step by {words} {number} workers, against {NUM_WORKERS[first]}"
            rows.append(Row(what, mebibytes(num_bytes), mebibytes(peer), num_bytes / peer))
    return rows


def draw(figures: dict[str, Any]) -> None:
    """Write the figures of the growth and their picture into the documentation."""
    import matplotlib as mpl  # noqa: PLC0415 - slow, and rarely needed

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - see above

    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "bytes-by-workers.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    # The same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "rankwise", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
        for kind, label in (("server", "the parameter server"), ("rank", "one rank of replicate")):
            axes.plot(figures["workers"], [num_bytes / 2**20 for num_bytes in figures[kind]], marker="o", label=label)
        axes.set_xlabel("workers")
        axes.set_ylabel("MiB per step, sent and received")
        axes.set_xticks(figures["workers"])
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(IMAGES / "bytes-by-workers.svg", metadata={"Date": None})
        plt.close(figure)


TABLES: dict[str, Callable[[], list[Row]]] = {
    "bytes": bytes_table,
    "time": time_table,
    "slow": slow_table,
    "growth": growth_table,
}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked = [word for word in sys.argv[1:] if word != "--json"]
    unknown = [word for word in asked if word not in TABLES]
    if unknown:
        raise SystemExit(f"no table is named {', '.join(unknown)}; there are {', '.join(TABLES)}")
    if "--json" not in sys.argv:
        print(machine(), flush=True)
    show([row for name in asked or TABLES for row in TABLES[name]()])


if __name__ == "__main__":
    main()
