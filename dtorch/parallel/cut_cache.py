"""Layers of transformers' caches on the axes of context parallelism.

Keys and values stay cut by sequence: each device keeps its part of all tokens, those that are decoded among them, and
attention brings together what is computed from them (``dtorch.merged_attention``). Layers with a sliding window keep
that window whole, since it does not grow. A layer becomes one of these classes in place; elsewhere they do what those
of transformers do. Keys and values are of global shape [batch, heads, tokens, features].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from dtorch.attention import sequence_axes
from dtorch.cut_rows import appended, whole_along, written
from dtorch.tensors import Tensor
from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.ir.placement import Placement, Replicate, Shard

#: The dim of tokens in keys and values.
TOKENS_DIM: Final = 2


def _axes(states: Any) -> tuple[int, ...]:
    """The numbers of the axes that cut sequences where keys or values are."""
    if not isinstance(states, Tensor):
        return ()
    mesh = states.device_mesh
    return tuple(mesh.axis(name) for name in sequence_axes(mesh))


def with_tokens(states: Any, placement: Placement) -> Any:
    """Keys or values with the same placement on all axes of the sequence."""
    placements = list(states.placements)
    for axis in _axes(states):
        placements[axis] = placement
    return states.redistribute(placements=placements)


def _cut(states: Any) -> Any:
    return with_tokens(states, Shard(TOKENS_DIM))


def _whole(states: Any) -> Any:
    return whole_along(states, _axes(states))


def _is_cut(states: Any) -> bool:
    return any(states.placements[axis] == Shard(TOKENS_DIM) for axis in _axes(states))


def _last(states: Any, count: int) -> Any:
    """The last tokens, on all devices; no device has more than them and its own."""
    length = states.shape[TOKENS_DIM]
    places = torch.arange(max(length - count, 0), length, device=states.device)
    return with_tokens(states.index_select(TOKENS_DIM, places), Replicate())


class CutDynamicLayer(DynamicLayer):
    """Grows with its tokens, and stays cut evenly."""

    has_tensors = True  # which dtorch.capture watches

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _axes(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.get_seq_length() == 0:
            self.keys, self.values = (_own(_cut(x)) for x in (key_states, value_states))
        else:
            self.keys = appended(self.keys, _whole(key_states), TOKENS_DIM)
            self.values = appended(self.values, _whole(value_states), TOKENS_DIM)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        is_cut = self.is_initialized and _is_cut(self.keys)
        if is_cut:
            self.keys, self.values = _whole(self.keys), _whole(self.values)
        try:
            super().crop(tokens_to_remove)
        finally:
            if is_cut:
                self.keys, self.values = _cut(self.keys), _cut(self.values)


def _own(states: Any) -> Any:
    """A copy that keeps nothing else alive, such as the queries that were made with it; autograd keeps that anyway."""
    return states if states.requires_grad else states.clone()


class WholeSlidingLayer(DynamicSlidingWindowLayer):
    """The window, on all devices."""

    has_tensors = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _is_cut(key_states) or self.cumulative_length or self.record_past:
            states = (_whole(x) if _axes(x) else x for x in (key_states, value_states))
            return super().update(*states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[TOKENS_DIM]
        count = self.sliding_window - 1
        self.keys, self.values = _last(key_states, count), _last(value_states, count)
        return key_states, value_states


class CutStaticLayer(StaticLayer):
    """Each device keeps a run of the places.

    Attributes:
        num_columns: of the mask of the attention that is under way; None where it has none.
    """

    has_tensors = True
    num_columns: int | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _axes(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[TOKENS_DIM]
        mesh = key_states.device_mesh
        places: Any = torch.arange(count, device=self.device) + self.cumulative_length
        places = places.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        self.cumulative_length.add_(count)
        for target, states in ((self.keys, key_states), (self.values, value_states)):
            written(target, places, _whole(states), TOKENS_DIM)
        if count > 1 and self.num_columns is None:
            # Transformers' attention takes the first places then: a prompt, in a cache that was empty.
            return key_states, value_states
        return self.keys, self.values


class WholeStaticSlidingLayer(StaticSlidingWindowLayer):
    """The window, on all devices. ``num_columns`` as for ``CutStaticLayer``."""

    has_tensors = True
    num_columns: int | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        count = key_states.shape[TOKENS_DIM]
        is_prompt = self.cumulative_length_int == 0 and count > 1 and self.num_columns in (None, count)
        states = [_whole(x) if _axes(x) else x for x in (key_states, value_states)]
        found = super().update(*states, *args, **kwargs)
        return (key_states, value_states) if is_prompt and _axes(key_states) else found


_CLASSES: Final[dict[type, type]] = {
    DynamicLayer: CutDynamicLayer,
    DynamicSlidingWindowLayer: WholeSlidingLayer,
    StaticLayer: CutStaticLayer,
    StaticSlidingWindowLayer: WholeStaticSlidingLayer,
}


def cut_cache(cache: Any) -> None:
    """Let the layers of a cache keep keys and values as the axes of the sequence have them.

    Raises:
        UnsupportedError: a layer of another class holds keys that grow.
    """
    for layer in cache.layers:
        cut_layer(layer)
    made: Any = getattr(cache, "layer_class_to_replicate", None)
    cache.layer_class_to_replicate = _CLASSES.get(made, made)


def cut_layer(layer: Any) -> None:
    """As ``cut_cache``."""
    kind = type(layer)
    if kind in _CLASSES:
        layer.__class__ = _CLASSES[kind]
    elif kind not in _CLASSES.values():
        raise UnsupportedError(
            f"a cache whose sequences are cut over mesh axes has layers of {_names(_CLASSES)}, got {kind.__name__}; "
            f"write use_cache=False, for generate() too, or give a mesh without 'ulysses_cp' and 'ring_cp'"
        )


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
