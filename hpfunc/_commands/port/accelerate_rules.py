"""What becomes of `accelerate`: the `Accelerator`, its options, plugins and methods."""

from __future__ import annotations

from collections.abc import Mapping

from .rule import CLIP, Rule, keep, missing, remove, write

_DEFAULT = remove("that is the default")
_NUMERICS = "goes to hp.value_and_grad(loss_fn, numerics=numerics)"
_ACCUMULATE = write("grad_fn = hp.accumulate(hp.value_and_grad(loss_fn), {value})", "takes a whole batch, and cuts it")
_RANK_0 = write("if mesh.is_main:")
_OWN_PART = remove("each rank loads what its sampler gives it; hpfunc does not touch data loaders")
_CHECKPOINT = remove("hp.checkpoint loads onto any mesh")
_OFFLOAD = missing("weights and optimizer state stay on the device")
_UNITS = write("hp.from_module(model, units=...)", "a class, a pattern of paths, or a function")
_SAVE = 'hp.checkpoint.save({arg}, {{"params": bound.params, ...}}, step=step)'
_LOAD = 'state = hp.checkpoint.load({arg}, like={{"params": bound.params, ...}})'
_OWN_TRACKER = write(
    "writer = SummaryWriter(...) if mesh.is_main else None",
    "of torch.utils.tensorboard, or of your tracker",
)

_ACCELERATOR: Mapping[str, Rule | Mapping[str, Rule]] = {
    "device_placement": remove("arrays are made on mesh.device; move batches there"),
    "split_batches": _OWN_PART,
    "dispatch_batches": _OWN_PART,
    "even_batches": _OWN_PART,
    "use_seedable_sampler": _OWN_PART,
    "dataloader_config": _OWN_PART,
    "mixed_precision": {
        "'no'": _DEFAULT,
        "None": _DEFAULT,
        "'bf16'": write('numerics = hp.Numerics(param_dtype="bfloat16", cast_inputs=True)', _NUMERICS),
        "'fp16'": write(
            'numerics = hp.Numerics(param_dtype="float16", cast_inputs=True)',
            f"{_NUMERICS}, with torch.amp.GradScaler and bound.unscale, or hp.optim.DynamicLossScale",
        ),
        "'fp8'": missing("hpfunc sends and keeps weights in the dtypes of torch's own arithmetic"),
        "*": write("numerics = hp.Numerics(param_dtype=..., cast_inputs=True)", _NUMERICS),
    },
    "gradient_accumulation_steps": {"1": _DEFAULT, "*": _ACCUMULATE},
    "gradient_accumulation_plugin": _ACCUMULATE,
    "cpu": {"False": _DEFAULT, "*": write('mesh = hp.make_mesh((-1,), ("shard",), device="cpu")')},
    "fsdp_plugin": remove("its options are policy, numerics and units, each where it belongs"),
    "deepspeed_plugin": write("policy=hp.Policy.zero3()", "or zero2(), zero1(), for hp.sharded"),
    "deepspeed_plugins": write("policy=hp.Policy.zero3()", "or zero2(), zero1(), for hp.sharded"),
    "torch_tp_plugin": missing(
        "units call hp.psum and hp.all_gather themselves: see examples/torch/tensor_parallel.py"
    ),
    "megatron_lm_plugin": missing("models are yours; see examples/torch/tensor_parallel.py"),
    "parallelism_config": write("mesh = hp.make_mesh(...)", "each kind of parallelism is an axis with a name"),
    "rng_types": remove("hpfunc leaves random numbers alone, but for hp.init, which draws the first rank's"),
    "log_with": _OWN_TRACKER,
    "project_dir": remove("hp.checkpoint.save takes a path"),
    "project_config": write("hp.checkpoint.save(folder, state, keep=...)", "total_limit is keep="),
    "kwargs_handlers": remove("each has a finding of its own"),
    "step_scheduler_with_optimizer": remove("scheduler.step() is called as often as you write it"),
    "dynamo_backend": write("hp.unit(torch.compile(block_fn))", "compile what is inside of a unit, not the step"),
    "dynamo_plugin": write("hp.unit(torch.compile(block_fn))", "compile what is inside of a unit, not the step"),
}

