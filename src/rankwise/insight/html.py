# SPDX-License-Identifier: Apache-2.0
"""A page of sections, each a picture with its table, and its titles in English and Chinese: one file, light and dark.

It takes nothing from a network. Its sentences are in ``words``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from rankwise.charts import page_style
from rankwise.insight.tables import Table, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwise.charts import Chart


Language = Literal["en", "zh"]

PART_NAMES: dict[Language, dict[str, str]] = {
    "en": {
        "script": "script",
        "data": "data",
        "forward": "forward",
        "backward": "backward",
        "exchange": "exchange",
        "waiting": "waiting for the slowest rank",
        "optimizer": "optimizer",
        "checkpoint": "checkpoint",
        "evaluation": "evaluation",
    },
    "zh": {
        "script": "脚本其余部分",
        "data": "读取数据",
        "forward": "前向",
        "backward": "反向",
        "exchange": "通信",
        "waiting": "等待最慢的 rank",
        "optimizer": "优化器",
        "checkpoint": "检查点",
        "evaluation": "评估",
    },
}

TITLES: dict[Language, dict[str, str]] = {
    "en": {
        "change": "What to change",
        "step time": "time per step",
        "waiting": "waiting for other ranks",
        "total time": "total time",
        "fact": "fact",
        "value": "value",
        "parts": "Where the time of a step goes",
        "steps": "Steps over time",
        "heat": "Work of each rank in each step",
        "heat note": "Without waiting. Darker is longer; a row darker than the others is a slow rank.",
        "who": "Who waits for whom",
        "who note": "Each row waits for the rank of the column: per step, on average.",
        "network": "The network between hosts",
        "network note": "What the ranks of one host have sent to those of another over TCP, as the kernel counts it. "
        "Other transports, such as InfiniBand, and hosts that are not listed, are unknown.",
        "no network": "Unknown: no rank had a TCP connection to another host that carried data. Other transports, such "
        "as InfiniBand, are not seen.",
        "from and to": "from → to",
        "sent per step": "sent per step",
        "rate": "speed while sending",
        "round trip": "round trip",
        "least round trip": "shortest round trip",
        "resent": "sent again",
        "unknown": "unknown",
        "compare": "Runs side by side",
        "compare note": "How much faster each is than the one with the fewest ranks; ideal is in proportion to ranks.",
        "run": "run",
        "ranks column": "ranks",
        "samples per second": "samples/s",
        "times": "times as fast",
        "ideal": "ideal",
        "measured": "measured",
        "values": "Logged values",
        "memory": "Memory of each rank",
        "events": "Events",
        "time": "time",
        "event": "event",
        "environment": "Environment",
        "fact hostname": "hostname",
        "fact device": "device",
        "fact backend": "backend",
        "fact source": "source",
        "fact times": "times",
        "fact threads": "threads",
        "fact cores": "cores",
        "fact python": "python",
        "fact torch": "torch",
        "fact rankwise": "rankwise",
        "fact pid": "pid",
        "as a table": "as a table",
        "rank": "rank",
        "step": "step",
        "steps column": "steps",
        "total": "step",
        "share": "share",
        "mean": "mean",
        "longest": "longest",
        "no events": "None.",
        "means": "Each point is the mean of {} values.",
        "not finite": "Values that are not finite: {}, the first in step {}. Means leave them out.",
        "slowest": "slowest rank, without the exchange",
        "at first": "at first",
        "most": "most",
        "estimated": "The script exchanges gradients itself: what is shown as exchange is how much longer backward "
        "took than on the rank where it was shortest. How long the transfer takes is unknown, and part of backward.",
        "missing": "There is no record of a step of rank {}.",
        "served": "Rank 0 ran the script; rank {} computed rows of its calls.",
        "incomplete": "Steps are missing, because the run is not over, a disk was full or a rank was killed: {}.",
        "recorded": "rank {} has recorded {} of {}",
        "restarted": "Restarts of the job before this attempt: {}.",
        "later": "A later start has completed no step: this is the latest one that has.",
        "mesh": "Ranks along the axes of the mesh",
        "mesh note": "Each cell is a rank; its number and color are its place along the axis of the row.",
        "axis": "axis",
        "size": "size",
        "groups": "groups of ranks that differ only along it",
        "what it is": "what it divides",
        "within hosts": "each within a host",
        "across hosts": "across hosts",
        "host": "host",
        "axis worker_groups": "groups that train independently and are averaged rarely",
        "axis pp": "layers: the stages of a pipeline",
        "axis dp_replicate": "the batch: each rank has a copy of the model",
        "axis dp_shard": "parameters and the batch",
        "axis tp": "each layer",
        "calls": "Calls of modules",
        "calls note": "With --auto, calls of modules are split over the ranks where that is exact and saves time.",
        "module": "module",
        "number of calls": "calls",
        "one rank": "one rank",
        "all ranks": "all ranks",
        "placement": "Devices of the model",
        "placement note": "Each box is a part of the model, in their order.",
        "part": "part",
        "device": "device",
        "bytes": "size",
        "runs on": "runs on",
        "why": "why",
        "schedule": "A step of the pipeline",
        "stage": "stage",
        "micro-batch": "micro-batch",
        "computes": "computes",
        "waits": "waits",
        "files": "Files of the checkpoint",
        "file": "file",
        "tensors": "Tensors of the checkpoint",
        "tensor": "tensor",
        "shape": "shape",
        "more tensors": "{} smaller ones are not listed.",
        "more rows": "{} more rows are on the page.",
    },
    "zh": {
        "change": "可以改进之处",
        "step time": "每步时间",
        "waiting": "等待其他 rank",
        "total time": "总时间",
        "fact": "项目",
        "value": "值",
        "parts": "每一步的时间用在哪里",
        "steps": "每步耗时的变化",
        "heat": "每个 rank 每一步的工作时间",
        "heat note": "不含等待。颜色越深时间越长；比其他行更深的一行就是慢的 rank。",
        "who": "谁在等谁",
        "who note": "每一行等待列所示的 rank：每步的平均值。",
        "network": "主机之间的网络",
        "network note": "一台主机的 rank 通过 TCP 发给另一台主机的数据，由内核统计。InfiniBand 等其他传输方式，"
        "以及未列出的主机，情况未知。",
        "no network": "未知：没有 rank 通过 TCP 连接向其他主机发送数据。InfiniBand 等其他传输方式无法看到。",
        "from and to": "从 → 到",
        "sent per step": "每步发送",
        "rate": "发送时的速度",
        "round trip": "往返时间",
        "least round trip": "最短往返时间",
        "resent": "重发",
        "unknown": "未知",
        "compare": "并排比较",
        "compare note": "每次运行是 rank 最少的那次的多少倍快；理想情况是 rank 多几倍就快几倍。",
        "run": "运行",
        "ranks column": "rank 数",
        "samples per second": "样本/秒",
        "times": "倍数",
        "ideal": "理想",
        "measured": "实测",
        "values": "记录的数值",
        "memory": "每个 rank 的内存",
        "events": "事件",
        "time": "时间",
        "event": "事件",
        "environment": "环境",
        "fact hostname": "主机名",
        "fact device": "设备",
        "fact backend": "通信后端",
        "fact source": "启动方式",
        "fact times": "计时方式",
        "fact threads": "线程数",
        "fact cores": "核数",
        "fact python": "Python",
        "fact torch": "torch",
        "fact rankwise": "rankwise",
        "fact pid": "进程号",
        "as a table": "表格形式",
        "rank": "rank",
        "step": "步",
        "steps column": "步",
        "total": "整步",
        "share": "占比",
        "mean": "平均",
        "longest": "最长",
        "no events": "无。",
        "means": "每个点是 {} 个值的平均。",
        "not finite": "不是有限数的值有 {} 个，第一个在第 {} 步；平均值不包括它们。",
        "slowest": "最慢的 rank，不含通信",
        "at first": "开始",
        "most": "最大",
        "estimated": "脚本自己交换梯度：下文的通信是反向中比最短的 rank 多出的时间；传输本身的时间未知，算在反向之内。",
        "missing": "没有 rank {} 的任何一步的记录。",
        "served": "脚本由 rank 0 运行；rank {} 计算其调用中的一部分行。",
        "incomplete": "有些步没有记录下来，因为作业仍在运行、磁盘已满或 rank 被杀死：{}。",
        "recorded": "rank {} 记录了 {}，共 {}",
        "restarted": "在这次尝试之前，作业重启了 {} 次。",
        "later": "后来的启动没有完成任何一步：以下是最近一次完成过步的。",
        "mesh": "rank 在 mesh 各轴上的位置",
        "mesh note": "每格是一个 rank；数字和颜色是它在该行所示轴上的位置。",
        "axis": "轴",
        "size": "大小",
        "groups": "只在这个轴上不同的 rank 组",
        "what it is": "划分什么",
        "within hosts": "每组都在一台主机内",
        "across hosts": "跨主机",
        "host": "主机",
        "axis worker_groups": "各自独立训练、很少求平均的组",
        "axis pp": "层：流水线的各个阶段",
        "axis dp_replicate": "batch：每个 rank 有一份模型",
        "axis dp_shard": "参数和 batch",
        "axis tp": "每一层",
        "calls": "模块的调用",
        "calls note": "使用 --auto 时，最外层的模块调用在结果不变且更快的情况下被分到各个 rank。",
        "module": "模块",
        "number of calls": "调用次数",
        "one rank": "一个 rank",
        "all ranks": "所有 rank",
        "placement": "模型各部分所在的设备",
        "placement note": "每种颜色是模型的一部分，按顺序排列。",
        "part": "部分",
        "device": "设备",
        "bytes": "大小",
        "runs on": "运行于",
        "why": "原因",
        "schedule": "流水线的一步",
        "stage": "阶段",
        "micro-batch": "micro-batch",
        "computes": "计算",
        "waits": "等待",
        "files": "检查点的文件",
        "file": "文件",
        "tensors": "检查点的张量",
        "tensor": "张量",
        "shape": "形状",
        "more tensors": "另有 {} 个更小的张量未列出。",
        "more rows": "页面上还有 {} 行。",
    },
}


ORDER = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "script", "checkpoint", "evaluation")
"""The parts of a step as they are shown; waiting for the slowest rank is separated from the rest of the exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of the page: a chart, and what it shows as a table."""

    name: str
    title: str
    note: str = ""
    chart: Chart | None = None
    legend: tuple[dict[str, str], ...] = ()
    tables: tuple[Table, ...] = field(default_factory=tuple)


def tabled(
    name: str,
    title: str,
    head: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    *,
    note: str = "",
    chart: Chart | None = None,
    legend: tuple[dict[str, str], ...] = (),
    is_text: bool = False,
) -> Section:
    """Return a section with one table under its own title, or none without rows."""
    table = Table(caption=title, head=head, rows=tuple(rows), is_text=is_text)
    return Section(name=name, title=title, note=note, chart=chart, legend=legend, tables=(table,) if table.rows else ())


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and what a terminal shows of it."""

    headline: str
    html: str
    text: str
    """What a terminal shows below the headline, in complete lines."""


