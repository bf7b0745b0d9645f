# SPDX-License-Identifier: Apache-2.0
"""Draws docs/decision_tree.svg, and writes the same tree as text into docs/which-call.md; both in Chinese, too.

``python docs/decision_tree.py`` does this; a test compares the files with the tree below.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
TEXT_BLOCK = re.compile(r"(?<=<!-- tree -->\n\n).*?(?=\n<!-- end of tree -->)", re.DOTALL)
"""Where the page holds the tree as text."""

WIDTH = 390
"""Of a phone's screen, in CSS pixels: there the picture has its own size."""
MARGIN = 8
INDENT = 20
PADDING = 8
GAP = 8
LINE_HEIGHT = 17
CHARACTER_WIDTH = 6.9
"""Of the plain text, on average."""
CHINESE_CHARACTER_WIDTH = 13
BOLD = 1.12
"""How much wider bold text is."""
CODE_CHARACTER_WIDTH = 7.3

_SHAPES = """
.decision-tree text { font-family: system-ui, sans-serif; font-size: 13px }
.decision-tree .question text { font-weight: 600 }
.decision-tree text.code { font-family: ui-monospace, monospace; font-size: 12px }
.decision-tree path { fill: none; stroke-width: 1.5 }
.decision-tree a:hover rect, .decision-tree a:focus rect { stroke-width: 2 }
"""
_COLORS = """
.decision-tree text { fill: var(--tree-text, %s) }
.decision-tree .question rect { fill: var(--tree-question, %s); stroke: var(--tree-question-border, %s) }
.decision-tree .call rect { fill: var(--tree-call, %s); stroke: var(--tree-call-border, %s) }
.decision-tree path { stroke: var(--tree-line, %s) }
"""
"""The variables are those of a page that holds the drawing, and has a button for dark mode."""
_LIGHT = ("#1f2328", "#ddf4ff", "#54aeff", "#dafbe1", "#4ac26b", "#8c959f")
_DARK = ("#e6edf3", "#10233f", "#1f6feb", "#0f2a19", "#238636", "#656c76")
STYLE = f"{_SHAPES}{_COLORS % _LIGHT}@media (prefers-color-scheme: dark) {{{_COLORS % _DARK}}}\n"