_FSDP_PLUGIN: Mapping[str, Rule | Mapping[str, Rule]] = {
    "fsdp_version": _DEFAULT,
    "sharding_strategy": write("policy=hp.Policy.zero3()", "FULL_SHARD; SHARD_GRAD_OP is zero2(); for hp.sharded"),
    "reshard_after_forward": {
        "True": _DEFAULT,
        "*": write('policy=hp.Policy(release="backward")', "goes to hp.sharded"),
    },
    "backward_prefetch": write("policy=hp.Policy(prefetch_backward=1)", "how many units ahead, for hp.sharded"),
    "forward_prefetch": write("policy=hp.Policy(prefetch=1)", "the default"),
    "mixed_precision_policy": write("numerics = hp.Numerics(...)", _NUMERICS),
    "auto_wrap_policy": _UNITS,
    "transformer_cls_names_to_wrap": _UNITS,
    "min_num_params": _UNITS,
    "cpu_offload": {"False": _DEFAULT, "None": _DEFAULT, "*": _OFFLOAD},
    "ignored_modules": write("trained, rest = hp.partition(params, ...)"),
    "state_dict_type": _CHECKPOINT,
    "state_dict_config": _CHECKPOINT,
    "optim_state_dict_config": _CHECKPOINT,
    "limit_all_gathers": write("policy=hp.Policy(gather_budget_bytes=...)", "a bound in bytes"),
    "use_orig_params": _DEFAULT,
    "param_init_fn": write('apply, params = hp.init_module(build, mesh, hp.P("shard"), init_fn=...)'),
    "sync_module_states": write('hp.shard(params, mesh, hp.P("shard"), broadcast_from=0)'),
    "cpu_ram_efficient_loading": write(
        "params = hp.checkpoint.import_safetensors(files, like=params)", "each rank reads its own parts"
    ),
    "activation_checkpointing_offload": {"False": _DEFAULT, "*": missing("activations stay on the device")},
    "activation_checkpointing": {"False": _DEFAULT, "*": write("hp.from_module(model, remat=True)")},
}

NAMES: Mapping[str, Rule] = {
    "accelerate.Accelerator": write(
        'mesh = hp.make_mesh((-1,), ("shard",))',
        "or keep the script as it is, and import Accelerator from hpfunc.integrations.accelerate",
        "",
        _ACCELERATOR,
    ),
    "accelerate.FullyShardedDataParallelPlugin": remove("see its options", "", _FSDP_PLUGIN),
    "accelerate.DeepSpeedPlugin": write("policy=hp.Policy.zero3()", "or zero2(), zero1(), for hp.sharded"),
    "accelerate.GradientAccumulationPlugin": write("hp.accumulate(grad_fn, num_microbatches)"),
    "accelerate.DataLoaderConfiguration": _OWN_PART,
    "accelerate.DistributedDataParallelKwargs": remove("weights that no use reached get zeros"),
    "accelerate.GradScalerKwargs": write("torch.amp.GradScaler(...)", "with bound.unscale(scaler, optimizer)"),
    "accelerate.InitProcessGroupKwargs": write("hp.make_mesh(..., timeout_s=...)", "the timeout, in seconds"),
    "accelerate.AutocastKwargs": write("hp.Numerics(param_dtype=...)"),
    "accelerate.ProfileKwargs": write("torch.profiler.profile(...)", "torch's own"),
    "accelerate.TorchDynamoPlugin": write("hp.unit(torch.compile(block_fn))", "compile what is inside of a unit"),
    "accelerate.FP8RecipeKwargs": missing("hpfunc sends and keeps weights in the dtypes of torch's own arithmetic"),
    "accelerate.TERecipeKwargs": missing("hpfunc sends and keeps weights in the dtypes of torch's own arithmetic"),
    "accelerate.AORecipeKwargs": missing("hpfunc sends and keeps weights in the dtypes of torch's own arithmetic"),
    "accelerate.ProjectConfiguration": write("hp.checkpoint.save(folder, state, keep=...)", "total_limit is keep="),
    "accelerate.ParallelismConfig": write(
        'mesh = hp.make_mesh((2, -1), ("replicate", "shard"))',
        "replicate and shard are dp_replicate_size and dp_shard_size",
    ),
    "accelerate.DistributedType": remove("there is one way on all devices"),
    "accelerate.PartialState": write('mesh = hp.make_mesh((-1,), ("shard",))'),
    "accelerate.AcceleratorState": write('mesh = hp.make_mesh((-1,), ("shard",))'),
    "accelerate.logging.get_logger": write("logging.getLogger(__name__)", "log on mesh.is_main"),
    "accelerate.set_seed": write("torch.manual_seed({arg})", "hp.init draws with the first rank's generators"),
    "accelerate.init_empty_weights": write('apply, params = hp.init_module(build, mesh, hp.P("shard"))'),
    "accelerate.load_checkpoint_and_dispatch": write("hp.checkpoint.import_safetensors(files, like=params)"),
    "accelerate.skip_first_batches": keep("on a data loader of your own"),
    "accelerate.find_executable_batch_size": missing("a size that is tried until it fits; plan memory before: hp.plan"),
    "accelerate.local_sgd.LocalSGD": missing("hpfunc reduces gradients in each step"),
    "accelerate.dispatch_model": missing("a model over the devices of one process"),
    "accelerate.cpu_offload": _OFFLOAD,
    "accelerate.test_utils.*": keep("it is for tests"),
    "accelerate.convert_outputs_to_fp32": write('hp.Numerics(output_dtype="float32")'),
    "accelerate.gather": write("hp.all_gather(x, mesh.data_axes, tiled=True, mesh=mesh)"),
    "accelerate.gather_object": write("torch.distributed.all_gather_object(...)", "outside of steps"),
    "accelerate.broadcast": write("torch.distributed.broadcast(...)", "outside of steps"),
    "accelerate.is_*_available": keep("it asks only what is installed"),
    "accelerate.is_initialized": remove("make_mesh may be called again"),
    "accelerate.__version__": remove("hp.__version__"),
}

