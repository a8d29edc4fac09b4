"""What becomes of FSDP2, FSDP, DDP, and the rest of `torch.distributed` that training scripts use."""

from __future__ import annotations

from collections.abc import Mapping

from .rule import CLIP, Rule, keep, missing, remove, write

_FROM_MODULE = 'apply, params = hp.from_module({arg})\nbound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))'
_DEFAULT = remove("that is the default")
_MESH = write("mesh", "the mesh is given to hp.shard and hp.sharded")
_NUMERICS = write("numerics", "goes to hp.value_and_grad(loss_fn, numerics=numerics)")
_LATER = remove("hpfunc plans that by itself, and checks the plan")
_OFFLOAD = missing("weights and optimizer state stay on the device")

_FULLY_SHARD: Mapping[str, Rule | Mapping[str, Rule]] = {
    "mesh": _MESH,
    "reshard_after_forward": {
        "True": _DEFAULT,
        "None": _DEFAULT,
        "False": write('policy=hp.Policy(release="backward")', "goes to hp.sharded"),
        "*": write(
            'policy=hp.Policy(release="forward" if {value} else "backward")',
            "goes to hp.sharded; a number has no counterpart: HSDP keeps gathers in the smaller group",
        ),
    },
    "shard_placement_fn": write(
        'hp.shard(params, mesh, {{path: hp.P(None, "shard") if ... else hp.P("shard") for path in params}})',
        "Shard(1) of a weight is the spec hp.P(None, 'shard')",
    ),
    "mp_policy": _NUMERICS,
    "offload_policy": {"OffloadPolicy()": _DEFAULT, "None": _DEFAULT, "*": _OFFLOAD},
    "ignored_params": write(
        "trained, rest = hp.partition(params, ...)", "shard the one, give the other to the loss as it is"
    ),
    "dp_mesh_dims": write('hp.make_mesh(..., data_axes=("replicate", "shard"))', "the mesh says which axes are data"),
}

_POLICY_OF_STRATEGY: Mapping[str, Rule] = {
    "ShardingStrategy.FULL_SHARD": _DEFAULT,
    "ShardingStrategy.SHARD_GRAD_OP": write("policy=hp.Policy.zero2()", "goes to hp.sharded"),
    "ShardingStrategy.NO_SHARD": write("hp.shard(params, mesh, hp.P())", "whole on every rank"),
    "ShardingStrategy.HYBRID_SHARD": write(
        'mesh = hp.make_mesh((num_nodes, -1), ("replicate", "shard"))', "two axes are HSDP"
    ),
    "*": write("policy=hp.Policy(...)", "ZeRO 1 to 3 are Policy.zero1(), zero2() and zero3()"),
}

_COVERED = Rule("write")  # it stands in the code of the whole call
_CASTS_ALL = missing("every unit computes in param_dtype; split the model by units that do, and others")
_DTYPES: Mapping[str, Rule] = {
    "param_dtype": _COVERED,
    "reduce_dtype": _COVERED,
    "output_dtype": _COVERED,
    "cast_forward_inputs": _COVERED,
    "cast_root_forward_inputs": _COVERED,
    "buffer_dtype": missing("buffers keep their dtype; cast them in apply.buffers"),
    "_module_classes_to_ignore": _CASTS_ALL,
    "keep_low_precision_grads": missing("gradients have the dtype of the shards, or accum_dtype"),
}

_SAVE = 'hp.checkpoint.save(folder, {{"params": bound.params, ...}}, step=step)'
_LOAD = 'hp.checkpoint.load(folder, like={{"params": bound.params, ...}})'

