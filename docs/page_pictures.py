# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of pages that have a shape to show into docs/images/, and in Chinese into docs/zh/images/.

``python docs/page_pictures.py`` does this. Sizes and times in them are in proportion, not measured. A test compares the
files with what is drawn here.
"""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

from rankwise.charts import (  # noqa: E402 - of this working tree, not an installed one
    Bar,
    Cell,
    Span,
    cells,
    picture_of,
    schedule_legend,
    schedule_rows,
    spans,
    stacked_bars,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.charts import Chart, Measured

FOLDERS = {"en": HERE / "images", "zh": HERE / "zh" / "images"}
FORWARD, BACKWARD = 1.0, 2.0
"""How long a micro-batch takes on a stage."""


def collectives() -> tuple[Chart, list[tuple[str, str]]]:
    """Three ranks, each with a number, and what calls return to each."""
    head = ("value", "all_reduce(value)", "broadcast(value, 0)", "all_gather(value)")
    rows = [("", [Cell("script", call.partition("(")[0], call) for call in head])]
    for rank in range(3):
        texts = (str(rank + 1), "6", "1", "[1, 2, 3]")
        styles = (f"key{rank}", "key4", "key0", "key4")
        rows.append((f"rank {rank}", [Cell(*pair, pair[1]) for pair in zip(styles, texts, strict=True)]))
    return cells(rows, "What each rank gets"), []


def memory_of_shards() -> tuple[Chart, list[tuple[str, str]]]:
    """Parameters, gradients and the two moments of Adam, as the number of ranks grows."""
    kinds = [("forward", "parameters", 1.0), ("backward", "gradients", 1.0), ("optimizer", "state of Adam", 2.0)]
    bars = [Bar(label="replicate", parts=tuple((style, size) for style, _, size in kinds))]
    for num_ranks in (2, 4, 8):
        parts = tuple((style, size / num_ranks) for style, _, size in kinds)
        bars.append(Bar(label=f"shard, {num_ranks} ranks", parts=parts))
    return stacked_bars(bars, "Memory of each rank", lambda style, _: style), [
        (style, name) for style, name, _ in kinds
    ]


def parts_of_layers() -> tuple[Chart, list[tuple[str, str]]]:
    """Two layers on four ranks: columns of the first, rows of the second."""
    rows = [
        (
            f"rank {rank}",
            [
                Cell(f"key{rank}", f"up: outputs {2 * rank}, {2 * rank + 1}", "up"),
                Cell(f"key{rank}", f"down: inputs {2 * rank}, {2 * rank + 1}", "down"),
            ],
        )
        for rank in range(4)
    ]
    return cells(rows, "Parts of two layers"), []


def step_of_a_pipeline() -> tuple[Chart, list[tuple[str, str]]]:
    """Three stages and four micro-batches: all forward, then all backward."""
    num_stages, num_micro_batches = 3, 4
    measured: list[Measured] = []
    turn = (num_stages + num_micro_batches - 1) * FORWARD
    for stage in range(num_stages):
        for number in range(num_micro_batches):
            start = (stage + number) * FORWARD
            measured.append((stage, "forward", stage, number, start, start + FORWARD))
            start = turn + (num_stages - 1 - stage + number) * BACKWARD
            measured.append((stage, "backward", stage, number, start, start + BACKWARD))
    return spans(schedule_rows(measured), "A step of a pipeline", lambda _: ""), schedule_legend(measured)


def exchanges_of_local_sgd() -> tuple[Chart, list[tuple[str, str]]]:
    """Eight steps: with an exchange over the slow network in each, and after every fourth."""
    rows: list[tuple[str, list[Span]]] = []
    for label, every in (("every step", 1), ("every=4", 4)):
        now, row = 0.0, list[Span]()
        for step in range(8):
            row.append(Span("forward", now, now + 1.0, str(step + 1), f"step {step + 1}"))
            now += 1.0
            if (step + 1) % every == 0:
                row.append(Span("exchange", now, now + 1.5, "", "exchange"))
                now += 1.5
        rows.append((label, row))
    legend = [("forward", "a step"), ("exchange", "slow network")]
    return spans(rows, "Exchanges over a slow network", lambda _: ""), legend


def memory_of_a_host() -> tuple[Chart, list[tuple[str, str]]]:
    """Four ranks of a host: a copy on each, or one copy and its undo record."""
    bars = [
        Bar(label="a copy per rank", parts=(("forward", 4.0), ("optimizer", 8.0))),
        Bar(label="one copy", parts=(("forward", 1.0), ("checkpoint", 1.0), ("optimizer", 2.0))),
    ]
    legend = [("forward", "parameters"), ("checkpoint", "record to undo"), ("optimizer", "state of AdamW")]
    return stacked_bars(bars, "Memory of a host with 4 ranks", lambda style, _: style), legend


def ranks_of_a_checkpoint() -> tuple[Chart, list[tuple[str, str]]]:
    """A tensor in the files of four ranks, and the parts that other numbers of ranks read."""
    rows = [
        (
            label,
            [
                Span(f"key{rank}", 12 / num_ranks * rank, 12 / num_ranks * (rank + 1), f"rank {rank}", label)
                for rank in range(num_ranks)
            ],
        )
        for label, num_ranks in (("saved on 4", 4), ("loaded on 2", 2), ("loaded on 3", 3))
    ]
    return spans(rows, "Rows of a tensor", lambda _: ""), []


def layers_on_devices() -> tuple[Chart, list[tuple[str, str]]]:
    """Layers that fill one device after the other."""
    sizes = {"cuda:0": (4, 4, 4), "cuda:1": (4, 4, 4), "cpu": (4, 4), "disk": (4,)}
    number, rows = 0, list[tuple[str, list[Span]]]()
    for device, layers in sizes.items():
        start, row = 0, list[Span]()
        for size in layers:
            row.append(Span(f"key{number % 8}", start, start + size, f"layer {number}", f"layer {number}"))
            start, number = start + size, number + 1
        rows.append((device, row))
    return spans(rows, "Layers on devices", lambda _: ""), []


PICTURES: dict[str, tuple[str, Callable[[], tuple[Chart, list[tuple[str, str]]]]]] = {
    "collectives": ("What each rank gets from three collectives", collectives),
    "shard-memory": ("Memory of each rank, as the number of ranks grows", memory_of_shards),
    "tensor-parallel": ("Which part of two layers each rank computes", parts_of_layers),
    "pipeline-step": ("A step of a pipeline: 3 stages, 4 micro-batches (GPipe)", step_of_a_pipeline),
    "local-sgd": ("Eight steps on two sites: when they wait for the network", exchanges_of_local_sgd),
    "one-copy": ("Memory of a host with 4 ranks, with AdamW", memory_of_a_host),
    "checkpoint-ranks": ("The rows of a tensor, saved on 4 ranks and loaded on others", ranks_of_a_checkpoint),
    "place": ("Layers on the devices of one process", layers_on_devices),
}
"""The name of each file, its title, and what draws it."""


CHINESE = {
    "What each rank gets from three collectives": "三种集合通信给每个 rank 的结果",
    "What each rank gets": "每个 rank 得到什么",
    "value": "值",
    "Memory of each rank, as the number of ranks grows": "rank 数增加时，每个 rank 占用的内存",
    "Memory of each rank": "每个 rank 占用的内存",
    "shard, {} ranks": "shard，{} 个 rank",
    "parameters": "参数",
    "gradients": "梯度",
    "state of Adam": "Adam 的状态",
    "Which part of two layers each rank computes": "每个 rank 计算两层中的哪一部分",
    "Parts of two layers": "两层的各部分",
    "up: outputs {}, {}": "up：输出 {}、{}",
    "down: inputs {}, {}": "down：输入 {}、{}",
    "A step of a pipeline: {} stages, {} micro-batches (GPipe)": "流水线的一步：{} 段，{} 个 micro-batch（GPipe）",
    "A step of a pipeline": "流水线的一步",
    "forward": "前向",
    "backward": "反向",
    "forward, stage {}, micro-batch {}: {} s": "前向，第 {} 段，micro-batch {}：{} s",
    "backward, stage {}, micro-batch {}: {} s": "反向，第 {} 段，micro-batch {}：{} s",
    "Eight steps on two sites: when they wait for the network": "两地的八步：什么时候等待网络",
    "Exchanges over a slow network": "经过慢的网络的交换",
    "every step": "每一步",
    "a step": "一步",
    "step {}": "第 {} 步",
    "exchange": "交换",
    "slow network": "慢的网络",
    "Memory of a host with {} ranks, with AdamW": "有 {} 个 rank 的主机占用的内存，使用 AdamW",
    "Memory of a host with {} ranks": "有 {} 个 rank 的主机占用的内存",
    "a copy per rank": "每个 rank 一份",
    "one copy": "一份",
    "record to undo": "用于撤销的记录",
    "state of AdamW": "AdamW 的状态",
    "optimizer": "优化器",
    "checkpoint": "检查点",
    "The rows of a tensor, saved on {} ranks and loaded on others": "张量的各行：在 {} 个 rank 上保存，换 rank 数加载",
    "Rows of a tensor": "一个张量的各行",
    "saved on {}": "在 {} 个上保存",
    "loaded on {}": "在 {} 个上加载",
    "Layers on the devices of one process": "一个进程的各设备上的层",
    "Layers on devices": "各设备上的层",
    "disk": "磁盘",
    "layer {}": "第 {} 层",
}
"""Each text with its numbers left out."""
SAME = {"", "{}", "[{}, {}, {}]", "rank {}", "replicate", "up", "down", "every={}", "cpu", "cuda:{}"} | {
    f"{call}{arguments}"
    for call in ("all_reduce", "broadcast", "all_gather")
    for arguments in ("", "(value)", "(value, {})")
}
"""What is written alike in both languages."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_TEXT = re.compile(r"(?<=<title>)[^<]*(?=</title>)|(?<=>)[^<>]*(?=</text>)|(?<= aria-label=\")[^\"]*(?=\")")


def picture(name: str, language: str) -> str:
    """Return the text of a picture's file."""
    title, draw = PICTURES[name]
    chart, legend = draw()
    english = picture_of(chart, title, legend)
    return english if language == "en" else _TEXT.sub(lambda found: in_chinese(found.group()), english)


def in_chinese(text: str) -> str:
    """Return a text of a picture in Chinese, its numbers kept."""
    key = _NUMBER.sub("{}", unescape(text))
    return text if key in SAME else CHINESE[key].format(*_NUMBER.findall(text))


if __name__ == "__main__":
    for language, folder in FOLDERS.items():
        for name in PICTURES:
            (folder / f"{name}.svg").write_text(picture(name, language), encoding="utf-8")