@dataclass(frozen=True, slots=True)
class Call:
    """What to write or type, and the heading of docs/which-call.md that shows it."""

    code: str
    heading: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and where each answer leads."""

    text: str
    answers: tuple[tuple[str, Question | Call], ...]


TREE = (
    Question(
        "What do you start from?",
        (
            (
                "a training loop for one device",
                Call("rw.join(), rw.replicate(model)", "Data parallel: one copy per rank"),
            ),
            ("a function, or a notebook cell", Call("rw.launch(train, ranks=4)", "From a function")),
            (
                "a script written for another library",
                Question(
                    "Which one?",
                    (
                        (
                            "DDP, Accelerate, Lightning, …",
                            Call("rankwise run -n 4 train.py", "Scripts that run as they are"),
                        ),
                        ("Horovod", Call("rankwise horovodrun -np 4 …", "Horovod")),
                        ("MegEngine", Call("rankwise.compat.megengine", "MegEngine")),
                        ("nn.DataParallel", Call("rw.replicate(model)", "Data parallel: one copy per rank")),
                    ),
                ),
            ),
        ),
    ),
    Question(
        "Do the model, its gradients and optimizer state fit on one device?",
        (
            (
                "yes",
                Question(
                    "What limits the speed?",
                    (
                        ("computing", Call("rw.replicate(model)", "Data parallel: one copy per rank")),
                        ("the network, a little", Call('compress="powersgd"', "Gradient compression")),
                        ("the network between two sites", Call("rw.local_sgd(model, …)", "Local SGD: fewer exchanges")),
                        (
                            "slow or preemptible ranks",
                            Call("rw.parameter_server(…)", "Parameter server: ranks that do not wait"),
                        ),
                    ),
                ),
            ),
            (
                "no",
                Question(
                    "What is available?",
                    (
                        (
                            "several ranks, a fast network",
                            Call("rw.shard(model)", "Sharded data parallel: parameters in shards"),
                        ),
                        (
                            "the same, but one layer is too large",
                            Call("rw.tensor_parallel(model)", "Tensor parallel: layers in parts"),
                        ),
                        (
                            "several ranks, a slow network",
                            Call("rw.pipeline(model, loss_fn, …)", "Pipeline parallel: layers in stages"),
                        ),
                        ("one process: its devices, CPU, disk", Call("rw.place(model)", "Layers on several devices")),
                        ("a model already divided by hand", Call("rw.send(…), rw.recv(…)", "Values between two ranks")),
                    ),
                ),
            ),
        ),
    ),
    Question(
        "Where does it run?",
        (
            ("one machine", Call("rankwise run train.py", "One machine")),
            ("several machines, with ssh", Call("rankwise run --hosts a,b …", "Several machines")),
            ("several machines, without ssh", Call("rankwise run --nodes 2 …", "Several machines")),
            ("Slurm", Call("rankwise submit --nodes 2 …", "Slurm")),
            ("Kubernetes", Call("rankwise submit --kubernetes …", "Kubernetes")),
        ),
    ),
)

CHINESE = {
    "What do you start from?": "手上有什么？",
    "a training loop for one device": "单卡的训练循环",
    "Data parallel: one copy per rank": "数据并行：每个 rank 一份模型",
    "a function, or a notebook cell": "函数，或 notebook 单元格",
    "From a function": "从函数启动",
    "a script written for another library": "为别的库写的脚本",
    "Which one?": "哪个库？",
    "DDP, Accelerate, Lightning, …": "DDP、Accelerate、Lightning…",
    "Scripts that run as they are": "原样运行的脚本",
    "Do the model, its gradients and optimizer state fit on one device?": "模型、梯度和优化器状态，一张卡放得下吗？",
    "yes": "放得下",
    "What limits the speed?": "什么限制了速度？",
    "computing": "计算",
    "the network, a little": "网络稍慢",
    "Gradient compression": "梯度压缩",
    "the network between two sites": "两地之间的网络",
    "Local SGD: fewer exchanges": "Local SGD：降低同步频率",
    "slow or preemptible ranks": "有的 rank 慢，或随时可能被抢占",
    "Parameter server: ranks that do not wait": "异步参数服务器",
    "no": "放不下",
    "What is available?": "有什么资源？",
    "several ranks, a fast network": "多个 rank，网络快",
    "Sharded data parallel: parameters in shards": "分片数据并行：参数分片",
    "the same, but one layer is too large": "同上，但单层就太大",
    "Tensor parallel: layers in parts": "张量并行：层内切分",
    "several ranks, a slow network": "多个 rank，网络慢",
    "Pipeline parallel: layers in stages": "流水线并行：按层分段",
    "one process: its devices, CPU, disk": "单进程：多张卡、CPU、磁盘",
    "Layers on several devices": "各层放在多个设备上",
    "a model already divided by hand": "已经手工切开的模型",
    "Values between two ranks": "两个 rank 之间传值",
    "Where does it run?": "在哪里运行？",
    "one machine": "单机",
    "One machine": "单机",
    "several machines, with ssh": "多机，有 ssh",
    "several machines, without ssh": "多机，没有 ssh",
    "Several machines": "多机",
    "Which call do I need? The tree is repeated as text below the picture.": "该用哪个调用？图下用文字列出同一棵树。",
}


@dataclass(frozen=True, slots=True)
class Edition:
    """The tree in one language."""

    picture: Path
    page: Path
    words: dict[str, str] = field(default_factory=dict[str, str])
    """Of what is in English in the tree; what is not in it stays."""
    colon: str = ": "
    """Between an answer and where it leads."""

    def say(self, english: str) -> str:
        """Return a text in this language."""
        return self.words.get(english, english)


EDITIONS = (
    Edition(HERE / "decision_tree.svg", HERE / "which-call.md"),
    Edition(HERE / "zh" / "decision_tree.svg", HERE / "zh" / "which-call.md", CHINESE, "："),
)


def draw(edition: Edition) -> str:
    """Return the picture, as SVG."""
    parts: list[str] = []
    top = float(MARGIN)
    for question in TREE:
        drawn, top = _question(edition, question, MARGIN, top)
        parts += drawn
        top += GAP
    size = f'width="{WIDTH}" height="{top:.0f}" viewBox="0 0 {WIDTH} {top:.0f}"'
    title = edition.say("Which call do I need? The tree is repeated as text below the picture.")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="decision-tree" {size} role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def text(edition: Edition) -> str:
    """Return the tree as nested lists in Markdown, each call linked to its section."""
    lines = [line for one in TREE for line in (f"- **{edition.say(one.text)}**", *_answers(edition, one, "  "))]
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """Return what a link to a heading ends in, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _answers(edition: Edition, question: Question, indent: str) -> list[str]:
    lines: list[str] = []
    for answer, end in question.answers:
        if isinstance(end, Call):
            link = f"[`{edition.say(end.code)}`](#{anchor(edition.say(end.heading))})"
            lines.append(f"{indent}- {edition.say(answer)}{edition.colon}{link}")
        else:
            lines.append(f"{indent}- {edition.say(answer)}{edition.colon}**{edition.say(end.text)}**")
            lines += _answers(edition, end, indent + "  ")
    return lines