NAMES: Mapping[str, Rule] = {
    # FSDP2
    "torch.distributed.fsdp.fully_shard": write(
        _FROM_MODULE,
        "repeated blocks become units by themselves; hp.from_module(model, units=...) chooses others",
        "module",
        _FULLY_SHARD,
    ),
    "torch.distributed.fsdp.MixedPrecisionPolicy": write(
        "{target} = hp.Numerics({numerics})",
        "goes to hp.value_and_grad(loss_fn, numerics=...); inputs are cast only if it says so",
        "param_dtype reduce_dtype output_dtype cast_forward_inputs",
        _DTYPES,
    ),
    "torch.distributed.fsdp.CPUOffloadPolicy": _OFFLOAD,
    "torch.distributed.fsdp.OffloadPolicy": _DEFAULT,
    "torch.distributed.fsdp.FSDPModule": write("hp.ModuleFunction", "what hp.from_module returns; nothing is wrapped"),
    "torch.distributed.fsdp.UnshardHandle": _LATER,
    "torch.distributed.fsdp.register_fsdp_forward_method": write(
        'apply.method("name")', "another method of the module as a function"
    ),
    "torch.distributed.fsdp.share_comm_ctx": _LATER,
    "torch.distributed.fsdp.DataParallelMeshDims": write("hp.make_mesh(..., data_axes=...)"),
    # FSDP and DDP
    "torch.distributed.fsdp.FullyShardedDataParallel": write(
        _FROM_MODULE,
        "repeated blocks become units by themselves; hp.from_module(model, units=...) chooses others",
        "module process_group sharding_strategy cpu_offload auto_wrap_policy",
        {
            "process_group": _MESH,
            "device_mesh": _MESH,
            "sharding_strategy": _POLICY_OF_STRATEGY,
            "cpu_offload": {"None": _DEFAULT, "*": _OFFLOAD},
            "auto_wrap_policy": write(
                "hp.from_module(model, units=Block)", "a class, a pattern of paths, or a function"
            ),
            "backward_prefetch": write("policy=hp.Policy(prefetch_backward=1)", "how many units ahead, for hp.sharded"),
            "forward_prefetch": write("policy=hp.Policy(prefetch=1)", "the default"),
            "mixed_precision": _NUMERICS,
            "ignored_modules": write("hp.partition(params, ...)"),
            "ignored_states": write("hp.partition(params, ...)"),
            "param_init_fn": write("hp.init_module(build, mesh, hp.P('shard'), init_fn=...)"),
            "device_id": remove("the mesh knows its device"),
            "sync_module_states": write("hp.shard(params, mesh, hp.P('shard'), broadcast_from=0)"),
            "limit_all_gathers": write("policy=hp.Policy(gather_budget_bytes=...)", "a bound in bytes"),
            "use_orig_params": remove("parameters keep their names and shapes"),
        },
    ),
    "torch.distributed.fsdp.MixedPrecision": write(
        "{target} = hp.Numerics({numerics})", "goes to hp.value_and_grad(loss_fn, numerics=...)", "", _DTYPES
    ),
    "torch.distributed.fsdp.ShardingStrategy": write("hp.Policy.zero3()", "or zero2(), zero1(), for hp.sharded"),
    "torch.distributed.fsdp.CPUOffload": _OFFLOAD,
    "torch.distributed.fsdp.BackwardPrefetch": write("hp.Policy(prefetch_backward=1)"),
    "torch.distributed.fsdp.StateDictType": remove("hp.checkpoint loads onto any mesh"),
    "torch.distributed.fsdp.FullStateDictConfig": write("hp.unshard(params)", "whole tensors, on every rank"),
    "torch.distributed.fsdp.FullOptimStateDictConfig": remove("hp.checkpoint loads onto any mesh"),
    "torch.distributed.fsdp.ShardedStateDictConfig": remove("hp.checkpoint writes each rank's parts"),
    "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy": write("hp.from_module(model, units=Block)"),
    "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy": write(
        "hp.from_module(model, units=lambda path, module: ...)"
    ),
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": write(
        "{target} = torch.amp.GradScaler()", "with bound.unscale(scaler, optimizer) before the step"
    ),
    "torch.nn.parallel.DistributedDataParallel": write(
        "apply, params = hp.from_module({arg})\nbound = hp.optim.bind(hp.shard(params, mesh, hp.P()))",
        'hp.P() keeps weights whole, as DDP does; hp.P("shard") shards them',
        "module",
        {
            "device_ids": remove("the mesh knows its device"),
            "output_device": remove("the mesh knows its device"),
            "find_unused_parameters": remove("weights that no use reached get zeros"),
            "static_graph": _LATER,
            "gradient_as_bucket_view": _LATER,
            "bucket_cap_mb": write("policy=hp.Policy(reduce_bucket_bytes=...)", "in bytes, for hp.sharded"),
            "process_group": _MESH,
            "device_mesh": _MESH,
            "broadcast_buffers": write("apply.with_buffers(params, buffers, x)", "buffers go in and come out"),
        },
    ),
    # processes and groups
    "torch.distributed.init_process_group": write(
        'mesh = hp.make_mesh((-1,), ("shard",))', "it starts the processes' group, or joins one that exists"
    ),
    "torch.distributed.destroy_process_group": keep("the group that make_mesh joined or made"),
    "torch.distributed.is_initialized": keep("true after hp.make_mesh on more than one process"),
    "torch.distributed.is_available": keep("hpfunc needs none of it on one process"),
    "torch.distributed.get_rank": write("mesh.rank"),
    "torch.distributed.get_world_size": write("mesh.size"),
    "torch.distributed.get_backend": keep("of torch's groups"),
    "torch.distributed.barrier": write("hp.loop.barrier(mesh)", "saving and making arrays need none"),
    "torch.distributed.init_device_mesh": write("{target} = hp.make_mesh({mesh_args})", "axes have names"),
    "torch.distributed.DeviceMesh": write("hp.Mesh.from_device_mesh(device_mesh)", "or hp.make_mesh"),
    "torch.distributed.all_reduce": write(
        "hp.psum({arg}, mesh.data_axes, mesh=mesh)",
        "hp.pmean and hp.pmax for AVG and MAX, hp.pmin for MIN; returns, does not write",
    ),
    "torch.distributed.reduce": write("hp.psum({arg}, mesh.data_axes, mesh=mesh)", "every rank gets the sum"),
    "torch.distributed.all_gather": write("hp.all_gather(x, mesh.data_axes, mesh=mesh)", "returns one tensor"),
    "torch.distributed.all_gather_into_tensor": write("hp.all_gather(x, mesh.data_axes, tiled=True, mesh=mesh)"),
    "torch.distributed.reduce_scatter_tensor": write("hp.psum_scatter(x, mesh.data_axes, tiled=True, mesh=mesh)"),
    "torch.distributed.broadcast": keep("outside of steps; for weights: hp.shard(..., broadcast_from=0)"),
    "torch.distributed.broadcast_object_list": keep("outside of steps"),
    "torch.distributed.all_gather_object": keep("outside of steps"),
    "torch.distributed.gather_object": keep("outside of steps"),
    "torch.distributed.ReduceOp": write("hp.psum, hp.pmean, hp.pmax, hp.pmin", "the operation is the function's name"),
    "torch.distributed.new_group": write("hp.make_mesh(...)", "a group of ranks is an axis of the mesh"),
    "torch.distributed.ProcessGroup": write("hp.Mesh", "a group of ranks is an axis of the mesh"),
    "torch.distributed.get_default_backend_for_device": remove("hp.make_mesh chooses it"),
    "torch.distributed.elastic.multiprocessing.errors.record": keep("of the launcher"),
    # files
    "torch.distributed.checkpoint.save": write(_SAVE, "or keep it, with hpfunc.interop.to_dtensor(params)"),
    "torch.distributed.checkpoint.async_save": write(_SAVE.replace("step=step", "step=step, asynchronous=True")),
    "torch.distributed.checkpoint.load": write(_LOAD, "or keep it, with hpfunc.interop.to_dtensor(params)"),
    "torch.distributed.checkpoint.stateful.Stateful": remove("a checkpoint is a tree of arrays and numbers"),
    "torch.distributed.checkpoint.state_dict.get_model_state_dict": write(
        _SAVE, "for whole tensors on every rank: hp.unshard(params)"
    ),
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict": write(_SAVE),
    "torch.distributed.checkpoint.state_dict.get_state_dict": write(_SAVE),
    "torch.distributed.checkpoint.state_dict.set_model_state_dict": write(
        "params = hp.shard(state_dict, mesh, hp.P('shard'), broadcast_from=0)", "or hp.checkpoint.load"
    ),
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict": write(_LOAD),
    "torch.distributed.checkpoint.state_dict.set_state_dict": write(_LOAD),
    "torch.distributed.checkpoint.state_dict.StateDictOptions": remove("hp.checkpoint loads onto any mesh"),
    "torch.distributed.checkpoint.state_dict._init_optim_state": remove("hp.checkpoint.load says how the state looks"),
    # DTensor and other parallelism
    "torch.distributed.tensor.DTensor": write("hp.ShardedArray", "hpfunc.interop converts without a copy"),
    "torch.distributed.tensor.distribute_tensor": write("hp.shard({arg}, mesh, hp.P('shard'))"),
    "torch.distributed.tensor.Shard": write('hp.P("shard")', 'Shard(1) is hp.P(None, "shard")'),
    "torch.distributed.tensor.Replicate": write("hp.P()"),
    "torch.distributed.tensor.parallel.parallelize_module": missing(
        "units call hp.psum and hp.all_gather themselves: see examples/torch/tensor_parallel.py"
    ),
    "torch.distributed.tensor.parallel.*": missing("see examples/torch/tensor_parallel.py"),
    "torch.distributed.tensor.experimental.*": missing("see examples/torch/context_parallel.py"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.*": write(
        "hp.from_module(model, remat=True)", "each unit is recomputed in backward"
    ),
    "torch.distributed.pipelining.*": missing("hpfunc has no pipeline parallelism"),
    "torch.distributed.algorithms.join.Join": write(
        "hp.loop.even_batches(loader, mesh, fill=...)", "all ranks get the same number of batches"
    ),
    # the rest of a script
    "torch.optim.*": write(
        "{target} = {bound_call}",
        "it sees this rank's part of each weight; groups of parameters: bound.named_parameters has their paths",
    ),
    "torch.nn.utils.clip_grad_norm_": write(
        CLIP,
        "before bound.set_grads(grads): the norm is over all ranks",
    ),
    "torch.nn.utils.get_total_norm": write("hp.global_norm(grads)", "over all ranks"),
    "torch.nn.utils.clip_grad_value_": missing("clip each value in the step: optree.tree_map(torch.clamp, ...)"),
    "torch.utils.checkpoint.checkpoint": keep("or hp.from_module(model, remat=True), which recomputes each unit"),
    "torch.autocast": write("numerics = hp.Numerics(param_dtype=..., cast_inputs=True)", "casts weights once"),
    "torch.amp.autocast": write("numerics = hp.Numerics(param_dtype=..., cast_inputs=True)", "casts weights once"),
    "torch.utils.data.distributed.DistributedSampler": write(
        "DistributedSampler(dataset, mesh.num_data_ranks, mesh.data_rank)"
    ),
    "torch.utils.data.DistributedSampler": write("DistributedSampler(dataset, mesh.num_data_ranks, mesh.data_rank)"),
}

