# SPDX-License-Identifier: Apache-2.0
"""A canary per private name of torch: it fails where a version of torch has changed what the name means.

Run it under every tested version of torch: ``PYTHONPATH=src python -m pytest tests/unit/test_torch_private.py``.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import operator
import pickle
import sys
import tempfile
import warnings
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, get_worker_info

import rankwise
from rankwise.errors import TorchTooOld
from rankwise.torch_private import (
    autograd,
    compiler,
    dtensor,
    gradient_totals,
    groups,
    kernels,
    modules,
    processes,
    tensors,
)
from rankwise.torch_private.names import NAMES
from rankwise.world import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CANARIES: dict[str, Callable[[], None]] = {}
SINCE: dict[str, tuple[int, int]] = {}
"""Names whose meaning counts from a release on: what uses them is refused before."""
SHARD = (2, 13)
"""The first release that shard() runs on."""
SPLIT = (2, 11)
"""The first that tensor_parallel() and pipeline() run on."""
FSDP = "torch.distributed.fsdp._fully_shard"
SPEC = "torch.distributed.tensor._dtensor_spec"
SCHEDULES = "torch.distributed.pipelining.schedules"
FAKE = "torch._subclasses.fake_tensor"


def canary(
    *names: str, since: tuple[int, int] = torch_versions.OLDEST
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(check: Callable[[], None]) -> Callable[[], None]:
        CANARIES.update(dict.fromkeys(names, check))
        SINCE.update(dict.fromkeys(names, since))
        return check

    return note


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_private_name_means_what_it_did(name: str) -> None:
    if torch_versions.is_at_least(SINCE[name]):
        CANARIES[name]()
    else:
        strategy = rankwise.shard if SINCE[name] == SHARD else rankwise.tensor_parallel
        with rankwise.join(), pytest.raises(TorchTooOld, match=rf"^rankwise\.{strategy.__name__}\(\) needs "):
            strategy(nn.Linear(2, 2))


def test_every_canary_is_of_a_name_in_the_table() -> None:
    assert sorted(CANARIES) == sorted(NAMES)


@contextmanager
def alone() -> Iterator[None]:
    """Open torch's process group, of this process alone; it sends nothing, and listens nowhere."""
    import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leaf(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes, requires_grad=True)


# -- autograd ------------------------------------------------------------------------------------------


@canary("torch._C._current_graph_task_id")
def check_graph_task() -> None:
    seen: list[int] = []
    x = leaf(2)
    y = x * 2
    y.register_hook(lambda _: seen.append(autograd.graph_task()))
    assert not autograd.in_backward()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(set(seen)) == 2
    assert autograd.NO_GRAPH not in seen
    assert autograd.graph_task() == autograd.NO_GRAPH


@canary("torch._C._autograd._get_current_graph_task_keep_graph")
def check_keeps_graph() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda _: seen.append(autograd.keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [True, False]


@canary("torch.autograd.Variable._execution_engine.queue_callback")
def check_queue_callback() -> None:
    ways = [autograd.run_after_backward, torch.autograd.Variable._execution_engine.queue_callback]
    for run_after_backward in ways:
        order: list[str] = []
        x = leaf(2)

        def queue(_: object, order: list[str] = order, run: Any = run_after_backward) -> None:
            def first() -> None:
                order.append("first")
                # What is queued by a callback runs after those that were queued before.
                run(lambda: order.append("last"))

            run(first)
            run(lambda: order.append("second"))

        y = x * 2
        y.register_hook(queue)
        x.register_hook(lambda _, order=order: order.append("gradient"))
        y.sum().backward()
        assert order == ["gradient", "first", "second", "last"]


@canary("torch.Tensor._version")
def check_version() -> None:
    x = torch.zeros(2)
    before = autograd.version_of(x)
    x.detach().add_(1)
    x[0] = 3
    assert autograd.version_of(x) == before + 2
    _ = x + 1
    assert autograd.version_of(x) == before + 2


@canary(
    "torch.Tensor._backward_hooks", "torch.Tensor._post_accumulate_grad_hooks", "torch._C._will_engine_execute_node"
)
def check_hooks_on_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2))
    found: list[bool] = []
    handle = parameter.register_hook(lambda gradient: 5 * gradient)
    parameter.register_post_accumulate_grad_hook(lambda _: found.append(True))
    changing, following = autograd.hooks_of_gradient(parameter), autograd.hooks_after_accumulation(parameter)
    assert changing is not None
    assert following is not None
    for table in (changing, following):
        (key,) = table
        table[key] = lambda _: found.append(autograd.is_accumulated_now(parameter))
    (2 * parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2]
    torch.autograd.grad((2 * parameter).sum(), parameter)
    assert found == [True, True, False]
    handle.remove()
    assert not changing


