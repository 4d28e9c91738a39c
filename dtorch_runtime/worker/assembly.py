"""``Recipe``: how one device builds its new local piece from boxes of others, planned once and followed often."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from dtorch_runtime.ir.exchange import Part, Source
from dtorch_runtime.ir.layout import Box, box_shape, relative
from dtorch_runtime.worker.blobs import Blob, Poison

#: What is cut out of a tensor; None is all of it.
Index: TypeAlias = tuple[slice, ...] | None
#: Where a source is found: the parcel's name, and the box that the parcel holds in the source's coordinates.
Locate: TypeAlias = Callable[[Source], tuple[tuple[int, int], Box]]

#: Sums of these are accumulated in float32 when there are more than two terms.
_SHORT_FLOATS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Term:
    """A box of a parcel."""

    parcel: tuple[int, int]
    index: Index

    def of(self, parcels: Mapping[tuple[int, int], Blob], torch_device: torch.device) -> torch.Tensor:
        """The box, on the device that builds of it."""
        tensor = parcels[self.parcel]
        assert isinstance(tensor, torch.Tensor)
        if self.index is not None:
            tensor = tensor[self.index]
        return tensor if tensor.device == torch_device else tensor.to(torch_device)


@dataclass(frozen=True, eq=False)
class Recipe:
    """One device's part of one step.

    Attributes:
        shape: the new local piece.
        pieces: boxes of it that tile it, and the terms that are reduced into each.
        cat_dim: the pieces are whole copies in order along this dim.
        fill: the value of what no piece covers, in the dtype.
        needs: names of the parcels that it reads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    torch_device: torch.device
    reduce: str | None
    pieces: tuple[tuple[Index, tuple[Term, ...]], ...]
    cat_dim: int | None
    fill: float | None
    needs: tuple[tuple[int, int], ...]

    def build(self, parcels: Mapping[tuple[int, int], Blob]) -> Blob:
        """A new contiguous tensor that shares memory with nothing; or the poison of the first parcel that is one."""
        for name in self.needs:
            blob = parcels[name]
            if type(blob) is Poison:
                return blob
        result = self._build(parcels)
        if result.is_cuda:
            # Others may write to the parcels once this has returned.
            torch.cuda.current_stream(result.device).synchronize()
        return result

    def _build(self, parcels: Mapping[tuple[int, int], Blob]) -> torch.Tensor:
        here = self.torch_device
        if self.cat_dim is not None:
            return torch.cat(
                [terms[0].of(parcels, here) for _, terms in self.pieces], self.cat_dim
            ).contiguous()
        if len(self.pieces) == 1 and self.pieces[0][0] is None:
            return self._reduced([term.of(parcels, here) for term in self.pieces[0][1]])
        result = torch.empty(self.shape, dtype=self.dtype, device=self.torch_device)
        if self.fill is not None:
            result.fill_(self.fill)
        for index, terms in self.pieces:
            target = result if index is None else result[index]
            tensors = [term.of(parcels, here) for term in terms]
            target.copy_(tensors[0] if len(tensors) == 1 else self._reduced(tensors))
        return result

    def same_as(self, other: Recipe) -> bool:
        """Whether both build equal tensors."""
        return (self.shape, self.pieces, self.fill) == (other.shape, other.pieces, other.fill)

    def _reduced(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(terms) == 1:
            return terms[0].clone(memory_format=torch.contiguous_format)
        return reduce_terms(terms, self.reduce or "sum").contiguous()


def reduce_terms(terms: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of two or more terms in the order given; a new tensor. Integer averages round towards zero."""
    dtype = terms[0].dtype
    if dtype in _SHORT_FLOATS and len(terms) > 2:
        return reduce_terms([term.float() for term in terms], op).to(dtype)
    combine, combine_into = _COMBINE[op]
    result = combine(terms[0], terms[1])
    for term in terms[2:]:
        combine_into(result, term)
    if op == "avg":
        if dtype.is_floating_point or dtype.is_complex:
            result.div_(len(terms))
        else:
            result.div_(len(terms), rounding_mode="trunc")
    return result


_Combine: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_COMBINE: dict[str, tuple[_Combine, _Combine]] = {
    "sum": (torch.add, torch.Tensor.add_),
    "avg": (torch.add, torch.Tensor.add_),
    "prod": (torch.mul, torch.Tensor.mul_),
    "max": (torch.maximum, lambda result, term: torch.maximum(result, term, out=result)),
    "min": (torch.minimum, lambda result, term: torch.minimum(result, term, out=result)),
}


def make_recipe(
    part: Part, reduce: str | None, locate: Locate, dtype: torch.dtype, torch_device: torch.device
) -> Recipe:
    """The recipe of one part of a plan."""
    pieces = []
    needs: dict[tuple[int, int], None] = {}
    for piece in part.pieces:
        terms = []
        for source in piece.sources:
            name, parcel_box = locate(source)
            terms.append(Term(name, index_of(relative(source.box, parcel_box), box_shape(parcel_box))))
            needs[name] = None
        pieces.append((index_of(piece.box, part.shape), tuple(terms)))
    return Recipe(
        shape=part.shape,
        dtype=dtype,
        torch_device=torch_device,
        reduce=reduce,
        pieces=tuple(pieces),
        cat_dim=_cat_dim(part),
        fill=_in_dtype(part.fill, dtype),
        needs=tuple(needs),
    )


def _in_dtype(fill: float | None, dtype: torch.dtype) -> float | None:
    """A plan's fill; where it is infinite, the largest or the smallest value of the dtype."""
    if fill is None or dtype.is_floating_point or not math.isinf(fill):
        return fill
    if dtype is torch.bool:
        return fill > 0
    limits = torch.iinfo(dtype)
    return limits.max if fill > 0 else limits.min


def index_of(box: Box, shape: Sequence[int]) -> Index:
    """What cuts ``box`` out of a tensor of ``shape``."""
    if all(start == 0 and stop == size for (start, stop), size in zip(box, shape, strict=True)):
        return None
    return tuple(slice(start, stop) for start, stop in box)


def _cat_dim(part: Part) -> int | None:
    """The dim along which the pieces lie one behind the other and fill the part, if they are copies that do."""
    pieces = part.pieces
    if len(pieces) < 2 or part.fill is not None or any(len(piece.sources) != 1 for piece in pieces):
        return None
    for dim, size in enumerate(part.shape):
        edge = 0
        for piece in pieces:
            others_whole = all(
                span == (0, part.shape[other]) for other, span in enumerate(piece.box) if other != dim
            )
            if not others_whole or piece.box[dim][0] != edge:
                break
            edge = piece.box[dim][1]
        else:
            if edge == size:
                return dim
    return None
