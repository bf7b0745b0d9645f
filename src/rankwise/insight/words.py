# SPDX-License-Identifier: Apache-2.0
"""The sentences of a report, in English and in Chinese."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.charts import duration, speed
from rankwise.insight.html import PART_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.insight.findings import Finding
    from rankwise.insight.html import Language
    from rankwise.insight.network import SlowNetwork
    from rankwise.insight.step_table import Floats

_LARGEST = {
    "script": "the rest of the script",
    "data": "reading data",
    "exchange": "the exchange",
    "checkpoint": "writing checkpoints",
}

_CAUSES: dict[Language, dict[str, str]] = {
    "en": {
        "data": "which waits for its data",
        "more samples": "which has more samples than the others",
        "shared processor": "whose processor other processes use too",
        "stopped": "which is repeatedly paused, or waits for something while computing",
        "swapping": "which reads memory back from a disk: it is swapping",
        "slower": "which computes longer for as many samples",
        "longer": "which computes for longer",
        "script": "which spends longer in the script, outside of the model",
        "checkpoint": "which writes its checkpoints more slowly",
        "evaluation": "which evaluates for longer",
        "update": "which updates larger parameters than the others",
        "unseen": "which spends longer in the script, where its model's forward pass is counted too",
    },
    "zh": {
        "data": "它在等待自己的数据",
        "more samples": "它的样本比其他 rank 多",
        "shared processor": "它的处理器还被其他进程占用",
        "stopped": "它反复被暂停，或在计算过程中等待其他资源",
        "swapping": "它在从磁盘换回内存",
        "slower": "同样数量的样本，它计算得更久",
        "longer": "它计算得更久",
        "script": "它在模型之外的脚本代码上花的时间更长",
        "checkpoint": "它写检查点更慢",
        "evaluation": "它的评估耗时更长",
        "update": "它更新的参数比其他 rank 的更大",
        "unseen": "它在脚本中花的时间更长，其中也包括模型的前向计算",
    },
}

_ADVICE: dict[Language, dict[str, str]] = {
    "en": {
        "data": "raise num_workers of the loader, or move its files to a disk as fast as that of the others",
        "more samples": "give every rank equally many samples: use rankwise.DataLoader with global_batch_size, or "
        "samples of similar length",
        "shared processor": "end the other processes on these cores, start fewer ranks, or ask the scheduler for "
        "cores of your own",
        "stopped": "look for what stops it (a debugger, a batch system, a limit of its container on processor time), "
        "or what its model or optimizer waits for (a lock, a file, a network, a sleep): rankwise stacks shows it",
        "swapping": "give it more memory, or make it use less: fewer workers, smaller batches, rankwise.share(dataset)",
        "slower": "compare its processor's clock and temperature with those of the others, or leave that machine out",
        "longer": "see whether it has more samples than the others, or a slower processor",
        "script": "find what only this rank does between steps (logging, printing, saving): rankwise stacks shows it",
        "checkpoint": "check the disk that it writes to, or save in the background: Checkpointer(asynchronous=True)",
        "evaluation": "split the evaluation evenly: use rankwise.DataLoader for it too",
        "update": "each parameter is updated by one rank of its host: if one is as large as all others together, two "
        "smaller ones in its place would be divided",
        "unseen": "see whether it has more samples than the others, and what only this rank does between steps: "
        "rankwise stacks shows it; rankwise.replicate(model) has the forward pass measured",
        "turns": "ranks take turns at being slow, as with samples of unequal length or a shared machine: batch samples "
        "of similar length",
        "all data": "raise num_workers of the loader, or prepare the data once in place of at every step",
        "exchange": "take larger batches per step, accumulate gradients with rankwise.no_sync, or send less: "
        'replicate(model, compress="bf16")',
        "slow link": "compare its speed with that of the others (ethtool, iperf3): look for its cable and switch port, "
        "or for what limits the machine or container that sends; until then send less: "
        'replicate(model, compress="powersgd"), or rankwise.local_sgd',
        "network": 'send less over it: replicate(model, compress="bf16") or "powersgd", larger batches, or '
        "rankwise.local_sgd, which also waits for fewer round trips; or connect the hosts by a faster network",
        "shifted": "a rank that calls optimizer.step() alone has its later steps compared with the others' next ones: "
        "call it equally often on every rank, or before rankwise.join()",
        "all checkpoint": "save less often, or in the background: Checkpointer(asynchronous=True)",
    },
    "zh": {
        "data": "增大 loader 的 num_workers，或把它的文件放到和其他 rank 一样快的磁盘上",
        "more samples": "让每个 rank 的样本一样多：用 rankwise.DataLoader 的 global_batch_size，或让样本长度相近",
        "shared processor": "结束占用这些核的其他进程，减少 rank 数，或向调度系统申请独占的核",
        "stopped": "找出是什么暂停了它（调试器、批处理系统、容器的处理器时间限制），或它的模型、优化器在等什么"
        "（锁、文件、网络、sleep）：rankwise stacks 可以看到",
        "swapping": "给它更多内存，或减少占用：减少 worker、减小 batch size、rankwise.share(dataset)",
        "slower": "比较它与其他处理器的频率和温度，或不使用那台机器",
        "longer": "检查它的样本是否比其他 rank 多，或处理器是否更慢",
        "script": "找出只有这个 rank 在两步之间做的事（日志、打印、保存）：rankwise stacks 可以看到",
        "checkpoint": "检查它写入的磁盘，或在后台保存：Checkpointer(asynchronous=True)",
        "evaluation": "平均分配评估：评估也使用 rankwise.DataLoader",
        "update": "每个参数由主机上的一个 rank 更新：如果有一个参数与其余的总和一样大，把它分成两个较小的就可以分摊",
        "unseen": "检查它的样本是否比其他 rank 多，以及只有这个 rank 在两步之间做的事：rankwise stacks 可以看到；"
        "用 rankwise.replicate(model) 可以测量前向计算",
        "turns": "各个 rank 轮流变慢，例如样本长度不等或机器被共用：把长度相近的样本放在同一个 batch 里",
        "all data": "增大 loader 的 num_workers，或把数据一次准备好，而不是每步都做",
        "exchange": "每步使用更大的 batch，用 rankwise.no_sync 累积梯度，或减少发送量："
        'replicate(model, compress="bf16")',
        "slow link": "与其他链路比较速度（ethtool、iperf3）：检查网线、交换机端口，以及发送方的机器或容器是否被限速；"
        '在此之前减少发送量：replicate(model, compress="powersgd")，或 rankwise.local_sgd',
        "network": '减少经过它的数据：replicate(model, compress="bf16") 或 "powersgd"，更大的 batch，或等待次数也更少的'
        " rankwise.local_sgd；或用更快的网络连接各主机",
        "shifted": "有的 rank 单独调用了 optimizer.step()，它之后的步与其他 rank 的下一步对在一起：让每个 rank "
        "调用同样多次，或在 rankwise.join() 之前调用",
        "all checkpoint": "减少保存次数，或在后台保存：Checkpointer(asynchronous=True)",
    },
}

_SAVES = re.compile(r"((?:ranks? [\d, -]+: )?)(saved|saving) (?=\S+$)")
"""The events of checkpoints: saved, or saving in the background."""

TOLD_RESENT = 0.01
"""From which share of data that was sent again a sentence says so."""


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.0f} %"


def ranks_in_words(ranks: Sequence[int], hostname: str, language: Language) -> str:
    """Return ranks by number, with their host if they are all of its ranks."""
    numbers = ", ".join(map(str, ranks))
    if hostname:
        return f"{hostname} (rank {numbers})" if language == "en" else f"{hostname}（rank {numbers}）"
    return f"rank {numbers}"


def headline(
    num_ranks: int,
    num_steps: int,
    step_seconds: float,
    first: Finding | None,
    language: Language,
    *,
    mean_parts: Mapping[str, Floats],
    times_one_rank: float | None = None,
    failed: Sequence[int] | None = None,
) -> str:
    """Return the sentence that the report begins with.

    Args:
        num_ranks: of the run.
        num_steps: of the run.
        step_seconds: how long one takes.
        first: the costliest finding, if there is one.
        language: of the sentence.
        mean_parts: of a step, in seconds, by name: [rank].
        times_one_rank: how many times as fast the run is as one on one rank that it is compared with.
        failed: the ranks whose failure ended the run, empty if unknown; ``None`` if it has not failed.
    """
    if language == "zh":
        start = f"{num_ranks} 个 rank，{num_steps:,} 步，每步 {duration(step_seconds)}"
        start += "" if times_one_rank is None else f"，是一个 rank 的 {times_one_rank:.1f} 倍快"
        start += (
            "" if failed is None else f"，然后 {ranks_in_words(failed, '', language) + ' ' if failed else '作业'}失败"
        )
        nothing = f"没有明显的问题，{largest_in_words(mean_parts, language)}。"
        return f"{start}；{finding_in_words(first, language) if first else nothing}"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    steps = "1 step" if num_steps == 1 else f"{num_steps:,} steps"
    start = f"{ranks}, {steps} of {duration(step_seconds)}"
    start += "" if times_one_rank is None else f", {times_one_rank:.1f} times as fast as one rank"
    start += "" if failed is None else f", then {ranks_in_words(failed, '', language) if failed else 'it'} failed"
    if first is None:
        return f"{start}; nothing stands out, {largest_in_words(mean_parts, language)}."
    return f"{start}; {finding_in_words(first, language)}"


def largest_in_words(mean_parts: Mapping[str, Floats], language: Language) -> str:
    """Return what takes most of the time of all ranks, by the mean parts of a step, [rank]."""
    seconds = {name: float(of_ranks.mean()) for name, of_ranks in mean_parts.items()}
    whole = sum(seconds.values())
    seconds["computing"] = sum(seconds.pop(name) for name in ("forward", "backward", "optimizer"))
    largest = max(seconds, key=lambda name: seconds[name])
    share = percent(seconds[largest] / whole if whole else 0.0)
    if language == "zh":
        name = "计算" if largest == "computing" else PART_NAMES["zh"][largest]
        return f"{name}占 {share} 的时间"
    return f"{_LARGEST.get(largest, largest)} takes {share} of the time"


def finding_in_words(finding: Finding, language: Language) -> str:
    """Return a finding as a sentence, which begins with its share of the time."""
    share = percent(finding.share)
    names = ranks_in_words(finding.ranks, finding.hostname, language)
    cause = _CAUSES[language].get(finding.cause or "", "")
    network = _network_in_words(finding.network, language) if finding.network else ""
    if language == "zh":
        return {
            "slow ranks": f"{share} 的时间里所有 rank 都在等待 {names}，{cause}。",
            "turns": f"{share} 的时间里各个 rank 轮流互相等待{_of_turns(finding, language)}。",
            "data": f"{share} 的时间里每个 rank 都在等待数据。",
            "exchange": f"{share} 的时间用于 rank 之间传输数据{network}。",
            "checkpoint": f"{share} 的时间用于写检查点。",
            "shifted": "各 rank 的步数不同，因此无法判断谁在等待谁。",
        }[finding.kind]
    return {
        "slow ranks": f"{share} of the time all wait for {names}, {cause}.",
        "turns": f"{share} of the time ranks wait for one another in turn{_of_turns(finding, language)}.",
        "data": f"{share} of the time every rank waits for its data.",
        "exchange": f"{share} of the time is spent sending data between ranks{network}.",
        "checkpoint": f"{share} of the time is spent writing checkpoints.",
        "shifted": "the ranks have taken different numbers of steps, so that who waits for whom cannot be told.",
    }[finding.kind]


def _of_turns(finding: Finding, language: Language) -> str:
    """Return why ranks wait in turn, if it is known, as the second half of a sentence."""
    if finding.cause is None:
        return ""
    if language == "zh":
        return "，因为它们的处理器还被其他进程占用"
    return ", since other processes use their processors too"


def _network_in_words(network: SlowNetwork, language: Language) -> str:
    """Return which network is slow, as the second half of a sentence."""
    slowest, hosts = network.slowest, network.hosts
    rate, times = speed(slowest.bytes_per_second), f"{network.times_slower:.3g}"
    trip, again = duration(slowest.round_trip_seconds), percent(slowest.resent)
    of_two = {slowest.source, slowest.destination} == set(hosts)
    if language == "zh":
        which = {
            "one way": "从 {} 到 {} 的网络",
            "both ways": "{} 与 {} 之间的网络",
            "from": "从 {} 发出的网络",
            "to": "到 {} 的网络",
            "host": "{} 的网络",
            "all": "{} 与 {} 之间的网络" if of_two else "各主机之间的网络",
        }[network.extent].format(*hosts)
        resent = f"，其中 {again} 需要重发" if slowest.resent >= TOLD_RESENT else ""
        if network.extent == "all":
            return f"；{which}速度为 {rate}{resent}，往返时间 {trip}"
        return f"；{which}速度为 {rate}{resent}，同样多的数据耗时至少是{_others(network, language)}的 {times} 倍"
    which = {
        "one way": "the network from {} to {}",
        "both ways": "the network between {} and {}",
        "from": "the network from {}",
        "to": "the network to {}",
        "host": "the network of {}",
        "all": "the network between {} and {}" if of_two else "the network between hosts",
    }[network.extent].format(*hosts)
    resent = f", {again} of it again" if slowest.resent >= TOLD_RESENT else ""
    if network.extent == "all":
        return f"; {which} sends {rate}{resent}, and a round trip takes {trip}"
    return f"; {which} sends {rate}{resent}, and is at least {times} times as slow as {_others(network, language)}"


def _others(network: SlowNetwork, language: Language) -> str:
    """Return what a slow link is compared with."""
    if network.is_between_two:
        return "the other way" if language == "en" else "反方向"
    return "the others" if language == "en" else "其他链路"


def advice(finding: Finding, language: Language) -> str:
    """Return what to change, as a sentence."""
    told = _ADVICE[language]
    if finding.kind == "slow ranks":
        words = told[finding.cause or "slower"]
    elif finding.kind == "turns" and finding.cause:
        words = told[finding.cause]
    elif finding.network:
        words = told["network" if finding.network.extent == "all" else "slow link"]
    else:
        words = told.get(f"all {finding.kind}") or told[finding.kind]
    return f"{words[0].upper()}{words[1:]}{'。' if language == 'zh' else '.'}"


def gain(finding: Finding, language: Language) -> str:
    """Return how long a step would take without what was found; nothing if no change makes it shorter."""
    if finding.predicted_seconds >= finding.step_seconds:
        return ""
    then, now = duration(finding.predicted_seconds), duration(finding.step_seconds)
    less = percent(1.0 - finding.predicted_seconds / finding.step_seconds)
    if language == "zh":
        condition = f"{_condition(finding.network, language)}，" if finding.network else ""
        return f"{condition}每步 {now} → {then}，减少 {less}"
    condition = f"{_condition(finding.network, language)}, " if finding.network else ""
    return f"{condition}a step would take {then} in place of {now}, {less} less"


def _condition(network: SlowNetwork, language: Language) -> str:
    """Return what a predicted gain assumes of the network."""
    if network.extent == "all":
        return "with half as many bytes, at best" if language == "en" else "若数据量减半，最好的情况下"
    others = _others(network, language)
    return f"if it were as fast as {others}" if language == "en" else f"若它与{others}一样快"


def event_in_words(text: str, language: Language) -> str:
    """Return an event in a language. Errors and warnings are in English, as on the terminal."""
    if language == "en":
        return text
    return _SAVES.sub(lambda found: f"{found[1]}{'已保存' if found[2] == 'saved' else '正在保存'} ", text)


def checkpoint_headline(
    *, num_objects: int, num_tensors: int, num_files: int, world_size: int, size: str, language: Language
) -> str:
    """Return what a checkpoint holds, in one sentence."""
    if language == "zh":
        held = f"{num_objects} 个对象、{num_tensors:,} 个张量，共 {size}"
        return f"{held}，在 {num_files} 个文件里，由 {world_size} 个 rank 写出。"
    objects = _counted(num_objects, "object")
    tensors = _counted(num_tensors, "tensor")
    files, ranks = _counted(num_files, "file"), _counted(world_size, "rank")
    return f"{objects} with {tensors}, {size} in {files}, written by {ranks}."


def mesh_headline(axes: str, num_ranks: int, num_hosts: int, language: Language) -> str:
    """Return what a mesh is, in one sentence."""
    if language == "zh":
        return f"{num_ranks} 个 rank，{num_hosts} 台主机：{axes}。"
    return f"{_counted(num_ranks, 'rank')} on {_counted(num_hosts, 'host')}: {axes}."


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
