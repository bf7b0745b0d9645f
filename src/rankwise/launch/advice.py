# SPDX-License-Identifier: Apache-2.0
"""What to write instead, for the failures that scripts written for other tools are known for.

A table and its lookup: text in, text out. Imported by ``failure``, which shows it below the traceback.
"""

from __future__ import annotations

from rankwise.device.kinds import ASK_FIRST, MISSING_GPU

_NO_NCCL = (
    'NCCL is for GPUs, and this rank sees none: write init_process_group(backend="gloo"), leave the backend out '
    "(torch takes the one that fits), or call rankwise.join(), which chooses by the device"
)
_NO_GPU = (
    f"this rank sees no GPU: {ASK_FIRST}, or use the device that "
    "rankwise.join() decides: `world = rankwise.join(); model.to(world.device)`"
)
_NO_GROUP = (
    "call torch.distributed.init_process_group() before this line; under `rankwise run` it needs no arguments. Or call "
    "rankwise.join(), with rankwise.DataLoader in place of the sampler and rankwise.replicate(model) of the wrapper"
)
_TWICE = (
    "call init_process_group() once per process, and guard a second call by torch.distributed.is_initialized(); "
    "rankwise.join() has opened it already where the script calls that"
)
_UNUSED = (
    "some parameters had no part in the loss: rankwise.replicate(model) needs no flag for that; with "
    "DistributedDataParallel pass find_unused_parameters=True"
)
_PORT_TAKEN = (
    "another process holds the port that the script names: leave init_method out, since `rankwise run` has a port of "
    "its own that init_process_group() finds; a script that starts its own processes runs under `rankwise run -n 1`, "
    "and names a free port in init_method or MASTER_PORT"
)
_HOROVOD = (
    "rankwise has Horovod's calls: start the script by `rankwise horovodrun -np 4 python train.py`, with not a line "
    "changed, or write import rankwise.compat.horovod as hvd"
)
_MEGENGINE = (
    "rankwise has MegEngine's calls for several ranks, on torch's tensors and modules: start the script by "
    "`rankwise run -n 4 -m rankwise.compat.megengine train.py`, or write "
    "import rankwise.compat.megengine.distributed as dist"
)

_NO_STDIN = (
    "there was nothing to read from stdin, and with several ranks there never is: debug with `rankwise run -n 1` in a "
    "terminal, or see where ranks are by `rankwise stacks`; give what a script asks for as an "
    "argument"
)

WHAT_TO_DO = (
    # A torch without NCCL, then two with NCCL on a machine without GPUs.
    ("Distributed package doesn't have NCCL built in", _NO_NCCL),
    ("ProcessGroupNCCL is only supported with GPUs", _NO_NCCL),
    ("nccl2 requires at least one", _NO_NCCL),
    *((words, _NO_GPU) for words in MISSING_GPU),
    (
        "DistributedDataParallel device_ids and output_device arguments only work with",
        "leave device_ids and output_device out for a model on the CPU; rankwise.replicate(model) takes neither",
    ),
    ("Default process group has not been initialized", _NO_GROUP),
    ("trying to initialize the default process group twice", _TWICE),
    ("Expected to have finished reduction in the prior iteration", _UNUSED),
    ("EADDRINUSE", _PORT_TAKEN),
    ("EOFError: EOF when reading a line", _NO_STDIN),
    ("BdbQuit: ", _NO_STDIN),
    ("No module named 'horovod'", _HOROVOD),
    ("No module named 'megengine'", _MEGENGINE),
)
"""Words of the error, mostly torch's, and what mends it; the first row that fits counts."""


def advice_for(error: str) -> str | None:
    """Return what to write instead, or ``None`` where the error is not a known one or says so itself.

    Args:
        error: the exception that ended a rank, as ``ValueError: its message``.
    """
    if "\n  do  " in error:  # as rankwise's own errors end
        return None
    return next((advice for words, advice in WHAT_TO_DO if words in error), None)