METHODS: Mapping[str, Rule] = {
    "prepare": write(
        'apply, params = hp.from_module({model})\nbound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))',
        "make the optimizer of bound.parameters, and the loader with a sampler for mesh.data_rank",
    ),
    "prepare_model": write(
        'apply, params = hp.from_module({arg})\nbound = hp.optim.bind(hp.shard(params, mesh, hp.P("shard")))'
    ),
    "prepare_optimizer": remove("make it of bound.parameters"),
    "prepare_scheduler": remove("make it of the optimizer; it steps as often as you call it"),
    "prepare_data_loader": write(
        "DistributedSampler(dataset, mesh.num_data_ranks, mesh.data_rank)", "of torch.utils.data"
    ),
    "backward": write("bound.set_grads(grads)", "loss and gradients come from grad_fn: see the loop below"),
    "accumulate": write(
        "grad_fn = hp.accumulate(hp.value_and_grad(loss_fn), num_microbatches)", "takes a whole batch, and cuts it"
    ),
    "no_sync": write('hp.accumulate(grad_fn, num_microbatches, mode="local")', "takes a whole batch, and cuts it"),
    "clip_grad_norm_": write(
        CLIP,
        "before bound.set_grads(grads): the norm is over all ranks",
        "parameters max_norm norm_type",
    ),
    "clip_grad_value_": missing("clip each value in the step: optree.tree_map(torch.clamp, ...)"),
    "unscale_gradients": write("bound.unscale(scaler, optimizer)"),
    "gather": write("hp.all_gather({arg}, mesh.data_axes, tiled=True, mesh=mesh)"),
    "gather_for_metrics": write(
        "hp.all_gather({arg}, mesh.data_axes, tiled=True, mesh=mesh)",
        "or sum what you count: hp.loop.reduce_metrics({{'correct': correct}}, mesh, 'sum')",
    ),
    "reduce": write("hp.psum({arg}, mesh.data_axes, mesh=mesh)", "or hp.pmean"),
    "pad_across_processes": missing("pad to a length that all ranks know before hp.all_gather"),
    "unwrap_model": write("model = hp.to_module(bound.params, {arg})", "writes weights back into the module"),
    "get_state_dict": write("hp.unshard(bound.params)", "whole tensors on every rank, under the module's names"),
    "save_model": write(
        "hp.checkpoint.export_safetensors(checkpoint, file)", "of a saved checkpoint, by one process, without the model"
    ),
    "save": write("if mesh.is_main: torch.save({arg}, ...)"),
    "save_state": write(_SAVE, "what else the loop needs is in the same tree: numbers, strings, hp.checkpoint.PerRank"),
    "load_state": write(_LOAD, "hp.checkpoint.latest(folder) is its step, or None"),
    "register_for_checkpointing": write("hp.checkpoint.save(folder, {{..., 'more': {arg}.state_dict()}})"),
    "register_save_state_pre_hook": remove("save what you want in the tree"),
    "register_load_state_pre_hook": remove("load what you want from the tree"),
    "skip_first_batches": keep("on a data loader of your own: accelerate.skip_first_batches"),
    "print": write("if mesh.is_main: print(...)"),
    "wait_for_everyone": write("hp.loop.barrier(mesh)", "saving and making arrays need none"),
    "on_main_process": _RANK_0,
    "on_local_main_process": _RANK_0,
    "on_process": write("if mesh.rank == ...:"),
    "on_local_process": write('if int(os.environ["LOCAL_RANK"]) == ...:'),
    "on_last_process": write("if mesh.rank == mesh.size - 1:"),
    "main_process_first": write("hp.loop.barrier(mesh)", "before it on all ranks but the first, after it there"),
    "local_main_process_first": write("hp.loop.barrier(mesh)", "before it on all ranks but the first"),
    "split_between_processes": write("inputs[mesh.rank :: mesh.size]"),
    "join_uneven_inputs": write(
        "hp.loop.even_batches(loader, mesh, fill=...)", "all ranks get the same number of batches"
    ),
    "init_trackers": _OWN_TRACKER,
    "get_tracker": _OWN_TRACKER,
    "log": write("writer.add_scalar(...)", "on mesh.is_main"),
    "end_training": write("writer.close()", "on mesh.is_main"),
    "autocast": write("numerics = hp.Numerics(param_dtype=..., cast_inputs=True)", _NUMERICS),
    "profile": write("torch.profiler.profile(...)", "torch's own"),
    "free_memory": remove("delete the variables"),
    "clear": remove("delete the variables"),
    "set_trigger": write("hp.psum(flag, mesh.data_axes, mesh=mesh)", "every rank sees that one has set it"),
    "check_trigger": write("hp.psum(flag, mesh.data_axes, mesh=mesh)", "every rank sees that one has set it"),
    "trigger_sync_in_backward": remove("hp.accumulate knows"),
    "maybe_context_parallel": missing("see examples/torch/context_parallel.py"),
    "verify_device_map": remove("a module stands on one device"),
    "lomo_backward": missing("gradients of all weights are reduced before the update"),
}

