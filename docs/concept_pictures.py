# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/concepts.md into docs/images/, and in Chinese into docs/zh/images/.

``python docs/concept_pictures.py`` does this; a test compares the files with the drawings below.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = {"en": HERE / "images", "zh": HERE / "zh" / "images"}

WIDTH = 390
"""Of a phone's screen, in CSS pixels: there the pictures have their own size."""
BOX_HEIGHT = 26
NUM_SAMPLES = 8
NUM_LAYERS = 4

STYLE = """
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2328; text-anchor: middle }
.left { text-anchor: start }
.bold { font-weight: 600 }
.code { font-family: ui-monospace, monospace; font-size: 12px }
rect { stroke-width: 1 }
.first { fill: #ddf4ff; stroke: #54aeff }
.second { fill: #dafbe1; stroke: #4ac26b }
.both { fill: #fff1cc; stroke: #d4a72c }
.frame { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
.absent { fill: none; stroke: #8c959f }
path { fill: none; stroke: #6e7781; stroke-width: 1.5 }
.tip { fill: #6e7781; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .first { fill: #10233f; stroke: #1f6feb }
  .second { fill: #0f2a19; stroke: #238636 }
  .both { fill: #3a2d0b; stroke: #9e6a03 }
  .frame, .absent { stroke: #656c76 }
  path { stroke: #8b949e }
  .tip { fill: #8b949e }
}
"""

Say = Callable[[str], str]
Drawing = tuple[list[str], float]
"""The parts of a picture, and its height."""


def world(say: Say) -> Drawing:
    """A launcher starts two processes on each of two machines; together they are the world."""
    parts = _box(95, 8, 200, say("launcher: rankwise run"), "both")
    parts += _frame(6, 78, 378, 118) + _text(195, 96, say("the world: 4 ranks"), "bold")
    for machine in range(2):
        left = 14 + 186 * machine
        parts += _frame(left, 104, 176, 84) + _text(left + 88, 121, say(f"machine {machine + 1}"))
        parts += _arrow(195, 34, left + 88, 76)
        for local in range(2):
            rank = 2 * machine + local
            at = left + 8 + 82 * local
            parts += _box(at, 128, 78, f"rank {rank}", "first") + _text(at + 39, 174, say(f"device {local}"))
    return parts, 204


def batch_split(say: Say) -> Drawing:
    """A global batch of eight samples, divided between two ranks."""
    parts = _text(195, 20, say("global batch: 8 samples"), "bold")
    for sample in range(NUM_SAMPLES):
        parts += _box(11 + 46 * sample, 30, 42, str(sample), "first" if sample < NUM_SAMPLES / 2 else "second")
    for rank, (style, samples) in enumerate((("first", "0 1 2 3"), ("second", "4 5 6 7"))):
        middle = 101 + 188 * rank
        parts += _arrow(middle, 60, middle, 88)
        parts += _box(middle - 85, 92, 170, say(f"rank {rank}: samples {samples}"), style)
        parts += _text(middle, 138, say("forward and backward"))
    return parts, 148


def gradients_summed(say: Say) -> Drawing:
    """Each rank has the gradient of its samples; all_reduce adds them, and every rank gets the same mean."""
    parts: list[str] = []
    for rank, style in enumerate(("first", "second")):
        middle = 101 + 188 * rank
        parts += _text(middle, 20, f"rank {rank}", "bold")
        parts += _box(middle - 85, 30, 170, say("sum of 4 gradients"), style)
        parts += _arrow(middle, 58, middle, 84)
        parts += _arrow(middle, 138, middle, 164)
        parts += _box(middle - 85, 168, 170, say("mean of 8 gradients"), "both")
        parts += _arrow(middle, 196, middle, 218) + _text(middle, 234, "optimizer.step()", "code")
        parts += _text(middle, 254, say("the same parameters"))
    parts += _box(16, 88, 358, say("all_reduce: add, then divide by 8"), "both", 48)
    return parts, 264