def _question(edition: Edition, question: Question, left: float, top: float) -> tuple[list[str], float]:
    """Return a question with all that is below it, and where that ends."""
    room = WIDTH - MARGIN - left - 2 * PADDING
    lines = textwrap.wrap(edition.say(question.text), int(room / CHARACTER_WIDTH / BOLD))
    height = LINE_HEIGHT * len(lines) + PADDING
    width = BOLD * max(map(_width, lines)) + 2 * PADDING
    parts = [f'<g class="question">{_box(left, top, width, height)}{_text(lines, left, top)}</g>']
    trunk_top = top + height
    top = middle = trunk_top + GAP
    inner = left + INDENT
    for english, end in question.answers:
        answer = edition.say(english)
        middle = top + LINE_HEIGHT / 2 + 2
        parts.append(f'<path d="M{left + PADDING:.0f} {middle:.0f}h{INDENT - PADDING - 3}"/>')
        parts.append(f'<text x="{inner:.0f}" y="{top + 14:.0f}">{escape(answer)}</text>')
        if isinstance(end, Call):
            box = _call(edition.say(end.code), inner, top + LINE_HEIGHT + 2)
            parts.append(f'<a href="#{anchor(edition.say(end.heading))}">{box}</a>')
            top += 2 * LINE_HEIGHT + 6 + GAP
        else:
            drawn, top = _question(edition, end, inner, top + LINE_HEIGHT + 3)
            parts += drawn
    parts.insert(1, f'<path d="M{left + PADDING:.0f} {trunk_top:.0f}V{middle:.0f}"/>')
    return parts, top


def _width(line: str) -> float:
    return sum(CHARACTER_WIDTH if character.isascii() else CHINESE_CHARACTER_WIDTH for character in line)


def _call(code: str, left: float, top: float) -> str:
    box = _box(left, top, len(code) * CODE_CHARACTER_WIDTH + 2 * PADDING, LINE_HEIGHT + 4)
    return (
        f'<g class="call">{box}<text class="code" x="{left + PADDING:.0f}" y="{top + 14:.0f}">{escape(code)}</text></g>'
    )


def _box(left: float, top: float, width: float, height: float) -> str:
    return f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5"/>'


def _text(lines: list[str], left: float, top: float) -> str:
    return "".join(
        f'<text x="{left + PADDING:.0f}" y="{top + PADDING / 2 + 13 + number * LINE_HEIGHT:.0f}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


if __name__ == "__main__":
    for one in EDITIONS:
        one.picture.write_text(draw(one), encoding="utf-8")
        page = one.page.read_text(encoding="utf-8")
        one.page.write_text(TEXT_BLOCK.sub(lambda _, one=one: text(one), page), encoding="utf-8")