ATTRIBUTES: Mapping[str, Rule] = {
    "device": write("mesh.device"),
    "num_processes": write("mesh.size"),
    "process_index": write("mesh.rank"),
    "local_process_index": write('int(os.environ["LOCAL_RANK"])'),
    "is_main_process": write("mesh.is_main"),
    "is_local_main_process": write('int(os.environ.get("LOCAL_RANK", 0)) == 0'),
    "is_last_process": write("mesh.rank == mesh.size - 1"),
    "sync_gradients": remove("each call of grad_fn is one whole step"),
    "gradient_accumulation_steps": write("num_microbatches"),
    "mixed_precision": write("numerics.param_dtype"),
    "distributed_type": remove("there is one way on all devices"),
    "use_distributed": write("mesh.size > 1"),
    "state": write("mesh"),
    "trackers": _OWN_TRACKER,
    "optimizer_step_was_skipped": remove("bound.unscale makes all ranks skip, or none"),
    "native_amp": remove("hp.Numerics says in which dtypes is computed"),
    "scaler": write("scaler", "a torch.amp.GradScaler of your own"),
    "torch_device_mesh": write("mesh"),
    "parallelism_config": write("mesh"),
    "project_dir": write("folder"),
    "project_configuration": write("folder"),
    "save_iteration": write("hp.checkpoint.latest(folder)"),
    "step": write("step", "count it yourself"),
    "deepspeed_plugin": remove("its options are policy and numerics"),
    "deepspeed_ulysses_dl_adapter": missing("see examples/torch/context_parallel.py"),
    "dispatch_batches": _OWN_PART,
    "split_batches": _OWN_PART,
    "even_batches": _OWN_PART,
    "use_seedable_sampler": _OWN_PART,
    "use_stateful_dataloader": _OWN_PART,
    "non_blocking": _OWN_PART,
    "fp8_backend": remove("hp.Numerics says in which dtypes is computed"),
    "is_composable_parallelism_enabled": remove("there is one way on all devices"),
    "logging_dir": write("folder"),
    "multi_device": write("mesh.size > 1"),
    "should_save_model": remove("all ranks call hp.checkpoint.save"),
    "pipeline_parallel_rank": missing("hpfunc has no pipeline parallelism"),
    "tensor_parallel_rank": write('hp.axis_index("tp", mesh=mesh)', "of the axis as you call it"),
    "context_parallel_rank": write('hp.axis_index("cp", mesh=mesh)', "of the axis as you call it"),
    "data_parallel_rank": write("hp.axis_index(mesh.data_axes, mesh=mesh)"),
    "data_parallel_shard_rank": write('hp.axis_index("shard", mesh=mesh)', "of the axis as you call it"),
    "is_fsdp2": remove("there is one way on all devices"),
}