@canary(
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
)
def check_hooks_of_modules() -> None:
    module, called = nn.Linear(2, 1), []
    module.register_full_backward_hook(lambda *_: called.append("own"))
    module.register_full_backward_pre_hook(lambda *_: called.append("own"))
    for number, table in enumerate(modules.backward_hooks(module)):
        (key,) = table
        table[key] = lambda *_, number=number: called.append(number)
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert called == [1, 0]
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    assert len(list(modules.hooks_of(module))) == 4


@canary("torch.Tensor._is_view")
def check_is_view() -> None:
    x = leaf(2) * 1
    assert autograd.is_view(x[:1])
    assert not autograd.is_view(x)
    assert not autograd.is_view(x[:1].clone())


@canary(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
)
def check_saved_tensors_hooks() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    assert autograd.innermost_saved_tensors_hooks() is None
    x = leaf(2)
    autograd.push_saved_tensors_hooks(pack, packed.__getitem__)
    try:
        innermost = autograd.innermost_saved_tensors_hooks()
        y = x.exp()
    finally:
        autograd.pop_saved_tensors_hooks()
    assert innermost is not None
    assert innermost[0] is pack
    assert len(packed) == 1
    assert autograd.innermost_saved_tensors_hooks() is None
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


# -- graph ---------------------------------------------------------------------------------------------

NODE = "torch.autograd.graph.Node"


@canary(f"{NODE}._input_metadata", f"{NODE}._saved_reduction", f"{NODE}._saved_total_weight")
def check_loss_functions() -> None:
    scores, weights = leaf(4, 3), torch.tensor([1.0, 2.0, 4.0])
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2, 2]), weight=weights)
    assert loss.grad_fn is not None
    assert autograd.saved(loss.grad_fn, "reduction") == 1
    assert autograd.saved(loss.grad_fn, "total_weight").item() == 11
    below, number = loss.grad_fn.next_functions[0]
    assert below is not None
    assert autograd.shape_of((below, number)) == (4, 3)
    total = torch.nn.functional.mse_loss(scores, torch.zeros(4, 3), reduction="sum")
    assert total.grad_fn is not None
    assert autograd.saved(total.grad_fn, "reduction") == 2
    assert autograd.saved(total.grad_fn, "total_weight") is None


@canary(f"{NODE}._saved_self_sym_sizes")
def check_sizes_of_what_is_reduced() -> None:
    x = leaf(4, 3)
    reduced = (x.sum(), x.sum(1), x.mean(), x.mean(0, keepdim=True))
    found = [autograd.saved(one.grad_fn, "self_sizes") for one in reduced if one.grad_fn is not None]
    assert found == [(4, 3)] * 4


@canary(f"{NODE}._saved_dim", f"{NODE}._saved_other", f"{NODE}._saved_self", f"{NODE}._saved_condition")
def check_what_operations_save() -> None:
    x, other, mask = leaf(4, 3), torch.tensor(5.0), torch.tensor([True, False, True])
    found = [
        autograd.saved(node, name)
        for node, name in (
            (x.sum(1).grad_fn, "dim"),
            ((x / other).grad_fn, "other"),
            ((other * x).grad_fn, "self"),
            (torch.where(mask, x, 0.0).grad_fn, "condition"),
        )
        if node is not None
    ]
    assert found[0] == (1,)
    assert [torch.equal(got, expected) for got, expected in zip(found[1:], (other, other, mask), strict=True)] == [
        True
    ] * 3


@canary("torch.autograd.Function._forward_cls")
def check_functions_of_python() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    # Before torch 2.12 a node of Python has no name any more once its output is gone.
    outputs = [Same.apply(leaf(2)), leaf(2).exp()]  # type: ignore[no-untyped-call]
    assert [autograd.is_of_python(one.grad_fn) for one in outputs] == [True, False]


# -- compiler ------------------------------------------------------------------------------------------


@canary("torch._disable_dynamo", "torch._dynamo")
def check_uncompiled() -> None:
    def fn(x: int) -> int:
        return x + 1

    uncompiled = compiler.uncompiled(fn)
    assert uncompiled(1) == 2
    compiler.import_compiler()
    assert "torch._dynamo" in sys.modules
    # Now by way of the compiler's own.
    assert uncompiled(1) == 2


@canary("torch.autograd.forward_ad._current_level")
def check_forward_mode() -> None:
    assert not compiler.is_transforming()
    with forward_ad.dual_level():
        assert compiler.is_transforming()
    assert not compiler.is_transforming()


@canary("torch._C._functorch.peek_interpreter_stack")
def check_transforms() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(compiler.is_transforming())
        return x.square()

    square(torch.ones(()))
    torch.func.grad(square)(torch.ones(()))
    torch.func.vmap(square)(torch.ones(2))
    assert seen == [False, True, True]


@canary("torch._dynamo.eval_frame.OptimizedModule._orig_mod")
def check_module_within() -> None:
    module = nn.Linear(2, 2)
    assert compiler.module_within(torch.compile(module, backend="eager")) is module
    assert compiler.module_within(module) is None


