"""Names that other libraries have for what is called otherwise here: asked of hpfunc, they are answered with ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from .._errors import MissingNameError, message

_GRADIENTS = "gradients are values: loss, grads = hpfunc.value_and_grad(loss_fn)(params, batch)"
_VALUES = "weights are values beside the function: the params that hpfunc.from_module returned"
_UPDATE = "updates, opt_state = optimizer.update(grads, opt_state, params)"


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """Returns the hint of each name; a row has names, separated by blanks, and their hint."""
    return {name: hint for names, hint in rows for name in names.split()}


HPFUNC: Mapping[str, str] = _table(
    ("jit pjit pmap shard_map xmap compile", "step = hpfunc.sharded(step_fn, mesh)"),
    ("tree tree_map tree_util", "optree.tree_map(fn, tree)"),
    ("lax distributed dist", "hpfunc.psum, hpfunc.all_gather and others, by the name of an axis"),
    ("all_reduce allreduce", "hpfunc.psum(x, axis), hpfunc.pmean, hpfunc.pmax or hpfunc.pmin"),
    ("reduce_scatter reduce_scatter_tensor", "hpfunc.psum_scatter(x, axis, tiled=True)"),
    ("all_gather_into_tensor", "hpfunc.all_gather(x, axis, tiled=True)"),
    ("broadcast", "hpfunc.shard(tree, mesh, specs, broadcast_from=0) takes the values of one rank"),
    ("barrier", "hpfunc.loop.barrier(mesh)"),
    ("device_put distribute_tensor DTensor", "hpfunc.shard(tree, mesh, specs)"),
    ("with_sharding_constraint redistribute", "hpfunc.reshard(tree, specs)"),
    ("NamedSharding", "hpfunc.P('shard') says how an array is cut; the mesh is given beside it"),
    ("random PRNGKey vmap no_grad numpy", "that is the framework's own, such as torch.no_grad"),
    ("remat checkpoint_wrapper", "hpfunc.unit(fn, remat=True)"),
    ("stop_gradient", "x.detach() for a tensor in a unit; hpfunc.freeze(tree) for weights"),
    (
        "fully_shard FSDP FullyShardedDataParallel DDP DistributedDataParallel wrap initialize prepare",
        "apply, params = hpfunc.from_module(module); params = hpfunc.shard(params, mesh, hpfunc.P('shard'))",
    ),
    ("init_device_mesh DeviceMesh init_process_group", "mesh = hpfunc.make_mesh((-1,), ('shard',))"),
    ("MixedPrecision MixedPrecisionPolicy", "hpfunc.Numerics(param_dtype='bfloat16', cast_inputs=True)"),
    ("get_rank rank process_index", "mesh.rank"),
    ("get_world_size world_size process_count device_count", "mesh.size"),
    ("save save_checkpoint", "hpfunc.checkpoint.save(path, tree)"),
    ("load load_checkpoint restore", "hpfunc.checkpoint.load(path, like=tree)"),
    (
        "Adam AdamW SGD adam adamw sgd",
        "hpfunc.optim.adamw(learning_rate) and others, or hpfunc.optim.from_torch(torch.optim.X)",
    ),
    ("clip_grad_norm_", "hpfunc.clip_by_global_norm(max_norm), or hpfunc.clip_with_norm(grads, max_norm, norm)"),
    ("Trainer Accelerator integrations", "import hpfunc.integrations.transformers, .lightning or .accelerate"),
)
MESH: Mapping[str, str] = _table(
    ("world_size num_devices", "mesh.size"),
    ("get_rank process_index", "mesh.rank"),
    ("local_rank get_local_rank", "mesh.axis_index(axis); the LOCAL_RANK of a launcher is in os.environ"),
    ("get_coordinate coords", "mesh.coordinate"),
    ("mesh_dim_names axes names", "mesh.axis_names"),
    ("ndim", "len(mesh.axis_names)"),
    ("get_group get_all_groups", "collectives take the name of an axis: hpfunc.psum(x, 'shard', mesh=mesh)"),
    ("devices device_type", "mesh.device is that of this rank; mesh.ranks has all ranks"),
    ("barrier", "hpfunc.loop.barrier(mesh)"),
    ("is_master is_main_process is_rank_zero", "mesh.is_main"),
)
OPTIMIZER: Mapping[str, str] = _table(
    ("step minimize apply_gradients apply apply_updates", _UPDATE + "; params = hpfunc.apply_updates(params, updates)"),
    ("zero_grad", _GRADIENTS),
    (
        "param_groups add_param_group lr",
        "options are given when it is made; a learning rate may be a function of the step",
    ),
    ("state state_dict load_state_dict", "the state is a value: opt_state = optimizer.init(params)"),
)
BOUND: Mapping[str, str] = _table(
    ("step", "optimizer = torch.optim.AdamW(bound.parameters); bound.set_grads(grads); optimizer.step()"),
    ("zero_grad backward grads grad", f"{_GRADIENTS}; bound.set_grads(grads)"),
    ("state_dict load_state_dict", "bound.state(optimizer), and bound.load_state(optimizer, state)"),
    ("clip_grad_norm_", "hpfunc.clip_with_norm(grads, max_norm, hpfunc.global_norm(grads)) before bound.set_grads"),
)
STEP: Mapping[str, str] = _table(
    ("schedule plan", "step.last_schedule; without a run step.lower(*args).schedule"),
    ("trace compile program", "step.lower(*args) gives program and schedule"),
    ("counters", "step.last_counters"),
)
MODULE_FUNCTION: Mapping[str, str] = _table(
    ("parameters named_parameters state_dict load_state_dict params", _VALUES),
    ("to cuda cpu half bfloat16 float", f"{_VALUES}; arrays lie on mesh.device"),
    ("zero_grad backward", _GRADIENTS),
    ("requires_grad_", "hpfunc.freeze(params, where)"),
    ("forward", "apply(params, *args)"),
    ("generate encode decode", "apply.method('generate')(params, *args) is another method"),
)
ARRAY: Mapping[str, str] = _table(
    ("sharding placements", "array.spec and array.mesh"),
    ("device_mesh", "array.mesh"),
    ("addressable_shards addressable_data to_local global_shards", "array.local is this rank's part"),
    ("full_tensor unshard gather", "array.full()"),
    ("redistribute reshard", "hpfunc.reshard(array, specs)"),
    ("block_until_ready", "the framework's, such as torch.cuda.synchronize()"),
    ("at", "arrays are immutable; a new one: part = array.local.clone(), then array.with_local(part)"),
)


def missing(owner: str, name: str, ours: Mapping[str, str], known: Iterable[str] = ()) -> AttributeError:
    """Returns the error for a name that is not there, with what it is called here.

    Args:
        owner: what was asked, by its public name.
        name: the name.
        ours: for names of other libraries, what to write.
        known: names that are there, one of which may be meant.
    """
    if name.startswith("_"):
        return AttributeError(f"{owner} has no {name!r}", name=name)
    close = difflib.get_close_matches(name, known, n=1)
    hint = ours.get(name) or (f"did you mean {close[0]!r}?" if close else None)
    return MissingNameError(message(owner, f"it has no {name!r}", hint=hint))
