# SPDX-License-Identifier: Apache-2.0
"""The table of torch's private names: the purpose of each, and the tested version of torch that introduced it.

Data alone. ``tests/unit/test_torch_private.py`` exercises each name; ``tests/unit/test_private_names.py`` holds the
table to what this room uses, and the other rooms to using none of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch, or a member of something private."""

    name: str
    """The dotted path to it."""
    purpose: str
    since: str
    """The first tested version that has it; ``<=2.12``: the oldest tested one."""


_OLDEST = "<=2.12"
_FSDP = "torch.distributed.fsdp._fully_shard"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_FAKE = "torch._subclasses.fake_tensor"
_SPEC = "torch.distributed.tensor._dtensor_spec"

NAMES = tuple(
    PrivateName(name, purpose, since)
    for name, purpose, since in (
        # autograd
        ("torch._C._current_graph_task_id", "whether backward runs, and which one", _OLDEST),
        (
            "torch.autograd.Variable._execution_engine.queue_callback",
            "run a function after backward; torch.autograd.graph.queue_callback from 2.15 on",
            _OLDEST,
        ),
        ("torch.Tensor._version", "detect in-place changes", _OLDEST),
        ("torch.Tensor._is_view", "whether autograd tracks a tensor as a view", _OLDEST),
        ("torch._C._autograd._push_saved_tensors_default_hooks", "enter hooks without a with statement", _OLDEST),
        ("torch._C._autograd._pop_saved_tensors_default_hooks", "leave them", _OLDEST),
        ("torch._C._autograd._top_saved_tensors_default_hooks", "call the hooks around one's own", _OLDEST),
        # compiler
        ("torch._disable_dynamo", "torch.compiler.disable without importing the compiler", _OLDEST),
        ("torch._dynamo", "whether the compiler is imported; import it before ranks are forked", _OLDEST),
        ("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "the module that torch.compile wrapped", _OLDEST),
        ("torch._inductor.config.fallback_random", "named in messages: random numbers in compiled code", _OLDEST),
        # foreach
        ("torch._foreach_copy_", "copy many tensors in one call", _OLDEST),
        ("torch._foreach_zero_", "fill many tensors with zeros in one call", _OLDEST),
        ("torch._foreach_add_", "add many tensors in one call", _OLDEST),
        ("torch._foreach_sub_", "subtract many tensors in one call", _OLDEST),
        ("torch._foreach_mul_", "multiply many tensors in one call", _OLDEST),
        ("torch._foreach_div_", "divide many tensors in one call", _OLDEST),
        ("torch.autograd.graph.Node._input_metadata", "shapes of the outputs of a node of the graph", _OLDEST),
        ("torch.autograd.Function._forward_cls", "whether the backward of a node is written in Python", _OLDEST),
        ("torch.autograd.graph.Node._saved_reduction", "whether a loss function takes a mean or a sum", _OLDEST),
        ("torch.autograd.graph.Node._saved_total_weight", "what a cross entropy averages over", _OLDEST),
        ("torch.autograd.graph.Node._saved_dim", "the dims that an operation acts along", _OLDEST),
        ("torch.autograd.graph.Node._saved_self_sym_sizes", "the shape of the reduced tensor", _OLDEST),
        ("torch.autograd.graph.Node._saved_other", "the factor or divisor of a term of a loss", _OLDEST),
        ("torch.autograd.graph.Node._saved_self", "the factor, where it comes first", _OLDEST),
        ("torch.autograd.graph.Node._saved_condition", "the mask of torch.where", _OLDEST),
        # groups
        ("torch.distributed.distributed_c10d._world.pg_map", "the open process groups", _OLDEST),
        (
            "torch.distributed.distributed_c10d._world.pg_names",
            "the number in the name of a group, before 2.14",
            _OLDEST,
        ),
        ("torch.distributed.distributed_c10d._world.group_count", "the same, from 2.14 on", _OLDEST),
        ("torch.distributed.distributed_c10d._hash_ranks_to_str", "which of the two goes into names", _OLDEST),
        # kernels
        ("torch._C._dispatch_has_kernel_for_dispatch_key", "whether a kind of device computes an operation", _OLDEST),
        ("torch._C._dispatch_key_for_device", "whose kernels those of a type of device are", _OLDEST),
        ("torch._C.DispatchKeySet", "call a kernel for a kind of device", _OLDEST),
        ("torch._C.DispatchKey", "the same", _OLDEST),
        ("torch.library.Library._destroy", "restore torch's own kernels at once", _OLDEST),
        ("torch.utils._python_dispatch.TorchDispatchMode", "see each operator that runs", _OLDEST),
        ("torch._ops.OpOverload", "the type of an operator", _OLDEST),
        ("torch._C._pop_torch_function_stack", "pause a TorchFunctionMode", _OLDEST),
        ("torch._C._push_on_torch_function_stack", "resume it", _OLDEST),
        ("torch._C._len_torch_function_stack", "whether a TorchFunctionMode is the innermost", _OLDEST),
        ("torch._C._get_function_stack_at", "whether a TorchFunctionMode is the innermost", _OLDEST),
        # loader
        ("torch.utils.data.DataLoader._iterator", "restart persistent workers", _OLDEST),
        (
            "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
            "end workers and wait for them",
            _OLDEST,
        ),
        ("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers", "how each worker ended", _OLDEST),
        ("torch.utils.data._utils.worker._worker_info", "what get_worker_info() returns in a worker", _OLDEST),
        # modules
        ("torch.nn.Module._parameters", "swap a module's own parameters; read them fast", _OLDEST),
        ("torch.nn.Module._buffers", "swap a module's own buffers; read them fast", _OLDEST),
        ("torch.nn.Module._modules", "detect inserted or deleted layers", _OLDEST),
        ("torch.nn.Module._replicate_for_data_parallel", "copy a module without copying its parameters", _OLDEST),
        ("torch.nn.Module._compiled_call_impl", "wrap the call of one module; copies do not have it", _OLDEST),
        ("torch.nn.Module._call_impl", "call a module without that wrapper", _OLDEST),
        ("torch.nn.Module.state_dict._metadata", "keep the versions of modules in a checkpoint", _OLDEST),
        ("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX", "recognize a module's extra state by its key", _OLDEST),
        (
            "torch.nn.modules.batchnorm._BatchNorm",
            "recognize BatchNorm layers; the public ones leave out lazy layers and other libraries' own",
            _OLDEST,
        ),
        ("torch.nn.modules.batchnorm._BatchNorm._check_input_dim", "check a BatchNorm layer's input", _OLDEST),
        ("torch.nn.RNNBase._flat_weight_refs", "drop weak references to weights that are replaced", _OLDEST),
        ("torch.nn.RNNBase._init_flat_weights", "make a recurrent layer use its new weights", _OLDEST),
        ("torch.optim.Optimizer._opt_called", "schedulers check that the optimizer has stepped", _OLDEST),
        ("torch.optim.Optimizer.step._wrapped_by_lr_sched", "schedulers mark the step that they watch", _OLDEST),
        # rendezvous
        ("torch.distributed.rendezvous._rendezvous_handlers", "serve env:// from the job's store", _OLDEST),
        # saving
        ("torch.serialization._open_zipfile_writer_file", "detect which files torch.save opens", _OLDEST),
        # tensors
        ("torch.UntypedStorage._cdata", "identify memory that has no data pointer", _OLDEST),
        ("torch.storage.TypedStorage._untyped_storage", "the bytes of a typed storage, without a warning", _OLDEST),
        ("torch.storage.TypedStorage._internal", "make a typed storage without a warning: an argument", _OLDEST),
        ("torch.Tensor._indices", "indices of a sparse tensor that is not coalesced", _OLDEST),
        ("torch.Tensor._values", "values of a sparse tensor that is not coalesced", _OLDEST),
        ("torch.Tensor._is_zerotensor", "whether a tensor stands for zeros and has no memory", _OLDEST),
        ("torch.Tensor._is_param", "make another class of tensor pass for a parameter", _OLDEST),
        ("torch._has_compatible_shallow_copy_type", "whether .data may be assigned", _OLDEST),
        # tree; its logger has the name of the module
        ("torch.utils._pytree", "keep its logger quiet", _OLDEST),
        ("torch.utils._pytree.TreeSpec", "the form of a tree", _OLDEST),
        ("torch.utils._pytree.tree_flatten", "the leaves of a tree and its form", _OLDEST),
        ("torch.utils._pytree.tree_leaves", "the leaves of a tree", _OLDEST),
        ("torch.utils._pytree.tree_map", "change every leaf", _OLDEST),
        ("torch.utils._pytree.tree_map_only", "change the leaves of a type", _OLDEST),
        ("torch.utils._pytree.tree_unflatten", "a tree of leaves and its form", _OLDEST),
        # dtensor
        ("torch.distributed.tensor.DTensor._local_tensor", "what this rank holds, outside of autograd", _OLDEST),
        ("torch.distributed.tensor.DTensor._spec", "build a DTensor like another one", _OLDEST),
        (f"{_SPEC}.DTensorSpec", "build a DTensor of a shape and placements", _OLDEST),
        (f"{_SPEC}.DTensorSpec.shard_order", "the order in which mesh dimensions split a tensor", _OLDEST),
        (f"{_SPEC}.DTensorSpec.use_strided_shard_as_shard_order", "whether placements determine that order", _OLDEST),
        (f"{_SPEC}.ShardOrderEntry.tensor_dim", "the dimension that an order belongs to", _OLDEST),
        (f"{_SPEC}.ShardOrderEntry.mesh_dims", "the order", _OLDEST),
        (f"{_SPEC}.TensorMeta", "the whole shape and dtype in a DTensorSpec", _OLDEST),
        ("torch.distributed.tensor.placement_types._StridedShard.split_factor", "pieces before a split", _OLDEST),
        # pipelining
        (f"{_SCHEDULES}._Action", "the action of a rank at one position of a schedule", _OLDEST),
        (f"{_SCHEDULES}._Action.computation_type", "its kind", _OLDEST),
        (f"{_SCHEDULES}._Action.stage_index", "its stage", _OLDEST),
        (f"{_SCHEDULES}._Action.microbatch_index", "its micro-batch", _OLDEST),
        (f"{_SCHEDULES}._ComputationType", "the kinds", _OLDEST),
        (f"{_SCHEDULES}._add_send_recv", "place sends and receives in a schedule", _OLDEST),
        ("torch.distributed.pipelining._backward.stage_backward_input", "backward of a stage's inputs", _OLDEST),
        ("torch.distributed.pipelining._backward.stage_backward_weight", "backward of its weights, later", _OLDEST),
        # fake
        (f"{_FAKE}.FakeTensorMode", "run a model without computing", _OLDEST),
        (f"{_FAKE}.FakeTensorMode.from_tensor", "a tensor without data like another one", _OLDEST),
        (f"{_FAKE}.FakeTensor", "recognize a tensor without data", _OLDEST),
        (f"{_FAKE}.DataDependentOutputException", "forward asks for a value", _OLDEST),
        (f"{_FAKE}.DynamicOutputShapeException", "forward makes a shape from values", _OLDEST),
        (f"{_FAKE}.UnsupportedOperatorException", "an operator that cannot run without data", _OLDEST),
        # fsdp
        ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "find the groups of parameters", _OLDEST),
        (f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups", "find the groups of parameters", _OLDEST),
        (f"{_FSDP}._fsdp_param_group.FSDPParamGroup", "parameters that are gathered together", _OLDEST),
        (f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params", "the parameters of a group", _OLDEST),
        (f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward", "act before gradients are reduced", _OLDEST),
        (f"{_FSDP}._fsdp_param.FSDPParam", "a parameter in its sharded and unsharded form", _OLDEST),
        (f"{_FSDP}._fsdp_param.FSDPParam.sharded_param", "its sharded form", _OLDEST),
        (f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param", "its unsharded form and the gradient of that", _OLDEST),
        (
            f"{_FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad",
            "what is reduced; from 2.15 on a read-only view of the unsharded form's gradient",
            _OLDEST,
        ),
        (f"{_FSDP}._fsdp_param.FSDPParam.reduce_dtype", "the dtype that gradients are reduced in", _OLDEST),
        (
            f"{_FSDP}._fsdp_param_group.RegisterPostBackwardFunction",
            "recognize the node that follows a block's backward and changes nothing, by its name",
            _OLDEST,
        ),
        (f"{_FSDP}._fsdp_api.AllGather", "the protocol of a custom all-gather", _OLDEST),
        (f"{_FSDP}._fsdp_api.ReduceScatter", "the protocol of a custom reduce-scatter", _OLDEST),
    )
)
