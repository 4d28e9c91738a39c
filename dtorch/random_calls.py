"""Random calls that are more than one op: variants with ``out=``, bounds that are tensors."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.dispatch import make, special
from dtorch.resize import resize_outputs

aten = torch.ops.aten

#: Ops with an ``out=`` variant; the first have no tensor among their other arguments.
_FACTORIES = (aten.rand, aten.randn, aten.randint, aten.randperm, aten.normal)
_OTHERS = (
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.bernoulli,
    aten.binomial,
    aten.multinomial,
    aten.poisson,
    aten._standard_gamma,
    aten._sample_dirichlet,
)


def _out_variants(*packets: Any) -> list[Any]:
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [func for func in overloads if func._schema.arguments[-1].name == "out"]


@special(*_out_variants(*_FACTORIES, *_OTHERS))
def _into(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """The tensor that ``out=`` names keeps its placement; what is drawn is copied there."""
    rest = dict(kwargs)
    out = rest.pop("out")
    if func is aten.normal.out:
        drawn = aten.normal_functional.default(*args, **rest)
    elif any(isinstance(value, torch.Tensor) for value in args):
        drawn = func._overloadpacket(*args, **rest)
    else:
        name = func._overloadname.removesuffix("out").removesuffix("_") or "default"
        factory = getattr(func._overloadpacket, name)
        layout = out._spec.layout
        drawn = make(cls, factory, args, {**rest, "dtype": out.dtype}, layout, location)
    if drawn.shape != out.shape:
        resize_outputs((out,), ((0, tuple(drawn.shape)),), location)
    return out.copy_(drawn)


@special(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def _randint_like(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], location: int) -> Any:
    """A bound that is a tensor is fetched: every device needs it as a number."""
    like, high = args
    return aten.randint_like(like, int(high), **kwargs)
