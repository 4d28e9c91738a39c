"""Sequences that are cut over the axes of context parallelism, in a model that does not know of it.

What a model is called with is cut where the model begins; attention does the rest (``dtorch.attention``).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from dtorch.attention import RING_AXIS, ULYSSES_AXES, sequence_axes
from dtorch.parallel.by_place import keep_places
from dtorch.parallel.cache import caches_in
from dtorch.parallel.facts import base_prefix
from dtorch.parallel.hooks import encoder_of, find_main_input, map_tensors
from dtorch.parallel.tp_plan import TP_AXIS, has_ranks
from dtorch.tensors import Tensor
from dtorch_runtime.errors import PlacementError, SettingError
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Replicate, Shard

#: Which dim of tokens, of embeddings and of hidden states is the sequence; dim 0 is the batch.
_SEQUENCE_DIM: Final = 1
_TOKENS: Final = ("input_ids", "inputs_embeds")
#: Losses of Hugging Face models that are given one label for each place of the sequence, by ``loss_type``.
_SHIFTED, _IN_PLACE = ("ForCausalLM",), ("ForMaskedLM", "ForTokenClassification")


def check_sequence(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse models whose sequences these axes cannot cut.

    Raises:
        SettingError: the model takes no tokens, or does not use ``scaled_dot_product_attention``.
        PlacementError: there are more devices than heads to cut.
    """
    axes = sequence_axes(mesh)
    if not axes:
        return
    config, name = getattr(model, "config", None), type(model).__name__
    main = getattr(model, "main_input_name", _TOKENS[0])
    if main not in _TOKENS:
        raise SettingError(
            f"the axis {axes[0]!r} cuts sequences of tokens, and {name} is called with {main}; "
            f"give a mesh without it"
        )
    attention = getattr(config, "_attn_implementation", "sdpa")
    if attention != "sdpa":
        raise SettingError(
            f"over the axis {axes[0]!r} attention is F.scaled_dot_product_attention, and {name} uses {attention!r}; "
            f"write model.set_attn_implementation('sdpa')"
        )
    num_heads = getattr(config, "num_attention_heads", None)
    cuts = [axis for axis in (*ULYSSES_AXES, TP_AXIS) if has_ranks(mesh, axis)]
    num_parts = _product(mesh, cuts)
    if axes != [RING_AXIS] and isinstance(num_heads, int) and num_heads < num_parts:
        raise PlacementError(
            f"{name} has {num_heads} heads, which {' and '.join(map(repr, cuts))} cannot cut into {num_parts}; give a "
            f"mesh with shorter axes, or name one of them {RING_AXIS!r}, which cuts no heads"
        )