def rendered(
    *,
    heading: tuple[str, str, str],
    headline: str,
    language: Language,
    sections: Sequence[Section],
    numbers: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    changes: Sequence[dict[str, str]] = (),
) -> str:
    """Return the page.

    Args:
        heading: the kind of page, what it is about, and when.
        headline: the sentence that says it.
        language: of the page.
        sections: in their order.
        numbers: the most important ones: what each is, and its value.
        notes: sentences below the headline.
        changes: what to change: ``found``, ``advice`` and ``gain`` of each.
    """
    template = Environment(
        loader=PackageLoader("rankwise.insight", ""), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html")
    kind, subject, when = heading
    return template.render(
        language=language,
        titles=TITLES[language],
        kind=kind,
        subject=subject,
        when=when,
        headline=headline,
        numbers=numbers,
        notes=notes,
        changes=changes,
        chart_style=page_style(),
        sections=sections,
    )


def shown(subject: str, when: str, headline: str, sections: Sequence[Section], language: Language) -> Page:
    """Return the page of ``rankwise show``, of which a terminal shows every table."""
    html = rendered(heading=("rankwise show", subject, when), headline=headline, language=language, sections=sections)
    more = TITLES[language]["more rows"]
    return Page(headline, html, "\n".join(text_of(table, more) for section in sections for table in section.tables))


def legend_of(names: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """Return a legend: of each style that has one, its name."""
    return tuple({"style": style, "name": name} for style, name in names.items())
