"""A plan for a model that carries none, derived from the names and shapes of its linear layers. Pure decisions.

Three things are recognised, as in Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053):

* attention: query, key and value in one module, by their names, and the next layer that takes what value gives. The
  three are cut by heads, the fourth takes heads. Where one layer makes several of the three, its output is gathered,
  because the model slices it, and the weights alone are cut;
* a feed-forward block: one layer that widens, or two side by side (a gate), and the next layer, which narrows back;
* the head that makes logits, where the model says which layer that is.

Whatever else has weights stays whole. A cut that the code between two layers cannot use is refused when it runs, with a
``PlacementError``; it never gives other numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from dtorch.parallel.tp_plan import ModuleFacts, features_of

_QUERY: Final = frozenset({"q", "query", "q_proj", "query_proj", "q_lin", "to_q", "wq"})
_KEY: Final = frozenset({"k", "key", "k_proj", "key_proj", "k_lin", "to_k", "wk"})
_VALUE: Final = frozenset({"v", "value", "v_proj", "value_proj", "v_lin", "to_v", "wv"})
#: One layer makes several of the three.
_FUSED: Final = frozenset(
    {"c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj", "kv_proj", "to_kv"}
)
#: Beside a fused one in cross-attention.
_BESIDE_FUSED: Final = _QUERY | {"q_attn"}


@dataclass(frozen=True, slots=True)
class Derived:
    """A plan of module names and styles, and the linear layers that it says nothing of."""

    plan: dict[str, str]
    whole: tuple[str, ...]


def derive_plan(facts: Sequence[ModuleFacts], heads: Collection[str] = ()) -> Derived:
    """The plan of a model by its modules with weights, in the order of the model.

    Args:
        heads: names of layers that make logits.
    """
    layers = [f for f in facts if f.kind in ("linear", "conv1d")]
    plan: dict[str, str] = {}
    for parent in dict.fromkeys(_parent(f.name) for f in layers):
        plan |= _attention(parent, layers)
    plan |= _feed_forward([f for f in facts if f.name not in plan and f.name not in heads])
    plan |= {f.name: "colwise_gather_output" for f in layers if f.name in heads}
    return Derived(plan, tuple(f.name for f in layers if f.name not in plan))


def _attention(parent: str, layers: Sequence[ModuleFacts]) -> dict[str, str]:
    """Styles of the attention whose query, key and value are in the module ``parent``; empty if they are not there."""
    own = {_last(f.name): f for f in layers if _parent(f.name) == parent}
    fused = [f for name, f in own.items() if name in _FUSED]
    if fused:
        first = [f for name, f in own.items() if name in _FUSED | _BESIDE_FUSED]
        style, after = "colwise_gather_output", "rowwise_split_input"
        # As wide as a third of what is sliced, or, where several queries share a key, as the layer's input.
        widths = {sum(features_of(f)[1] for f in first) // 3, features_of(first[0])[0]}
    else:
        found = [next((own[n] for n in own if n in names), None) for names in (_QUERY, _KEY, _VALUE)]
        first = [f for f in found if f is not None]
        if len(first) < len(found):
            return {}
        style, after = "colwise", "rowwise"
        # As wide as the values, or, where several queries share a value, as the queries.
        widths = {features_of(first[0])[1], features_of(first[-1])[1]}
    output = _output(first, parent, layers, widths)
    if output is None:
        return {}
    return {**{f.name: style for f in first}, output.name: after}


def _output(
    first: Sequence[ModuleFacts], parent: str, layers: Sequence[ModuleFacts], widths: Collection[int]
) -> ModuleFacts | None:
    """The next layer in the same module, or else in an attention module around it, that takes so many features."""
    behind = layers[max(layers.index(f) for f in first) + 1 :]
    around = _parent(parent)
    scopes = [parent, around] if "att" in _last(around).lower() else [parent]
    for scope in scopes:
        for layer in behind:
            if _is_within(layer.name, scope) and features_of(layer)[0] in widths:
                return layer
    return None


def _feed_forward(facts: Sequence[ModuleFacts]) -> dict[str, str]:
    """Styles of every widening layer, or pair of them, that a narrowing one follows with nothing between."""
    plan: dict[str, str] = {}
    index = 0
    while index < len(facts):
        block = _block_at(facts, index)
        if block is None:
            index += 1
            continue
        *up, down = block
        plan |= {f.name: "colwise" for f in up} | {down.name: "rowwise"}
        index += len(block)
    return plan


def _block_at(facts: Sequence[ModuleFacts], index: int) -> Sequence[ModuleFacts] | None:
    for size in (3, 2):
        block = facts[index : index + size]
        if len(block) < size or any(f.kind not in ("linear", "conv1d") for f in block):
            continue
        *up, down = block
        narrow, wide = features_of(up[0])
        is_widening = wide > narrow and all(features_of(f) == (narrow, wide) for f in up)
        is_one_module = len({_parent(f.name) for f in up}) == 1
        around = _parent(_parent(up[0].name))
        is_near = _parent(down.name) == _parent(up[0].name) or _is_within(down.name, around)
        if is_widening and is_one_module and is_near and features_of(down) == (wide, narrow):
            return block
    return None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_within(name: str, scope: str) -> bool:
    return not scope or name.startswith(f"{scope}.")
