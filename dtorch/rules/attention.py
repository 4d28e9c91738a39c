"""Attention."""

from __future__ import annotations

from dtorch import shapes
from dtorch.op_plan import OpPlan
from dtorch.rules.call import Call
from dtorch.rules.dsl import rule
from dtorch.rules.empty import or_zeros
from dtorch.rules.equation import Matched
from dtorch.rules.reduce import other_op
from dtorch.shapes import Metas, TensorMeta
from dtorch.spec import Spec, contiguous_stride
from dtorch_runtime.errors import UnsupportedError


def _attention(call: Call) -> str:
    """Heads and batch may be cut, and queries where no causal mask counts them."""
    lead = "abcdefg"[: max(len(call.spec("query").shape) - 3, 0)] + (
        "h" if len(call.spec("query").shape) > 2 else ""
    )
    return f"{lead}qx,{lead}kx,{lead}ky,?{lead}qk->{lead}qy"


def _attention_shape(call: Call) -> Metas | None:
    """Queries before heads in memory, as the kernel ``dtorch::attention`` gives it."""
    query, key, value = call.spec("query"), call.spec("key"), call.spec("value")
    ndim = len(query.shape)
    if ndim < 2 or {len(key.shape), len(value.shape)} != {ndim} or key.shape[-1] != query.shape[-1]:
        return None
    if query.dtype is not key.dtype or key.dtype is not value.dtype or key.shape[:-1] != value.shape[:-1]:
        return None
    if query.shape[:-3] != key.shape[:-3] or not _heads_fit(query, key, call.get("enable_gqa")):
        return None
    mask = call.get("attn_mask")
    if mask is not None and shapes.broadcast([mask.shape, (*query.shape[:-1], key.shape[-2])]) is None:
        return None
    shape = (*query.shape[:-1], value.shape[-1])
    if ndim != 4:
        return (TensorMeta(shape, contiguous_stride(shape), query.dtype),)
    batch, heads, length, features = shape
    swapped = contiguous_stride((batch, length, heads, features))
    return (TensorMeta(shape, (swapped[0], swapped[2], swapped[1], swapped[3]), query.dtype),)


def _heads_fit(query: Spec, key: Spec, enable_gqa: bool) -> bool:
    if len(query.shape) < 3 or query.shape[-3] == key.shape[-3]:
        return True
    return enable_gqa and key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0


def _attention_whole(call: Call) -> str:
    return "kxq" if call.get("is_causal") else "kx"


def _attention_op(call: Call, matched: Matched, metas: Metas) -> OpPlan:
    if call.get("dropout_p"):
        raise UnsupportedError(
            f"{call.op} with dropout_p={call.get('dropout_p')} would draw other numbers on every device; compute "
            f"softmax(q @ k.transpose(-2, -1) * scale), F.dropout it, and multiply by v"
        )
    args = [
        call.get(name) for name in ("query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa")
    ]
    return other_op(call, matched, metas, "dtorch::attention", args)


rule(
    "scaled_dot_product_attention",
    _attention,
    linear="c",
    whole=_attention_whole,
    slices="d",
    grouped="h",
    specialize=_attention_op,
    shape=_attention_shape,
    always=True,
)


# ------------------------------------------------------------------------------------------------- whole layers

#: What a mask is: of pairs of places, of keys that are padding in each row, or of both.
_PADDING = 1


def _mask(call: Call, keys: str) -> str:
    """Letters of a mask; those of pairs have none that may be cut."""
    mask = call.get("mask")
    if mask is not None and call.get("mask_type") == _PADDING:
        return f"n{keys}"
    return "TUVW"[: len(mask.shape)] if mask is not None else ""


def _encoder_layer(call: Call) -> str:
    return f"nqx,AB,C,DE,F,G,H,I,J,KL,M,NO,P,{_mask(call, 'q')}->nqx"


def _multi_head_attention(call: Call) -> str:
    weights = "nqk" if call.get("average_attn_weights") else "nhqk"
    shown = weights if call.get("need_weights") else "1"
    return f"nqx,nkx,nkx,AB,C,DE,F,{_mask(call, 'k')}->nqx,{shown}"


# What torch runs in evaluation instead of a layer's parts: rows may be cut.
rule(
    "_transformer_encoder_layer_fwd",
    _encoder_layer,
    whole="qxABCDEFGHIJKLMNOPTUVW",
    slices="n",
    specialize=or_zeros,
)
rule(
    "_native_multi_head_attention",
    _multi_head_attention,
    whole="qkxABCDEFTUVW",
    unaffected=(1,),
    slices="h",
    specialize=or_zeros,
)
