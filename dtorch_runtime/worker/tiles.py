"""Tiles: ops on lists of tensors, all of them for a few tensors, or for a piece of one, before the next few.

What they read and write then stays in the cache from the first op to the last. Results are the same to the last bit:
pieces begin where the vectors of a kernel would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch

from dtorch_runtime.wire.records import TilesArg
from dtorch_runtime.worker.arguments import BoundRegion
from dtorch_runtime.worker.kernels import kernel
from dtorch_runtime.worker.regions import step_function

#: Of the tensors that come from outside; temporaries come on top. Half of the second-level cache of a server's core.
TILE_BYTES: Final = 1024 * 1024
#: A piece of a tensor begins at a multiple of so many elements.
_PIECE_ELEMENTS: Final = 4096
_REDUCING: Final = ("aten::_foreach_norm", "aten::_foreach_max.", "aten::_foreach_powsum")

#: For each list, the tensors of some positions, or the same piece of one of each.
_Lists: TypeAlias = list[list[torch.Tensor]]


class Tiles:
    """The ops of a template on one device."""

    def __init__(self, bound: BoundRegion) -> None:
        assert isinstance(bound.arg, TilesArg)
        self._arg = arg = bound.arg
        self._steps = [(step_function(bound, step), step.inputs) for step in arg.steps]
        #: Numbers of lists that are written to.
        self._written = {step.inputs[0] for step in arg.steps if step.op.partition(".")[0].endswith("_")}
        #: Whether a piece of the results follows from the same piece of the arguments.
        self._takes_pieces = not arg.outputs and not any(step.op.startswith(_REDUCING) for step in arg.steps)

    def __call__(self, *given: Any) -> list[torch.Tensor]:
        """What the ops make that is wanted, list by list."""
        size, num_lists = self._arg.num_positions, self._arg.num_lists
        lists = [list(given[index * size : (index + 1) * size]) for index in range(num_lists)]
        singles = given[num_lists * size :]
        made: list[list[torch.Tensor]] = [[] for _ in self._arg.outputs]
        for part in self._parts(lists, singles):
            values: list[Any] = [*part, *singles]
            for run, inputs in self._steps:
                values.append(run(*[values[number] for number in inputs]))
            for tensors, number in zip(made, self._arg.outputs, strict=True):
                tensors.extend(values[number])
        return [tensor for tensors in made for tensor in tensors]

    def _parts(self, lists: _Lists, singles: Sequence[Any]) -> Iterator[_Lists]:
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in zip(*lists, strict=True)]
        tile_bytes = TILE_BYTES * torch.get_num_threads()  # each has its share of a tile, the same in all ops
        if sum(sizes) <= tile_bytes or self._depend(lists, singles):
            yield lists
            return
        start, num_bytes = 0, 0
        for position, size in enumerate(sizes):
            if position > start and num_bytes + size > tile_bytes:
                yield from self._pieces(
                    [tensors[start:position] for tensors in lists], num_bytes / tile_bytes
                )
                start, num_bytes = position, 0
            num_bytes += size
        yield from self._pieces([tensors[start:] for tensors in lists], num_bytes / tile_bytes)

    def _pieces(self, part: _Lists, num_tiles: float) -> Iterator[_Lists]:
        """A part of so many tiles, or pieces of it if it is one large tensor of each list."""
        tensors = [tensor for [tensor] in part] if len(part[0]) == 1 else []
        shapes = {tensor.shape for tensor in tensors if tensor.ndim}
        if (
            num_tiles < 2
            or len(shapes) != 1
            or not self._takes_pieces
            or not all(tensor.is_contiguous() for tensor in tensors)
        ):
            yield part
            return
        num_elements = shapes.pop().numel()
        step = max(1, round(num_elements / num_tiles / _PIECE_ELEMENTS)) * _PIECE_ELEMENTS
        flat = [tensor.view(-1) if tensor.ndim else tensor for tensor in tensors]
        for start in range(0, num_elements, step):
            yield [[tensor[start : start + step] if tensor.ndim else tensor] for tensor in flat]

    def _depend(self, lists: _Lists, singles: Sequence[Any]) -> bool:
        """Whether what is written at one position may be read or written at another one."""
        spans = [
            (*_extent(tensor), position, number in self._written)
            for number, tensors in enumerate(lists)
            for position, tensor in enumerate(tensors)
        ]
        spans += [(*_extent(tensor), -1, False) for tensor in singles if isinstance(tensor, torch.Tensor)]
        spans.sort()
        reach, positions, is_written = 0, {-2}, False
        for start, stop, position, writes in spans:
            if start >= reach:
                positions, is_written = set(), False
            positions.add(position)
            is_written |= writes
            if is_written and len(positions) > 1:
                return True
            reach = max(reach, stop)
        return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses: where its memory begins, and where it ends; that of its whole storage where it is strided."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@kernel("tiles")
def tiles(bound: BoundRegion, *given: Any) -> list[torch.Tensor]:
    """Run ops on lists; see ``TilesArg``."""
    run = bound.run
    if run is None:
        run = bound.run = Tiles(bound)
    made: list[torch.Tensor] = run(*given)
    return made