def strategies(say: Say) -> Drawing:
    """Where the four layers of a model are under each of four strategies, on two ranks."""
    parts: list[str] = []
    panels = (
        ("replicate", "every layer, own samples", "full", "full"),
        ("shard", "half of every layer, own samples", "left", "right"),
        ("tensor_parallel", "half of every layer, same samples", "upper", "lower"),
        ("pipeline", "half of the layers, in micro-batches", "early", "late"),
    )
    for number, (name, holds, first, second) in enumerate(panels):
        left, top = 4 + 193 * (number % 2), 4 + 208 * (number // 2)
        parts += _frame(left, top, 189, 202) + _text(left + 94, top + 18, name, "code")
        for rank, kept in enumerate((first, second)):
            at = left + 14 + 86 * rank
            parts += _text(at + 38, top + 40, f"rank {rank}")
            for layer in range(NUM_LAYERS):
                parts += _layer(at, top + 48 + 28 * layer, kept, layer, ("first", "second")[rank])
        above, _, below = say(holds).partition(", ")
        parts += _text(left + 94, top + 178, above) + _text(left + 94, top + 195, below)
    return parts, 420


def mesh(say: Say) -> Drawing:
    """Four ranks in two rows and two columns."""
    parts = _text(225, 20, say("tp=2: one layer in two halves"), "bold")
    for row, style in enumerate(("first", "second")):
        top = 32 + 52 * row
        parts += _text(60, top + 24, say(f"copy {row}"))
        parts += _frame(108, top, 274, 44)
        for column in range(2):
            parts += _box(118 + 130 * column, top + 9, 124, f"rank {2 * row + column}", style)
    parts += _text(195, 154, say("dp_replicate=2: two copies, each with its samples"), "bold")
    return parts, 164


def microsteps(say: Say) -> Drawing:
    """One step of the optimizer is made of two microsteps on every rank."""
    parts = [*_text(195, 20, say("one step"), "bold"), "<path d='M8 34V28H382V34'/>"]
    for rank, style in enumerate(("first", "second")):
        top = 44 + 62 * rank
        parts += _text(8, top + 17, f"rank {rank}", "left")
        for micro in range(2):
            parts += _box(60 + 92 * micro, top, 88, say(f"microstep {micro + 1}"), style)
    parts += _box(245, 44, 70, say("exchange"), "both", 88) + _box(320, 44, 62, say("update"), "both", 88)
    return parts, 142


PICTURES: dict[str, Callable[[Say], Drawing]] = {
    "world": world,
    "batch-split": batch_split,
    "gradients-summed": gradients_summed,
    "strategies": strategies,
    "mesh": mesh,
    "microsteps": microsteps,
}

CHINESE = {
    "launcher: rankwise run": "启动器：rankwise run",
    "the world: 4 ranks": "world：4 个 rank",
    "machine 1": "机器 1",
    "machine 2": "机器 2",
    "device 0": "设备 0",
    "device 1": "设备 1",
    "global batch: 8 samples": "全局 batch：8 个样本",
    "rank 0: samples 0 1 2 3": "rank 0：样本 0 1 2 3",
    "rank 1: samples 4 5 6 7": "rank 1：样本 4 5 6 7",
    "forward and backward": "前向与反向",
    "sum of 4 gradients": "4 个样本的梯度之和",
    "mean of 8 gradients": "8 个样本的平均梯度",
    "the same parameters": "参数相同",
    "all_reduce: add, then divide by 8": "all_reduce：相加，再除以 8",
    "every layer, own samples": "所有层, 各自的样本",
    "half of every layer, own samples": "每层的一半, 各自的样本",
    "half of every layer, same samples": "每层的一半, 相同的样本",
    "half of the layers, in micro-batches": "一半的层, 分 micro-batch 计算",
    "tp=2: one layer in two halves": "tp=2：每层切成两半",
    "copy 0": "副本 0",
    "copy 1": "副本 1",
    "dp_replicate=2: two copies, each with its samples": "dp_replicate=2：两个副本，各有自己的样本",
    "one step": "一步",
    "microstep 1": "累积步 1",
    "microstep 2": "累积步 2",
    "exchange": "交换",
    "update": "更新",
}
EDITIONS: dict[str, Say] = {"en": lambda text: text, "zh": lambda text: CHINESE[text]}


def draw(name: str, language: str) -> str:
    """Return a picture as SVG."""
    parts, height = PICTURES[name](EDITIONS[language])
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _layer(left: float, top: float, kept: str, layer: int, style: str) -> list[str]:
    """Return a layer of which a rank keeps all, a part, or nothing."""
    width, height = 76, 22
    inside = {
        "full": (0, 0, width, height),
        "left": (0, 0, width / 2, height),
        "right": (width / 2, 0, width / 2, height),
        "upper": (0, 0, width, height / 2),
        "lower": (0, height / 2, width, height / 2),
        "early": (0, 0, width, height) if layer < NUM_LAYERS / 2 else None,
        "late": (0, 0, width, height) if layer >= NUM_LAYERS / 2 else None,
    }[kept]
    parts = [f'<rect class="absent" x="{left:g}" y="{top:g}" width="{width}" height="{height}"/>']
    if inside:
        x, y, wide, high = inside
        parts.append(f'<rect class="{style}" x="{left + x:g}" y="{top + y:g}" width="{wide:g}" height="{high:g}"/>')
    return parts


def _box(left: float, top: float, width: float, text: str, style: str, height: float = BOX_HEIGHT) -> list[str]:  # noqa: PLR0917 - a place, a size, and what is in it
    box = f'<rect class="{style}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"/>'
    return [box, *_text(left + width / 2, top + height / 2 + 5, text)]


def _frame(left: float, top: float, width: float, height: float) -> list[str]:
    return [f'<rect class="frame" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"/>']


def _text(x: float, y: float, text: str, style: str = "") -> list[str]:
    kind = f' class="{style}"' if style else ""
    return [f'<text{kind} x="{x:g}" y="{y:g}">{escape(text)}</text>'] if text else []


def _arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    tip = f'<path class="tip" d="M{to_x:g} {to_y:g}l-4 -7h8z"/>'
    return [f'<path d="M{x:g} {y:g}L{to_x:g} {to_y - 6:g}"/>', tip]


if __name__ == "__main__":
    for language, folder in FOLDERS.items():
        folder.mkdir(exist_ok=True)
        for name in PICTURES:
            (folder / f"{name}.svg").write_text(draw(name, language), encoding="utf-8")
