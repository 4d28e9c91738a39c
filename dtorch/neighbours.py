"""Names of PyTorch and its DTensor that DTorch does not have, and what to write instead. Read when one is asked for."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

_PLACED = "dtorch.from_torch(t, mesh, placements)"
_MODULE = "dtorch.parallelize(module, mesh), or module.to('dtorch')"
_ZERO = "dtorch.parallelize(module, mesh), then dtorch.parallel.zero(module, stage=3)"
_REDISTRIBUTE = "x.redistribute(placements=[{}]); DTorch does the communication"
_NO_RANKS = (
    "nothing: one program drives all devices and there are no ranks; dtorch.init() starts or joins a cluster"
)
_WRITE = {
    "DTensor": f"dtorch.Tensor for the class, {_PLACED} to make one",
    "distribute_tensor": _PLACED,
    "distribute_module": _MODULE,
    "parallelize_module": _MODULE,
    "fully_shard": _ZERO,
    "FSDP": _ZERO,
    "DDP": _MODULE,
    "DistributedDataParallel": _MODULE,
    "FullyShardedDataParallel": _ZERO,
    "ZeroRedundancyOptimizer": "dtorch.parallel.zero(model, optimizer, stage=1)",
    "from_local": f"{_PLACED}, where t is the global tensor: a program sees no local ones",
    "to_local": "x.to_torch() for the global value: a program sees no local tensors",
    "full_tensor": "x.to_torch(), or x.redistribute(placements=[Replicate()]) to keep it on the cluster",
    "Replicated": "dtorch.Replicate()",
    "Sharded": "dtorch.Shard(dim)",
    "all_reduce": _REDISTRIBUTE.format("Replicate()") + " (of a Partial() tensor)",
    "all_gather": _REDISTRIBUTE.format("Replicate()"),
    "all_gather_into_tensor": _REDISTRIBUTE.format("Replicate()"),
    "gather": "x.to_torch() for the value here; torch.gather(x, dim, index) for the op",
    "reduce": _REDISTRIBUTE.format("Replicate()"),
    "reduce_scatter": _REDISTRIBUTE.format("Shard(dim)") + " (of a Partial() tensor)",
    "reduce_scatter_tensor": _REDISTRIBUTE.format("Shard(dim)") + " (of a Partial() tensor)",
    "all_to_all": _REDISTRIBUTE.format("Shard(other_dim)"),
    "all_to_all_single": _REDISTRIBUTE.format("Shard(other_dim)"),
    "broadcast": f"{_PLACED} with Replicate()",
    "scatter": f"{_PLACED} with Shard(dim)",
    "send": "x.redistribute(device_mesh=other)",
    "recv": "x.redistribute(device_mesh=other)",
    "barrier": "dtorch.Graph.default_graph().sync()",
    "synchronize": "dtorch.Graph.default_graph().sync()",
    "init_process_group": _NO_RANKS,
    "destroy_process_group": "dtorch.shutdown()",
    "new_group": "mesh['axis'] for a part of a mesh, or another dtorch.DeviceMesh",
    "get_rank": _NO_RANKS,
    "get_world_size": "mesh.size()",
    "is_initialized": "nothing: the first op calls dtorch.init()",
    "set_device": "device_mesh= where a tensor is made, or Graph.default_graph().device_mesh_guard(mesh)",
    "device": "dtorch.DeviceMesh(...) as device_mesh=, or device='dtorch' in PyTorch's own functions",
    "device_count": "len(mesh.devices)",
    "from_numpy": "dtorch.from_torch(torch.from_numpy(array))",
    "as_tensor": "dtorch.tensor(data) or dtorch.from_torch(t)",
    "mesh": "dtorch.init_device_mesh('cpu', shape)",
}


def hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of ``dtorch.<name>``, as the end of a message; empty when nobody knows."""
    write = _WRITE.get(name)
    if write is not None:
        return f"; write {write}"
    if hasattr(sys.modules.get("torch"), name):
        return f"; write torch.{name}: what PyTorch has works on DTorch's tensors"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    if near:
        return f"; did you mean dtorch.{near[0]}?"
    return ""
