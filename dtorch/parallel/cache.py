"""A key/value cache of fixed size for a model on a mesh, so that every decoded token is the same call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dtorch.factory import zeros
from dtorch.parallel.tp_plan import has_ranks
from dtorch.tensors import Tensor
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Placement, Replicate, Shard


def static_cache(model: nn.Module, max_cache_len: int, batch_size: int = 1) -> Any:
    """A ``transformers.StaticCache`` whose keys and values lie where those of the model do.

    With it the step that decodes a token has the same shapes each time, so ``dtorch.capture`` replays it::

        @dtorch.capture
        def step(model, token, cache):
            return model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)

    Args:
        model: a Hugging Face decoder that ``parallelize`` has put on a mesh.
        max_cache_len: the most tokens, those of the prompt counted.
        batch_size: sequences at once; cut along the axis ``dp``.

    Returns:
        The cache; keys and values of each layer are of global shape (batch_size, key/value heads, max_cache_len,
        features of a head), sharded on the heads along ``tp``.

    Raises:
        UnsupportedError: the model has no parameters on a mesh, or its configuration says nothing of heads.
    """
    from transformers import StaticCache

    parameter: Any = next(iter(model.parameters()), None)
    config: Any = getattr(model, "config", None)
    num_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(parameter, Tensor) or num_heads is None:
        raise UnsupportedError(
            f"static_cache takes a Hugging Face decoder that is on a mesh, got {type(model).__name__}; write "
            f"model = dtorch.parallelize(model, mesh) first"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache: Any = StaticCache(config=config, max_cache_len=max_cache_len)

    def empty(mesh: DeviceMesh, length: int) -> torch.Tensor:
        shape = (batch_size, num_heads, length, head_dim)
        return zeros(*shape, dtype=parameter.dtype, device_mesh=mesh, placements=_placements(mesh))

    meshes = dict(_meshes_of_layers(model))
    for index, layer in enumerate(cache.layers):
        mesh = meshes.get(index, parameter.device_mesh)
        with parameter.graph.device_mesh_guard(mesh):
            layer.lazy_initialization(empty(mesh, 1), empty(mesh, 1))
        layer.keys, layer.values = empty(mesh, max_cache_len), empty(mesh, max_cache_len)
    return cache


def _placements(mesh: DeviceMesh) -> list[Placement]:
    cut: dict[str, Placement] = {"dp": Shard(0), "tp": Shard(1)}
    names = mesh.mesh_dim_names or ()
    return [cut.get(name, Replicate()) if has_ranks(mesh, name) else Replicate() for name in names]


def _meshes_of_layers(model: nn.Module) -> Iterator[tuple[int, DeviceMesh]]:
    """The mesh of the attention layer with each number: those of a pipeline are on that of their stage."""
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        parameter: Any = next(module.parameters(), None)
        if isinstance(number, int) and isinstance(parameter, Tensor):
            yield number, parameter.device_mesh