def add_sequence_hooks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut what ``model`` is called with along the sequence. ``mesh`` is where a call begins.

    An encoder with a decoder has the sequence of the encoder cut, that of the decoder is whole. The encoder by itself,
    as ``generate()`` calls it, has its sequence cut too.
    """
    axes = sequence_axes(mesh)
    if not axes:
        return
    has_loss_of_pieces = _use_loss_of_pieces(model, axes)

    def is_whole_behind(kwargs: dict[str, Any]) -> bool:
        """Whether what comes behind the base model takes the sequence apart: its last place, or rows for a loss."""
        places = kwargs.get("logits_to_keep", 0)
        some_places = not (isinstance(places, int) and places == 0)
        return some_places or (kwargs.get("labels") is not None and not has_loss_of_pieces)

    keep_places(model)
    _add_call_hooks(model, axes, is_whole_behind, is_part=False)
    encoder = encoder_of(model)
    if encoder is not None:
        _add_call_hooks(encoder, axes, lambda kwargs: False, is_part=True)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.register_forward_pre_hook(_cut_caches_of_layer, with_kwargs=True)
    base = getattr(model, base_prefix(model) or "", None)
    if isinstance(base, nn.Module):
        base.register_forward_hook(lambda module, args, output: _gathered(output, axes))


def _add_call_hooks(
    model: nn.Module, axes: list[str], is_whole_behind: Callable[[dict[str, Any]], bool], is_part: bool
) -> None:
    """The hooks of a model, or of a part of it for calls that are not the model's own."""
    cut = dict.fromkeys(axes, Shard(_SEQUENCE_DIM))
    names = [*inspect.signature(model.forward).parameters]
    has_encoder = "encoder_outputs" in names

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_part and _calls.open:
            return None
        _calls.open.append((id(module), is_whole_behind(kwargs)))
        _cut_caches((*args, *kwargs.values()))
        if has_encoder:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            mains = _sequences_of_encoder(given)
        else:
            mains = [find_main_input(module, args, kwargs)]
        brought = {id(x): x.redistribute_by_dict(cut) for x in mains if _has_places(x)}
        # What else goes by places (masks, positions, labels) stays whole: each device uses its part of it.
        return tuple(map_tensors(lambda t: brought.get(id(t), t), part) for part in (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # Also called when the forward raised, and then even if `enter` never ran because a hook before it raised.
        if _calls.open and _calls.open[-1][0] == id(module):
            _calls.open.pop()

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


def _sequences_of_encoder(given: Mapping[str, Any]) -> list[Any]:
    """What an encoder is called with, or what it gave."""
    found = [given.get(name) for name in _TOKENS]

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(take, given.get("encoder_outputs"))
    return found


def _has_places(x: Any) -> bool:
    """Whether there is something to cut. One place, as a step that decodes a token has, is for every device."""
    return isinstance(x, Tensor) and x.ndim > _SEQUENCE_DIM and x.shape[_SEQUENCE_DIM] > 1


def _cut_caches(values: Iterable[Any]) -> None:
    for cache in caches_in(values):
        from dtorch.parallel.cut_cache import cut_cache  # it needs transformers, which has made a cache

        cut_cache(cache)


def _cut_caches_of_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For a cache that the model made in this call; and what a layer of fixed size must know of the mask."""
    number: Any = module.layer_idx
    for cache in caches_in((*args, *kwargs.values())):
        from dtorch.parallel.cut_cache import cut_cache, cut_layer

        if number >= len(cache.layers):
            cut_cache(cache)
            continue
        layer = cache.layers[number]
        cut_layer(layer)
        if hasattr(layer, "num_columns"):
            layer.num_columns = _num_columns(kwargs)


def _num_columns(kwargs: Mapping[str, Any]) -> int | None:
    masks = (value for name, value in kwargs.items() if "mask" in name and isinstance(value, torch.Tensor))
    return next((mask.shape[-1] for mask in masks), None)


class _Calls(threading.local):
    """Those in progress on this thread: the model's id, and whether hidden states are to be whole behind its base."""

    def __init__(self) -> None:
        self.open: list[tuple[int, bool]] = []


_calls = _Calls()


def _gathered(output: Any, axes: list[str]) -> Any:
    if not _calls.open or not _calls.open[-1][1]:
        return None
    whole = dict.fromkeys(axes, Replicate())
    return map_tensors(lambda t: t.redistribute_by_dict(whole) if isinstance(t, Tensor) else t, output)


def _use_loss_of_pieces(model: nn.Module, axes: list[str]) -> bool:
    """Replace a loss that makes one row of all sequences: where batch and sequence are cut, that has no pieces.

    Returns:
        Whether the model's loss can be replaced; some models write it out in ``forward``.
    """
    kind = getattr(model, "loss_type", None) or "ForCausalLM"
    names = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if names is None or "loss_function" not in names.co_names or kind not in (*_SHIFTED, *_IN_PLACE):
        return False
    whole: Callable[..., Any] = model.loss_function  # type: ignore[assignment]  # of transformers

    def loss_function(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        if logits.ndim <= _SEQUENCE_DIM + 1 or not _is_cut(logits, axes):
            return whole(logits, labels, *args, **kwargs)
        return _loss_of_pieces(logits, labels, kind in _SHIFTED, kwargs)

    model.loss_function = loss_function  # type: ignore[assignment]  # a property of transformers
    return True


def _loss_of_pieces(logits: Any, labels: Any, is_shifted: bool, options: Mapping[str, Any]) -> Any:
    ignored = options.get("ignore_index", -100)
    target = options.get("shift_labels")
    if target is None:
        target = F.pad(labels, (0, 1), value=ignored)[..., 1:] if is_shifted else labels
    count = options.get("num_items_in_batch")
    reduction = "mean" if count is None else "sum"
    loss = F.cross_entropy(logits.float().transpose(1, 2), target, ignore_index=ignored, reduction=reduction)
    return loss if count is None else loss / count


def _is_cut(tensor: torch.Tensor, axes: list[str]) -> bool:
    mesh = tensor.device_mesh if isinstance(tensor, Tensor) else None
    return mesh is not None and any(
        mesh.has_axis(axis) and tensor.placements[mesh.axis(axis)] == Shard(_SEQUENCE_DIM)  # type: ignore[attr-defined]
        for axis in axes
    )


def _product(mesh: DeviceMesh, axes: list[str]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.size(axis)
    return size
