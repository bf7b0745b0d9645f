# SPDX-License-Identifier: Apache-2.0
"""The table of torch's private names, and the purpose of each.

Data alone. On a torch that lacks some of them, the strategy that needs them is refused.
``tests/unit/test_torch_private.py`` exercises each name; ``tests/unit/test_private_names.py`` holds the table to what
this room uses, and the other rooms to using none of it.
"""

_FSDP = "torch.distributed.fsdp._fully_shard"
_SCHEDULES = "torch.distributed.pipelining.schedules"
_FAKE = "torch._subclasses.fake_tensor"
_SPEC = "torch.distributed.tensor._dtensor_spec"

NAMES = {
    # autograd
    "torch._C._current_graph_task_id": "whether backward runs, and which one",
    "torch._C._autograd._get_current_graph_task_keep_graph": "whether another backward may follow",
    "torch.autograd.Variable._execution_engine.queue_callback": (
        "run a function after backward; torch.autograd.graph.queue_callback from 2.15 on"
    ),
    "torch.Tensor._version": "detect in-place changes",
    "torch.Tensor._backward_hooks": "replace the hooks on a parameter's gradient",
    "torch.Tensor._post_accumulate_grad_hooks": "replace the hooks that follow it",
    "torch._C._will_engine_execute_node": "whether a gradient is accumulated, or returned by autograd.grad",
    "torch.Tensor._is_view": "whether autograd tracks a tensor as a view",
    "torch._C._autograd._push_saved_tensors_default_hooks": "enter hooks without a with statement",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "leave them",
    "torch._C._autograd._top_saved_tensors_default_hooks": "call the hooks around one's own",
    # compiler
    "torch._disable_dynamo": "torch.compiler.disable without importing the compiler",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "have the compiler skip a wrapper of ours",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "what it does with code, and with what that calls",
    "torch._C._dynamo.eval_frame._FrameAction": "the kinds",
    "torch.autograd.forward_ad._current_level": "whether forward mode is on",
    "torch._C._functorch.peek_interpreter_stack": "whether a transform of torch.func is running",
    "torch._dynamo": "whether the compiler is imported; import it before ranks are forked",
    "torch._dynamo.eval_frame.cached_backends": "whether a script compiles anything",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "the module that torch.compile wrapped",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "have the compiler split graphs at buckets",
    "torch._inductor.config.fallback_random": "named in messages: random numbers in compiled code",
    # streams, in kernels
    "torch._C._accelerator_getStream": "the current stream, asked for with each gradient",
    # many in one call, in tensors
    "torch._foreach_copy_": "copy many tensors in one call",
    "torch._foreach_zero_": "fill many tensors with zeros in one call",
    "torch._foreach_add_": "add many tensors in one call",
    "torch._foreach_sub_": "subtract many tensors in one call",
    "torch._foreach_mul_": "multiply many tensors in one call",
    "torch._foreach_div_": "divide many tensors in one call",
    "torch.autograd.graph.Node._input_metadata": "shapes of the outputs of a node of the graph",
    "torch.autograd.Function._forward_cls": "whether the backward of a node is written in Python",
    "torch.autograd.graph.Node._saved_reduction": "whether a loss function takes a mean or a sum",
    "torch.autograd.graph.Node._saved_total_weight": "what a cross entropy averages over",
    "torch.autograd.graph.Node._saved_dim": "the dims that an operation acts along",
    "torch.autograd.graph.Node._saved_self_sym_sizes": "the shape of the reduced tensor",
    "torch.autograd.graph.Node._saved_other": "the factor or divisor of a term of a loss",
    "torch.autograd.graph.Node._saved_self": "the factor, where it comes first",
    "torch.autograd.graph.Node._saved_condition": "the mask of torch.where",
    # modules, totals of gradients
    "torch.nn.utils.clip_grad._get_total_norm": "have clip_grad_norm_ cover the stages of other ranks",
    "torch.amp.GradScaler._unscale_grads_": "have a GradScaler cover the gradients of other ranks",
    "torch.amp.GradScaler._check_scale_growth_tracker": "the first call of a GradScaler's methods",
    "torch.amp.GradScaler._scale": "whether a GradScaler has scaled a loss",
    # groups
    "torch.distributed.distributed_c10d._world.pg_map": "the open process groups",
    "torch.distributed.distributed_c10d._world.pg_names": (
        "the number in the name of a group, before 2.14; the order in which groups were opened"
    ),
    "torch.distributed.ProcessGroup._device_types": "which kinds of tensors a group sends",
    "torch.distributed.ProcessGroup._get_backend": "the backend for one of them",
    "torch.distributed.ProcessGroupNCCL._group_start": "abort communicators of NCCL together; absent without NCCL",
    "torch.distributed.ProcessGroupNCCL._group_end": "the same",
    "torch.distributed.distributed_c10d._world.group_count": "the same, from 2.14 on",
    "torch.distributed.distributed_c10d._hash_ranks_to_str": "which of the two goes into names",
    # kernels
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether a kind of device computes an operation",
    "torch._C._dispatch_key_for_device": "whose kernels those of a type of device are",
    "torch._C.DispatchKeySet": "call a kernel for a kind of device",
    "torch._C.DispatchKey": "the same",
    "torch.library.Library._destroy": "restore torch's own kernels at once",
    "torch.utils._python_dispatch.TorchDispatchMode": "see each operator that runs",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "whether a mode that sees them is the innermost",
    "torch._ops.OpOverload": "the type of an operator",
    "torch._C._pop_torch_function_stack": "pause a TorchFunctionMode",
    "torch._C._push_on_torch_function_stack": "resume it",
    "torch._C._len_torch_function_stack": "whether a TorchFunctionMode is the innermost",
    "torch._C._get_function_stack_at": "whether a TorchFunctionMode is the innermost",
    # loaders, in processes
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__": "measure how long a script waits for its data",
    "torch.utils.data.DataLoader._iterator": "restart persistent workers",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": "end workers and wait for them",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers": "how each worker ended",
    "torch.utils.data._utils.worker._worker_info": "what get_worker_info() returns in a worker",
    # modules
    "torch.nn.Module._parameters": "swap a module's own parameters; read them fast",
    "torch.nn.Module._buffers": "swap a module's own buffers; read them fast",
    "torch.nn.Module._modules": "detect inserted or deleted layers",
    "torch.nn.Module._forward_hooks": "whether a script follows a module",
    "torch.nn.Module._forward_pre_hooks": "the same",
    "torch.nn.Module._backward_hooks": "judge the hooks that change gradients",
    "torch.nn.Module._backward_pre_hooks": "the same",
    "torch.nn.Module._compiled_call_impl": "wrap the call of one module; copies do not have it",
    "torch.nn.Module._call_impl": "call a module without that wrapper",
    "torch.nn.Module.state_dict._metadata": "keep the versions of modules in a checkpoint",
    "torch.nn.modules.module._has_any_global_hook": "whether there are hooks on all modules",
    "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX": "recognize a module's extra state by its key",
    "torch.nn.modules.batchnorm._BatchNorm": (
        "recognize BatchNorm layers; the public ones leave out lazy layers and other libraries' own"
    ),
    "torch.nn.modules.batchnorm._BatchNorm._check_input_dim": "check a BatchNorm layer's input",
    "torch.nn.RNNBase._flat_weight_refs": "drop weak references to weights that are replaced",
    "torch.nn.RNNBase._init_flat_weights": "make a recurrent layer use its new weights",
    "torch.optim.Optimizer._opt_called": "schedulers check that the optimizer has stepped",
    "torch.optim.Optimizer.step._wrapped_by_lr_sched": "schedulers mark the step that they watch",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "run a hook last before a step",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "run a hook first after a step",
    # rendezvous, in processes
    "torch.distributed.rendezvous._rendezvous_handlers": "serve env:// from the job's store",
    # files, in processes
    "torch.serialization._open_zipfile_writer_file": "detect which files torch.save opens",
    # tensors
    "torch.UntypedStorage._cdata": "identify memory that has no data pointer",
    "torch.storage.TypedStorage._untyped_storage": "the bytes of a typed storage, without a warning",
    "torch.storage.TypedStorage._internal": "make a typed storage without a warning: an argument",
    "torch.Tensor._indices": "indices of a sparse tensor that is not coalesced",
    "torch.Tensor._values": "values of a sparse tensor that is not coalesced",
    "torch.Tensor._is_zerotensor": "whether a tensor stands for zeros and has no memory",
    "torch.Tensor._is_param": "make another class of tensor pass for a parameter",
    "torch._has_compatible_shallow_copy_type": "whether .data may be assigned",
    # trees; the logger has the name of the module, in tensors
    "torch.utils._pytree": "keep its logger quiet",
    "torch.utils._pytree.TreeSpec": "the form of a tree",
    "torch.utils._pytree.tree_flatten": "the leaves of a tree and its form",
    "torch.utils._pytree.tree_leaves": "the leaves of a tree",
    "torch.utils._pytree.tree_map": "change every leaf",
    "torch.utils._pytree.tree_map_only": "change the leaves of a type",
    "torch.utils._pytree.tree_unflatten": "a tree of leaves and its form",
    # dtensor
    "torch.distributed.tensor.DTensor._local_tensor": "what this rank holds, outside of autograd",
    "torch.distributed.tensor.DTensor._spec": "build a DTensor like another one",
    "torch.distributed.tensor.DTensor._op_dispatcher": "what DTensors do for an operation",
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": "replace an operation",
    f"{_SPEC}.DTensorSpec": "build a DTensor of a shape and placements",
    f"{_SPEC}.DTensorSpec.shard_order": "the order in which mesh dimensions split a tensor",
    f"{_SPEC}.DTensorSpec.use_strided_shard_as_shard_order": "whether placements determine that order",
    f"{_SPEC}.ShardOrderEntry.tensor_dim": "the dimension that an order belongs to",
    f"{_SPEC}.ShardOrderEntry.mesh_dims": "the order",
    f"{_SPEC}.TensorMeta": "the whole shape and dtype in a DTensorSpec",
    "torch.distributed.tensor.placement_types._StridedShard.split_factor": "pieces before a split",
    # pipelines, in autograd
    f"{_SCHEDULES}._Action": "the action of a rank at one position of a schedule",
    f"{_SCHEDULES}._Action.computation_type": "its kind",
    f"{_SCHEDULES}._Action.stage_index": "its stage",
    f"{_SCHEDULES}._Action.microbatch_index": "its micro-batch",
    f"{_SCHEDULES}._ComputationType": "the kinds",
    f"{_SCHEDULES}._add_send_recv": "place sends and receives in a schedule",
    "torch.distributed.pipelining._backward.stage_backward_input": "backward of a stage's inputs",
    "torch.distributed.pipelining._backward.stage_backward_weight": "backward of its weights, later",
    # fake
    f"{_FAKE}.FakeTensorMode": "run a model without computing",
    f"{_FAKE}.FakeTensorMode.from_tensor": "a tensor without data like another one",
    f"{_FAKE}.unset_fake_temporarily": "compute shapes while a model runs without data",
    f"{_FAKE}.FakeTensor": "recognize a tensor without data",
    f"{_FAKE}.DataDependentOutputException": "forward asks for a value",
    f"{_FAKE}.DynamicOutputShapeException": "forward makes a shape from values",
    f"{_FAKE}.UnsupportedOperatorException": "an operator that cannot run without data",
    # fsdp
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "find the groups of parameters",
    f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups": "find the groups of parameters",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": "parameters that are gathered together",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params": "the parameters of a group",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward": "act before gradients are reduced",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.pre_forward": "gather the values of now for each forward",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_forward": "know when a forward of a group ends",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.is_unsharded": "whether a group is gathered",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.reshard": "gather the values of now for each forward",
    f"{_FSDP}._fsdp_param.FSDPParam": "a parameter in its sharded and unsharded form",
    f"{_FSDP}._fsdp_param.FSDPParam.sharded_param": "its sharded form",
    f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param": "its unsharded form and the gradient of that",
    f"{_FSDP}._fsdp_param.FSDPParam.unsharded_accumulated_grad": (
        "what is reduced; from 2.15 on a read-only view of the unsharded form's gradient"
    ),
    f"{_FSDP}._fsdp_param.FSDPParam.reduce_dtype": "the dtype that gradients are reduced in",
    f"{_FSDP}._fsdp_param_group.RegisterPostBackwardFunction": (
        "recognize the node that follows a block's backward and changes nothing, by its name"
    ),
    f"{_FSDP}._fsdp_api.AllGather": "the protocol of a custom all-gather",
    f"{_FSDP}._fsdp_api.ReduceScatter": "the protocol of a custom reduce-scatter",
}
"""By the dotted path to each."""