# Methods that only a module of FSDP has, whatever its name.
METHODS: Mapping[str, Rule] = {
    "set_requires_gradient_sync": write(
        'grad_fn = hp.accumulate(hp.value_and_grad(loss_fn), num_microbatches, mode="local")',
        "takes a whole batch, and cuts it",
    ),
    "set_requires_all_reduce": write(
        "grad_fn = hp.accumulate(hp.value_and_grad(loss_fn), num_microbatches)", 'the default, mode="scatter"'
    ),
    "set_is_last_backward": remove("hp.accumulate knows"),
    "set_reshard_after_forward": write('policy=hp.Policy(release="forward")', 'or "backward", for hp.sharded'),
    "set_reshard_after_backward": write("policy=hp.Policy.zero1()", "keeps weights whole between micro-batches"),
    "set_modules_to_forward_prefetch": write("policy=hp.Policy(prefetch=1)", "how many units ahead, for hp.sharded"),
    "set_modules_to_backward_prefetch": write(
        "policy=hp.Policy(prefetch_backward=1)", "how many units ahead, for hp.sharded"
    ),
    "set_gradient_divide_factor": write('numerics=hp.Numerics(reduce_op="mean")', 'or "sum", for hp.value_and_grad'),
    "set_force_sum_reduction_for_comms": remove("hpfunc always sums, and divides once"),
    "set_reduce_scatter_divide_factor": write('numerics=hp.Numerics(reduce_op="mean")', 'or "sum"'),
    "set_reduce_scatter_unused_params": remove("weights that no use reached get zeros"),
    "set_reduce_scatter_max_input_buffers": _LATER,
    "set_separate_reduce_scatter_group": write("policy=hp.Policy(communicators=...)", "how many work at a time"),
    "set_symm_mem_for_comm": missing("memory is that of the framework's allocator"),
    "reset_iter_state": _LATER,
    "set_unshard_in_backward": _LATER,
    "set_post_optim_event": _LATER,
    "set_all_reduce_hook": missing("gradients are reduced as the plan says; none can be changed on the way"),
    "set_allocate_memory_from_process_group_for_comm": missing("memory is that of the framework's allocator"),
    "set_custom_all_gather": missing("collectives are those of the backend"),
    "set_custom_reduce_scatter": missing("collectives are those of the backend"),
    "full_tensor": write("hp.unshard({owner})", "a copy, on every rank"),
    "to_empty": write(
        'apply, params = hp.init_module(build, mesh, hp.P("shard"))', "makes weights one at a time, on the first rank"
    ),
    "no_sync": write(
        'grad_fn = hp.accumulate(hp.value_and_grad(loss_fn), num_microbatches, mode="local")',
        "takes a whole batch, and cuts it",
    ),
    "backward": write("bound.set_grads(grads)", "loss and gradients come from grad_fn: see the loop below"),
    "zero_grad": remove("gradients are new values in every step"),
    "unscale_": write("bound.unscale({owner}, {arg})", "an overflow on one rank is one on all"),
    "set_epoch": keep("of the sampler"),
}

# Methods of what is a model, by its role.
MODEL_METHODS: Mapping[str, Rule] = {
    "unshard": _LATER,
    "reshard": _LATER,
    "train": write("apply = apply.train()", "the mode is part of the function"),
    "eval": write("evaluate = apply.eval()", "a function in that mode"),
    "state_dict": write("bound.params", "a dict by the same paths; hp.unshard(bound.params) has whole tensors"),
    "load_state_dict": write(_LOAD, "or load into the module before hp.from_module"),
    "save_pretrained": write(
        "hp.to_module(bound.params, {owner}).save_pretrained(...)", "whole weights: on one rank, after hp.unshard"
    ),
    "reset_parameters": write('apply, params = hp.init_module(build, mesh, hp.P("shard"))'),
    "init_weights": write('apply, params = hp.init_module(build, mesh, hp.P("shard"))'),
    "clip_grad_norm_": write(
        CLIP.replace("{max_norm}", "{arg}"),
        "before bound.set_grads(grads): the norm is over all ranks",
    ),
    "generate": write('apply.method("generate")(bound.params, ...)', "all ranks call it together"),
    "gradient_checkpointing_enable": keep("before hp.from_module; or hp.from_module(model, remat=True)"),
}