@canary("torch._dynamo.eval_frame.cached_backends")
def check_compiles_code() -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")
    assert compiler.compiles_code()


@canary(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
)
def check_skipped_wrapper() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    from torch._dynamo.utils import counters

    before = counters["frames"]["total"]
    torch.compile(compiler.uncompiled(double), backend="eager")(torch.ones(2))
    assert counters["frames"]["total"] == before


@canary("torch.nn.parallel.DistributedDataParallel._active_ddp_module")
def check_graph_split() -> None:
    graphs: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    split = compiler.GraphSplit(2**20)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    split.begin()
    try:
        torch.compile(model, backend=backend)(torch.ones(1, 512))
    finally:
        split.end()
    assert len(graphs) == 2
    torch.compiler.reset()
    torch.compile(model, backend=backend)(torch.ones(1, 512))
    assert len(graphs) == 3


@canary("torch._inductor.config.fallback_random")
def check_fallback_random() -> None:
    from torch._inductor import config

    assert config.fallback_random is False
    assert f"{config.__name__}.fallback_random" == compiler.OWN_RANDOMNESS_OFF


# -- kernels -------------------------------------------------------------------------------------------


@canary(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_key_for_device",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
    "torch.library.Library._destroy",
)
def check_kernels() -> None:
    assert kernels.dispatch_key("cpu") == "CPU"
    assert kernels.kernel_of("dropout", "CPU") is None
    original = kernels.kernel_of("random_.to", "CPU")
    assert original is not None
    torch.manual_seed(0)
    drawn = original(torch.empty(3), 100)
    replacements = kernels.Replacements()
    replacements.replace("random_.to", "CPU", lambda out, *_, generator=None: out.fill_(7))
    assert torch.empty(3).random_(100).tolist() == [7.0, 7.0, 7.0]
    replacements.put_back()
    torch.manual_seed(0)
    assert torch.equal(torch.empty(3).random_(100), drawn)


# -- foreach -------------------------------------------------------------------------------------------


@canary(*(f"torch._foreach_{word}_" for word in ("copy", "zero", "add", "sub", "mul", "div")))
def check_foreach() -> None:
    some = [torch.ones(2), torch.ones(3)]
    others = [torch.full((2,), 4.0), torch.full((3,), 5.0)]
    for act, expected in (
        (lambda: tensors.foreach_copy_(some, others), [4.0, 5.0]),
        (lambda: tensors.foreach_mul_(some, 3), [12.0, 15.0]),
        (lambda: tensors.foreach_add_(some, others), [16.0, 20.0]),
        (lambda: tensors.foreach_add_(some, others, alpha=-0.5), [14.0, 17.5]),
        (lambda: tensors.foreach_sub_(some, others), [10.0, 12.5]),
        (lambda: tensors.foreach_div_(some, 2.5), [4.0, 5.0]),
        (lambda: tensors.foreach_zero_(some), [0.0, 0.0]),
    ):
        act()
        assert [one.unique().tolist() for one in some] == [[value] for value in expected]


# -- streams -------------------------------------------------------------------------------------------


@canary("torch._C._accelerator_getStream")
def check_stream_of() -> None:
    """Without an accelerator it says so; the tests of the stand-in device call it with one."""
    assert kernels.stream_of is torch._C._accelerator_getStream
    with pytest.raises(RuntimeError, match=r"accelerator|driver"):
        kernels.stream_of(0)


# -- groups --------------------------------------------------------------------------------------------


@canary("torch.distributed.distributed_c10d._world.pg_map")
def check_open_groups() -> None:
    assert groups.open_groups() == []
    with alone():
        own = dist.new_group([0])
        assert own in groups.open_groups()
        assert dist.group.WORLD in groups.open_groups()


@canary(
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroupNCCL._group_start",
    "torch.distributed.ProcessGroupNCCL._group_end",
)
def check_abort() -> None:
    with alone():
        own = dist.new_group([0])
        assert isinstance(own, dist.ProcessGroup)
        assert torch.device("cpu") in own._device_types
        assert callable(own._get_backend(torch.device("cpu")).abort)
        groups.abort_groups()  # None is on a device.
        dist.barrier()
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    assert nccl is None or (callable(nccl._group_start) and callable(nccl._group_end))


@canary(
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.distributed_c10d._world.group_count",
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
)
def check_names_of_groups() -> None:
    assert groups._COUNTS_CALLS is (torch_versions.is_at_least((2, 14)))
    with alone():
        name_of = dist.distributed_c10d._hash_ranks_to_str
        counted = dist.distributed_c10d._world.group_count
        before = name_of([0])
        number = groups.next_number() + 2
        group = groups.open_among([0], 0, number)
        assert group in groups.open_groups()
        assert groups.next_number() > number
        # Another group of the same ranks has another name, and the count that all ranks must share is as it was.
        assert dist.distributed_c10d._world.pg_names[group] != before
        assert groups.open_among([0], 0, groups.next_number()) is not group
        assert dist.distributed_c10d._world.group_count == counted


