"""Key/value caches of models on a mesh: a cache of fixed size, and caches that transformers makes by itself."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dtorch.attention import sequence_axes
from dtorch.factory import zeros
from dtorch.parallel.tp_plan import BATCH_AXES, TP_AXIS, has_ranks
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
        batch_size: sequences at once; cut along the axes ``dp`` and ``ep``.

    Returns:
        The cache; keys and values of each layer are of global shape (batch_size, key/value heads, max_cache_len,
        features of a head), sharded on the heads along ``tp`` where the plan cuts the heads, and on the tokens along
        ``ulysses_cp`` and ``ring_cp``, where layers with a sliding window are whole. Models whose cache holds
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

    def empty(home: _Home, length: int) -> torch.Tensor:
        shape = (batch_size, num_heads, length, head_dim)
        placements = _placements(home)
        return zeros(*shape, dtype=parameter.dtype, device_mesh=home.mesh, placements=placements)

    homes = dict(_homes_of_layers(model))
    for index, layer in enumerate(cache.layers):
        home = homes.get(index, _Home(parameter.device_mesh, True))
        home = replace(home, cuts_tokens=not getattr(layer, "is_sliding", False))
        with parameter.graph.device_mesh_guard(home.mesh):
            layer.lazy_initialization(empty(home, 1), empty(home, 1))
        # A layer with a sliding window keeps fewer.
        layer.keys = empty(home, layer.max_cache_len)
        layer.values = empty(home, layer.max_cache_len)
    if sequence_axes(parameter.device_mesh):
        from dtorch.parallel.cut_cache import cut_cache  # it needs transformers

        cut_cache(cache)
    return cache


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a layer's keys and values are, and what of them is cut where the mesh has an axis for it."""

    mesh: DeviceMesh
    cuts_heads: bool
    cuts_tokens: bool = True


def _placements(home: _Home) -> list[Placement]:
    cut: dict[str, Placement] = dict.fromkeys(BATCH_AXES, Shard(0))
    if home.cuts_heads:
        cut[TP_AXIS] = Shard(1)
    if home.cuts_tokens:
        cut |= dict.fromkeys(sequence_axes(home.mesh), Shard(2))
    names = home.mesh.mesh_dim_names or ()
    return [cut.get(name, Replicate()) if has_ranks(home.mesh, name) else Replicate() for name in names]


def _homes_of_layers(model: nn.Module) -> Iterator[tuple[int, _Home]]:
    """The mesh of the attention layer with each number, and whether its heads are cut.

    Those of a pipeline are on the mesh of their stage, and a plan may cut the heads of some.
    """
    cut: frozenset[str] | None = getattr(model, "dtorch_cut_by_heads", None)
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        parameter: Any = next(module.parameters(), None)
        if isinstance(number, int) and isinstance(parameter, Tensor):
            cuts_heads = cut is None or any(other.startswith(f"{name}.") for other in cut)
            yield number, _Home(parameter.device_mesh, cuts_heads)


def place_caches(values: Iterable[Any]) -> None:
    """Prepare the caches among a model's arguments for a step.

    A beam search picks rows that other devices have, which leaves partial sums: they are reduced. Layers of fixed size
    that are still to be made will be made where keys and values of the model are. Rows are picked where a layer is, and
    its length goes to where it is asked for, which may be another stage.
    """
    for layer in (layer for cache in caches_in(values) for layer in cache.layers):
        if getattr(layer, "is_initialized", False):
            layer.keys, layer.values = _reduced(layer.keys), _reduced(layer.values)
        elif hasattr(layer, "max_cache_len") and not hasattr(layer, "conv_states"):
            layer.lazy_initialization = types.MethodType(_make_where_keys_are, layer)
        if hasattr(layer, "reorder_cache") and "reorder_cache" not in vars(layer):
            layer.reorder_cache = types.MethodType(_reorder_where_keys_are, layer)
            layer.get_seq_length = types.MethodType(_length_where_it_is_asked_for, layer)


def caches_in(values: Iterable[Any]) -> Iterator[Any]:
    """The caches of transformers among a model's arguments; both of an encoder with a decoder."""
    for value in values:
        inner = [getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        if any(part is not None for part in inner):
            yield from caches_in(inner)
        elif hasattr(value, "layers") and hasattr(value, "update") and not isinstance(value, nn.Module):
            yield value


def _reduced(states: Any) -> Any:
    if not isinstance(states, Tensor) or not any(isinstance(p, Partial) for p in states.placements):
        return states
    names = states.device_mesh.mesh_dim_names or ("",) * states.device_mesh.ndim
    return states.redistribute(
        placements=[
            p if not isinstance(p, Partial) else Shard(0) if name in BATCH_AXES else Replicate()
            for name, p in zip(names, states.placements, strict=True)
        ]
    )


def _reorder_where_keys_are(layer: Any, beam_idx: Any) -> None:
    """``reorder_cache`` of a layer that is on another stage than the beams."""
    keys = getattr(layer, "keys", None)
    if isinstance(keys, Tensor) and isinstance(beam_idx, Tensor) and keys.device_mesh != beam_idx.device_mesh:
        whole = [Replicate()] * keys.device_mesh.ndim
        beam_idx = beam_idx.redistribute(device_mesh=keys.device_mesh, placements=whole)
    type(layer).reorder_cache(layer, beam_idx)


def _length_where_it_is_asked_for(layer: Any) -> Any:
    """``get_seq_length``; of a layer of fixed size that is a tensor."""
    length = type(layer).get_seq_length(layer)
    if not isinstance(length, Tensor) or length.device_mesh == length.graph.default_mesh:
        return length
    mesh = length.graph.default_mesh
    return length.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)


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
    on_tokens: Placement = Replicate() if getattr(layer, "is_sliding", False) else Shard(2)
    cut = dict.fromkeys(sequence_axes(key_states.device_mesh), on_tokens)
    names = key_states.device_mesh.mesh_dim_names or ("",) * key_states.device_mesh.ndim
    layer.keys, layer.values = (
        zeros(
            *states.shape[:2],
            length,
            states.shape[-1],
            dtype=states.dtype,
            device_mesh=states.device_mesh,
            placements=[cut.get(name, p) for name, p in zip(names, states.placements, strict=True)],
        )
        for states in (key_states, value_states)
    )
