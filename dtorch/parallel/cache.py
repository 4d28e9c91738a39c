"""Key/value caches of models on a mesh: a cache of fixed size, and caches that transformers makes by itself."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dtorch.factory import zeros
from dtorch.parallel.tp_plan import DP_AXIS, has_ranks
from dtorch.tensors import Tensor
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard


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
        features of a head), sharded on the heads along ``tp`` where the plan cuts the heads. Models whose cache holds
        something else (DeepSeek's holds what keys and values are made of) make it themselves in the first step, which
        then cannot be captured.

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

    if getattr(config, "kv_lora_rank", None):
        return cache

    def empty(mesh: DeviceMesh, cuts_heads: bool, length: int) -> torch.Tensor:
        shape = (batch_size, num_heads, length, head_dim)
        return zeros(
            *shape, dtype=parameter.dtype, device_mesh=mesh, placements=_placements(mesh, cuts_heads)
        )

    homes = dict(_homes_of_layers(model))
    for index, layer in enumerate(cache.layers):
        mesh, cuts_heads = homes.get(index, (parameter.device_mesh, True))
        with parameter.graph.device_mesh_guard(mesh):
            layer.lazy_initialization(empty(mesh, cuts_heads, 1), empty(mesh, cuts_heads, 1))
        # A layer with a sliding window keeps fewer.
        layer.keys = empty(mesh, cuts_heads, layer.max_cache_len)
        layer.values = empty(mesh, cuts_heads, layer.max_cache_len)
    return cache


def _placements(mesh: DeviceMesh, cuts_heads: bool) -> list[Placement]:
    cut: dict[str, Placement] = {"dp": Shard(0), "tp": Shard(1) if cuts_heads else Replicate()}
    names = mesh.mesh_dim_names or ()
    return [cut.get(name, Replicate()) if has_ranks(mesh, name) else Replicate() for name in names]


def _homes_of_layers(model: nn.Module) -> Iterator[tuple[int, tuple[DeviceMesh, bool]]]:
    """The mesh of the attention layer with each number, and whether its heads are cut.

    Those of a pipeline are on the mesh of their stage, and a plan may cut the heads of some.
    """
    cut: frozenset[str] | None = getattr(model, "dtorch_cut_by_heads", None)
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        parameter: Any = next(module.parameters(), None)
        if isinstance(number, int) and isinstance(parameter, Tensor):
            cuts_heads = cut is None or any(other.startswith(f"{name}.") for other in cut)
            yield number, (parameter.device_mesh, cuts_heads)


def place_caches(values: Iterable[Any]) -> None:
    """Prepare the caches among a model's arguments for a step.

    A beam search picks rows that other devices have, which leaves partial sums: they are reduced. Layers of fixed size
    that are still to be made will be made where keys and values of the model are.
    """
    for layer in _layers(values):
        if getattr(layer, "is_initialized", False):
            layer.keys, layer.values = _reduced(layer.keys), _reduced(layer.values)
        elif hasattr(layer, "max_cache_len") and not hasattr(layer, "conv_states"):
            layer.lazy_initialization = types.MethodType(_make_where_keys_are, layer)


def _layers(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        inner = [getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        if any(part is not None for part in inner):
            yield from _layers(inner)
        elif hasattr(value, "layers") and hasattr(value, "update") and not isinstance(value, nn.Module):
            yield from value.layers


def _reduced(states: Any) -> Any:
    if not isinstance(states, Tensor) or not any(isinstance(p, Partial) for p in states.placements):
        return states
    names = states.device_mesh.mesh_dim_names or ("",) * states.device_mesh.ndim
    return states.redistribute(
        placements=[
            p if not isinstance(p, Partial) else Shard(0) if name == DP_AXIS else Replicate()
            for name, p in zip(names, states.placements, strict=True)
        ]
    )


def _make_where_keys_are(layer: Any, key_states: Any, value_states: Any) -> None:
    """``lazy_initialization`` of a layer of fixed size. Nowhere is more made than what stays there."""
    if not isinstance(key_states, Tensor):
        type(layer).lazy_initialization(layer, key_states, value_states)
        return
    length = layer.max_cache_len
    layer.max_cache_len = 0
    try:
        type(layer).lazy_initialization(layer, key_states, value_states)
    finally:
        layer.max_cache_len = length
    layer.keys, layer.values = (
        zeros(
            *states.shape[:2],
            length,
            states.shape[-1],
            dtype=states.dtype,
            device_mesh=states.device_mesh,
            placements=states.placements,
        )
        for states in (key_states, value_states)
    )