def test_a_group_of_some_ranks_is_not_split_from_a_world_that_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch splits a group only while the world's group is bound; the new group is bound by itself."""
    opened: list[tuple[object, object]] = []
    device = torch.device("cuda", 1)

    def new_group(_: list[int], *, use_local_synchronization: bool, device_id: object = None) -> None:
        assert use_local_synchronization
        assert dist.group.WORLD is not None
        opened.append((dist.group.WORLD.bound_device_id, device_id))

    with alone():
        monkeypatch.setattr(dist, "new_group", new_group)
        groups.open_among([0], 0, 0)
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = device
        groups.open_among([0], 0, 0)
        assert dist.group.WORLD.bound_device_id == device
        with groups.mesh_groups():
            assert dist.group.WORLD.bound_device_id == (device if groups._COUNTS_CALLS else None)
        assert dist.group.WORLD.bound_device_id == device
        dist.group.WORLD.bound_device_id = None
    assert opened == [(None, None), (None, device)]


@canary("torch.distributed.rendezvous._rendezvous_handlers")
def check_rendezvous() -> None:
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    before = handlers["env"]
    store = dist.HashStore()

    def handler(url: str, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
        assert url.startswith("env:")
        yield store, 0, 1

    processes.replace_handler("env", handler)
    try:
        dist.init_process_group("gloo", init_method="env://", rank=0, world_size=1)
        dist.destroy_process_group()
    finally:
        processes.replace_handler("env", before)


# -- loader --------------------------------------------------------------------------------------------


@canary("torch.utils.data.dataloader._BaseDataLoaderIter.__next__")
def check_next() -> None:
    seen: list[object] = []

    def wrap(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(iterator: object) -> object:
            seen.append(batch := inner(iterator))
            return batch

        return call

    undo = processes.wrap_next(wrap)
    try:
        assert list(DataLoader([1, 2], batch_size=None)) == seen == [1, 2]
    finally:
        undo()
    assert list(DataLoader([3], batch_size=None)) == [3]
    assert seen == [1, 2]


@canary(
    "torch.utils.data.DataLoader._iterator",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers",
)
def check_workers() -> None:
    data = DataLoader(range(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    with warnings.catch_warnings():
        # From Python 3.12 on, of a fork beside torch's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        iterator = iter(data)
        assert int(next(iterator)) == 0
        (process,) = processes.workers_of(iterator)
        assert process.is_alive()
        processes.end_workers(iterator)
        assert process.exitcode is not None
        processes.forget_iterator(data)
        again = iter(data)
        assert again is not iterator
        assert [int(one) for one in again] == [0, 1, 2, 3]
        processes.end_workers(again)


@canary("torch.utils.data._utils.worker._worker_info")
def check_worker_info() -> None:
    info = object()
    processes.show_worker(info)
    try:
        assert get_worker_info() is info
    finally:
        processes.show_worker(None)
    assert get_worker_info() is None


# -- modes ---------------------------------------------------------------------------------------------


@canary(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    "torch._ops.OpOverload",
)
def check_dispatch_mode() -> None:
    seen: list[object] = []

    class Mode(kernels.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert kernels.innermost_dispatch_mode() is None
    with Mode() as mode:
        assert kernels.innermost_dispatch_mode() is mode
        torch.rand(2)
        torch.ones(2)
    assert all(isinstance(one, kernels.Operator) for one in seen)
    assert [torch.Tag.nondeterministic_seeded in one.tags for one in seen] == [True, False]


@canary(
    "torch._C._pop_torch_function_stack",
    "torch._C._push_on_torch_function_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._get_function_stack_at",
)
def check_function_modes() -> None:
    seen: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    outer, inner = Mode(), Mode()
    x = torch.ones(2)
    assert not kernels.is_innermost(outer)
    with outer:
        assert kernels.is_innermost(outer)
        kernels.pop_function_mode()
        torch.add(x, x)
        kernels.push_function_mode(outer)
        torch.mul(x, x)
        with inner:
            assert kernels.is_innermost(inner)
            assert not kernels.is_innermost(outer)
    assert seen == [torch.mul]


# -- modules -------------------------------------------------------------------------------------------


@canary("torch.nn.Module._parameters", "torch.nn.Module._buffers", "torch.nn.Module._modules")
def check_tables() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norm = model[0]
    assert list(modules.own_parameters(norm)) == ["weight", "bias"]
    assert list(modules.own_buffers(norm)) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(modules.own_modules(model).values()) == [norm]
    modules.own_parameters(norm)["weight"] = weight = nn.Parameter(torch.ones(2))
    modules.own_buffers(norm)["running_mean"] = mean = torch.ones(2)
    assert norm.weight is weight
    assert norm.running_mean is mean
    model.append(nn.ReLU())
    assert list(modules.own_modules(model)) == ["0", "1"]
    shallow = copy.copy(norm)
    modules.replace_buffers(shallow, {"running_mean": torch.zeros(2)})
    assert norm.running_mean is mean


@canary("torch.nn.Module._compiled_call_impl", "torch.nn.Module._call_impl")
def check_wrapped_call() -> None:
    module = nn.Identity()
    seen: list[str] = []

    def wrapper(x: int) -> Any:
        seen.append("wrapper")
        return modules.unwrapped_call(module, x)

    module.register_forward_hook(lambda *_: seen.append("hook"))
    modules.wrap_call(module, wrapper)
    modules.wrap_call(module, lambda x: seen.append("second"))
    assert module(3) == 3
    assert seen == ["wrapper", "hook"]
    seen.clear()
    assert copy.deepcopy(nn.Sequential(module))[0](4) == 4
    plain = nn.Identity()
    modules.wrap_call(plain, wrapper)
    assert pickle.loads(pickle.dumps(plain))(5) == 5  # noqa: S301 - its own
    assert seen == ["hook"]


@canary("torch.nn.Module.state_dict._metadata")
def check_metadata() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    metadata = modules.metadata_of(state)
    assert isinstance(metadata, dict)
    assert metadata["0"] == {"version": 2}
    assert modules.metadata_of({}) is None
    # Before version 2 there was no num_batches_tracked, and load_state_dict does not ask for it.
    del state["0.num_batches_tracked"]
    modules.set_metadata(state, {**metadata, "0": {"version": 1}})
    nn.Sequential(nn.BatchNorm1d(2)).load_state_dict(state)


@canary("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX")
def check_extra_state() -> None:
    class Module(nn.Module):
        def get_extra_state(self) -> int:
            return 3

    assert nn.Sequential(Module()).state_dict() == {f"0.{modules.EXTRA_STATE}": 3}


@canary("torch.nn.modules.module._has_any_global_hook")
def check_hooks_of_all() -> None:
    assert not modules.has_hooks_of_all()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert modules.has_hooks_of_all()
    assert not modules.has_hooks_of_all()


@canary("torch.nn.modules.batchnorm._BatchNorm", "torch.nn.modules.batchnorm._BatchNorm._check_input_dim")
def check_batchnorm() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)
    assert all(issubclass(kind, modules.BatchNorm) for kind in kinds)
    assert not issubclass(nn.InstanceNorm1d, modules.BatchNorm)
    modules.check_input_dim(nn.BatchNorm2d(2), torch.ones(1, 2, 3, 3))
    with pytest.raises(ValueError, match="expected 4D"):
        modules.check_input_dim(nn.BatchNorm2d(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="at least 2"):
        # Its own forward asks as well.
        modules.AnySizeBatchNorm(2)(torch.ones(2))


@canary("torch.nn.RNNBase._flat_weight_refs", "torch.nn.RNNBase._init_flat_weights")
def check_recurrent() -> None:
    layer = nn.LSTM(2, 2)
    layer(torch.ones(1, 1, 2))
    old = layer.weight_ih_l0
    new = nn.Parameter(torch.zeros_like(old))
    assert any(one() is old for one in layer._flat_weight_refs)
    modules.forget_flat_weights(layer)
    torch.utils.swap_tensors(old, new)
    modules.update_flat_weights(layer)
    assert any(one() is layer.weight_ih_l0 for one in layer._flat_weight_refs)
    modules.own_parameters(layer)["weight_hh_l0"] = nn.Parameter(torch.full((8, 2), 7.0))
    modules.update_flat_weights(layer)
    assert any(one() is layer.weight_hh_l0 for one in layer._flat_weight_refs)


# -- optimizers ----------------------------------------------------------------------------------------


@canary("torch.optim.Optimizer._optimizer_step_pre_hooks", "torch.optim.Optimizer._optimizer_step_post_hooks")
def check_step_hooks() -> None:
    weight = leaf(2)
    optimizer = torch.optim.SGD([weight], 0.1)
    order: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: order.append("own before"))
    optimizer.register_step_pre_hook(lambda *_: order.append("before"))
    optimizer.register_step_post_hook(lambda *_: order.append("after"))
    after = optimizer.register_step_post_hook(lambda *_: order.append("own after"))
    modules.put_innermost(optimizer, before, after)
    optimizer.step()
    assert order == ["before", "own before", "own after", "after"]


@canary("torch.optim.Optimizer._opt_called", "torch.optim.Optimizer.step._wrapped_by_lr_sched")
def check_optimizer() -> None:
    from types import MethodType

    def step(self: torch.optim.Optimizer) -> None: ...

    for is_marked in (True, False):
        optimizer = torch.optim.SGD([leaf(2)], 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def own(self: torch.optim.Optimizer) -> None: ...

        if is_marked:
            modules.mark_step(optimizer, own)
        optimizer.step = MethodType(own, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert bool(caught) is not is_marked


# -- gradient totals -----------------------------------------------------------------------------------


@canary(
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.amp.GradScaler._unscale_grads_",
    "torch.amp.GradScaler._check_scale_growth_tracker",
    "torch.amp.GradScaler._scale",
    since=SPLIT,
)
def check_gradient_totals() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    begun: list[bool] = []
    found: list[float] = []

    def complete(given: torch.optim.Optimizer, by_device: modules.Found) -> modules.Found:
        assert given is optimizer
        found.append(float(by_device[weight.device]))
        return {weight.device: torch.ones(())}

    gradient_totals.replace_norm(lambda tensors, *_: gradient_totals.total_norm(tensors) * 2)
    gradient_totals.replace_scaler(complete, lambda one: begun.append(gradient_totals.has_scaled(one)))
    try:
        assert clip_grad_norm_([weight], 5.0).item() == nn.utils.get_total_norm([torch.tensor(10.0)]).item() / 2 == 10
        torch.testing.assert_close(weight.grad, torch.tensor([1.5, 2.0]))
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.unscale_(optimizer)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert weight.tolist() == [3.0, 4.0], "skipped"
        scaler.update()
        assert scaler.get_scale() == 4
        assert (begun, found) == ([False, True, True, True], [0.0])
    finally:
        gradient_totals.restore()
    assert nn.utils.get_total_norm([torch.tensor(10.0)]).item() == 10
    scaler.step(optimizer)
    assert len(begun) == 4
    assert weight.tolist() != [3.0, 4.0]


# -- saving --------------------------------------------------------------------------------------------


@canary("torch.serialization._open_zipfile_writer_file")
def check_saving() -> None:
    opened: list[str] = []
    stop = processes.on_save(opened.append)
    try:
        with tempfile.TemporaryDirectory() as folder:
            value = {"a": torch.arange(3)}
            names = [f"{folder}/plain", Path(folder) / "path", f"{folder}/ä"]
            for name in names:
                torch.save(value, name)
                assert torch.equal(torch.load(name)["a"], value["a"])
            torch.save(value, io.BytesIO())
            assert opened == list(map(str, names))
            stop()
            torch.save(value, names[0])
            assert len(opened) == 3
    finally:
        stop()


# -- tensors -------------------------------------------------------------------------------------------


@canary("torch.UntypedStorage._cdata")
def check_memory_key() -> None:
    x = torch.empty(4, device="meta")
    assert tensors.memory_key(x) == tensors.memory_key(x[1:])
    assert tensors.memory_key(x) != tensors.memory_key(torch.empty(4, device="meta"))


@canary("torch.storage.TypedStorage._untyped_storage", "torch.storage.TypedStorage._internal")
def check_typed_storage() -> None:
    storage = torch.arange(3).untyped_storage()
    typed = tensors.typed_storage(storage, torch.int64)
    assert type(typed) is torch.storage.TypedStorage
    assert tensors.untyped_storage_of(typed).data_ptr() == storage.data_ptr()


@canary("torch.Tensor._indices", "torch.Tensor._values")
def check_sparse() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.12 warns of checks that are off, also where they are on
        x = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    assert not x.is_coalesced()
    assert tensors.sparse_indices(x).tolist() == [[1, 1]]
    assert tensors.sparse_values(x).tolist() == [2.0, 3.0]


@canary("torch.Tensor._is_zerotensor")
def check_zero_tensor() -> None:
    assert tensors.is_zero_tensor(torch._efficientzerotensor(2))
    assert not tensors.is_zero_tensor(torch.zeros(2))


@canary("torch.Tensor._is_param")
def check_is_param() -> None:
    x = torch.ones(2)
    assert not isinstance(x, nn.Parameter)
    tensors.mark_as_parameter(x)
    assert isinstance(x, nn.Parameter)


@canary("torch._has_compatible_shallow_copy_type")
def check_can_take_data() -> None:
    x = torch.ones(2)
    assert tensors.can_take_data(x, torch.ones(3, dtype=torch.float64))
    assert not tensors.can_take_data(torch.empty(2, device="meta"), x.to_sparse())


# -- trees ---------------------------------------------------------------------------------------------


@canary(*(f"torch.utils._pytree.{word}" for word in (
    "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"
)))  # fmt: skip
def check_tree() -> None:
    value = {"a": [1, 2.0], "b": (None, 3)}
    leaves, spec = tensors.tree_flatten(value)
    assert leaves == tensors.tree_leaves(value) == [1, 2.0, None, 3]
    assert isinstance(spec, tensors.TreeSpec)
    assert tensors.tree_unflatten(leaves, spec) == value
    assert spec == tensors.tree_flatten({"a": [0, 0], "b": (0, 0)})[1]
    assert spec != tensors.tree_flatten({"a": [0, 0], "b": [0, 0]})[1]
    assert tensors.tree_map(lambda one: 0, value) == {"a": [0, 0], "b": (0, 0)}
    assert tensors.tree_map_only(float, operator.neg, value) == {"a": [1, -2.0], "b": (None, 3)}


@canary("torch.utils._pytree")
def check_tree_logger() -> None:
    assert inspect.getmodule(tensors.tree_flatten).__name__ == tensors.TREE_LOGGER
    if torch_versions.is_at_least((2, 12)):  # before, it logs nothing
        assert tensors.TREE_LOGGER in logging.root.manager.loggerDict


# -- DTensor -------------------------------------------------------------------------------------------


@canary(
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._spec",
    f"{SPEC}.DTensorSpec",
    f"{SPEC}.DTensorSpec.use_strided_shard_as_shard_order",
    f"{SPEC}.TensorMeta",
)
@alone()
def check_dtensor() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = dist.init_device_mesh("cpu", (1,))
    # Of its one part: distribute_tensor scatters in torch 2.12, which this group only pretends to do.
    x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    assert dtensor.own_part(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    undo = dtensor.replace_operations({"neg.default": lambda _, tensor: tensor + 1})
    assert (-x).to_local()[0, 0] == 1
    undo()
    assert (-x).to_local()[1, 2] == -5
    assert dtensor.own_part(x).data_ptr() == x.to_local().data_ptr()
    plain = torch.ones(2)
    assert dtensor.own_part(plain) is plain
    part = torch.empty(2, 3, device="meta")
    like = dtensor.placed_like(x, part, requires_grad=True)
    assert (like.shape, like.placements, like.requires_grad) == (x.shape, x.placements, True)
    assert dtensor.own_part(like) is part
    same = dtensor.placed_as_shaped(x, part.double(), (2, 3))
    assert (same.placements, same.dtype, same.stride()) == ((Shard(0),), torch.float64, (3, 1))
    other = dtensor.placed_as_shaped(x, torch.empty(4), (4,))
    assert (tuple(other.shape), other.placements) == ((4,), (Replicate(),))


@canary(
    f"{SPEC}.DTensorSpec.shard_order",
    f"{SPEC}.ShardOrderEntry.tensor_dim",
    f"{SPEC}.ShardOrderEntry.mesh_dims",
    "torch.distributed.tensor.placement_types._StridedShard.split_factor",
    since=SPLIT,
)
@alone()
def check_shard_order() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = dist.init_device_mesh("cpu", (1, 1))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Shard(1)])
    assert list(dtensor.shard_orders(x)) == [(1, [0, 1])]
    assert dtensor.split_factor(x.placements[0]) == 1
    assert dtensor.split_factor(_StridedShard(0, split_factor=2)) == 2
    assert dtensor.split_factor(Replicate()) == 1


# -- pipelining ----------------------------------------------------------------------------------------


@canary(
    f"{SCHEDULES}._Action",
    f"{SCHEDULES}._Action.computation_type",
    f"{SCHEDULES}._Action.stage_index",
    f"{SCHEDULES}._Action.microbatch_index",
    f"{SCHEDULES}._ComputationType",
    f"{SCHEDULES}._add_send_recv",
    since=SPLIT,
)
def check_actions() -> None:
    order = {stage: [autograd.forward_action(stage, 0), autograd.backward_action(stage, 0)] for stage in (0, 1)}
    whole = autograd.with_sends(order, stage_to_rank=lambda stage: stage, num_stages=2)
    told = {rank: [autograd.read_action(one) for one in actions] for rank, actions in whole.items()}
    assert told == {
        0: [("F", 0, 0), ("SEND_F", 0, 0), ("RECV_B", 0, 0), ("B", 0, 0)],
        1: [("RECV_F", 1, 0), ("F", 1, 0), ("B", 1, 0), ("SEND_B", 1, 0)],
    }


@canary(
    "torch.distributed.pipelining._backward.stage_backward_input",
    "torch.distributed.pipelining._backward.stage_backward_weight",
)
def check_backward_in_two_parts() -> None:
    layer = nn.Linear(2, 2, bias=False)
    x = leaf(3, 2)
    gradient = torch.rand(3, 2)
    inputs, left = autograd.backward_of_inputs([layer(x)], [gradient], [x], iter(layer.parameters()))
    torch.testing.assert_close(inputs[0], gradient @ layer.weight)
    assert layer.weight.grad is None
    autograd.backward_of_weights(iter(layer.parameters()), left)
    torch.testing.assert_close(layer.weight.grad, gradient.T @ x.detach())


# -- fake tensors --------------------------------------------------------------------------------------


@cache
def define_unknown_operator() -> torch.library.Library:
    """Define an operator that fake tensors know nothing of. Kept: a name can be defined once."""
    library = torch.library.Library("rankwise_canary", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x.clone(), "CPU")
    return library


@canary(
    f"{FAKE}.FakeTensorMode",
    f"{FAKE}.FakeTensorMode.from_tensor",
    f"{FAKE}.FakeTensor",
    f"{FAKE}.DataDependentOutputException",
    f"{FAKE}.DynamicOutputShapeException",
    f"{FAKE}.UnsupportedOperatorException",
    f"{FAKE}.unset_fake_temporarily",
)
def check_fake() -> None:
    from rankwise.torch_private import fake

    define_unknown_operator()
    mode = fake.fake_tensors()
    x = fake.fake_of(mode, torch.ones(2, 3))
    assert isinstance(x, fake.FakeTensor)
    with mode:
        y = x @ torch.ones(3, 4)
        assert isinstance(torch.empty(2), fake.FakeTensor)
        with fake.outside_fake():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        with pytest.raises(fake.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(fake.DynamicOutputShapeException):
            x.nonzero()
        with pytest.raises(fake.UnsupportedOperatorException):
            torch.ops.rankwise_canary.unknown(x)
    assert isinstance(y, fake.FakeTensor)
    assert (tuple(y.shape), y.device.type) == ((2, 4), "cpu")


# -- FSDP ----------------------------------------------------------------------------------------------


@canary(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    f"{FSDP}._fsdp_state.FSDPState._fsdp_param_groups",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_backward",
    f"{FSDP}._fsdp_param.FSDPParam",
    f"{FSDP}._fsdp_param.FSDPParam.sharded_param",
    f"{FSDP}._fsdp_param.FSDPParam._unsharded_param",
    f"{FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad",
    f"{FSDP}._fsdp_param.FSDPParam.reduce_dtype",
    since=SHARD,
)
@alone()
def check_fsdp() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from rankwise.torch_private import fsdp

    calls: list[str] = []
    mesh = dist.init_device_mesh("cpu", (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh, mp_policy=precision)
    (group,) = fsdp.groups_of(model)
    assert isinstance(group, fsdp.FSDPParamGroup)
    (one,) = fsdp.params_of(group)
    assert isinstance(one, fsdp.FSDPParam)
    assert fsdp.sharded_of(one) is model.weight
    assert fsdp.whole_of(one) is None
    fsdp.forget_gradient(one)

    def before(_: object) -> None:
        calls.append("before")
        whole = fsdp.whole_of(one)
        assert (whole.dtype, tuple(whole.shape)) == (torch.bfloat16, (2, 2))
        assert whole.grad.unique().tolist() == [3.0]
        # Wider than the parameter, and not a number that bfloat16 has.
        fsdp.reduce_instead(one, torch.full((2, 2), 1.0009765625))

    fsdp.call_before_reduction(group, before)
    model(torch.ones(3, 2)).sum().backward()
    assert calls == ["before"]
    assert fsdp.reduce_dtype_of(one) is torch.float32
    assert model.weight.grad.to_local().unique().tolist() == [1.0009765625]
    assert fsdp.whole_of(one).grad is None


@canary(
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.pre_forward",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_forward",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.is_unsharded",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.reshard",
    since=SHARD,
)
@alone()
def check_what_a_group_keeps_after_forward() -> None:
    from torch.distributed.fsdp import fully_shard

    from rankwise.torch_private import fsdp

    mesh = dist.init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Linear(2, 1, bias=False), mesh=mesh, reshard_after_forward=False)
    shard = model.weight
    (group,) = fsdp.groups_of(model)
    calls: list[object] = []
    fsdp.call_around_forward(group, calls.append, calls.append)
    for value in (1.0, 2.0):
        nn.init.constant_(shard, value)
        output = model(torch.ones(1, 2))
        assert output.tolist() == [[2 * value]]
        assert fsdp.shards_of_gathered(group) == {id(model.weight): shard}
        if value == 1.0:
            fsdp.free_gathered(group)
            assert model.weight is shard
    assert calls == [model] * 4
    output.sum().backward()
    assert fsdp.shards_of_gathered(group) == {}
    assert shard.grad.to_local().tolist() == [[1.0, 1.0]]


@canary(f"{FSDP}._fsdp_param_group.RegisterPostBackwardFunction")
@alone()
def check_the_node_of_a_block() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=dist.init_device_mesh("cpu", (1,)))
    nodes = [model(leaf(3, 2).exp()).grad_fn]
    for node in nodes:
        nodes += [one for one, _ in node.next_functions if one is not None]
    (of_block,) = [node for node in nodes if node.name() == autograd.OF_BLOCK]
    assert hasattr(of_block, "_forward_cls")
    assert not autograd.is_of_python(of_block)


@canary(f"{FSDP}._fsdp_api.AllGather", f"{FSDP}._fsdp_api.ReduceScatter")
def check_fsdp_communication() -> None:
    from rankwise.torch_private import fsdp

    # One rank has nothing to gather: tests/multiprocess/test_shard.py has torch call these.
    for kind, words in (
        (fsdp.AllGather, ["self", "output_tensor", "input_tensor", "group", "async_op"]),
        (fsdp.ReduceScatter, ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]),
    ):
        assert list(inspect.signature(kind.__call__).parameters) == words
        assert list(inspect.signature(kind.allocate).parameters) == ["self", "size", "dtype", "device"]
        assert inspect.isabstract(kind)
