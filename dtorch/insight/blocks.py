"""Which device holds which block of a tensor: a pure function of shape and layout, and what ``visualize`` draws.

A tensor of more than two dims is drawn by the two dims that are cut most, or its last two; others are named where they
are cut. Blocks are drawn in proportion, those of few rows larger than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise

from dtorch_runtime.ir.layout import Box, Layout, all_boxes
from dtorch_runtime.ir.placement import Partial

#: Characters of a drawing: a block is as wide as its text, and a cell of the widest tensor about so wide.
_TEXT_WIDTH = 48
_TEXT_HEIGHT = 6
#: Pixels of an SVG.
_CELL_PX, _LINE_PX, _PAD_PX, _WIDTH_PX, _HEIGHT_PX = 7.2, 18, 12, 360, 220
#: Fills of an SVG by the first device of a block: light, told apart by most eyes.
_COLOURS = ("#cfe3f7", "#f9dcc4", "#d5efd1", "#f3d3e3", "#e3dbf3", "#fbf2c4", "#d0eeee", "#e6e0d6")


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the global tensor and the devices that hold it, or a term of it."""

    box: Box
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """What ``visualize`` gives: ``print()`` draws it as text, a notebook as SVG.

    Attributes:
        shape: global.
        layout: the mesh and the placements.
        dtype: its name.
    """

    shape: tuple[int, ...]
    layout: Layout
    dtype: str = ""

    @cached_property
    def blocks(self) -> list[Block]:
        """The different boxes that are not empty, in the order of the devices."""
        found: dict[Box, list[int]] = {}
        boxes = all_boxes(self.shape, self.layout)
        for box, device in zip(boxes, self.layout.mesh.devices, strict=True):
            if all(start < stop for start, stop in box):
                found.setdefault(box, []).append(device)
        return [Block(box, tuple(devices)) for box, devices in found.items()]

    @cached_property
    def without(self) -> tuple[int, ...]:
        """Devices whose piece is empty."""
        holders = {device for block in self.blocks for device in block.devices}
        return tuple(device for device in self.layout.mesh.devices if device not in holders)

    @cached_property
    def drawn_dims(self) -> tuple[int, ...]:
        """The dims that are rows and columns of the drawing."""
        dims = range(len(self.shape))
        if len(self.shape) <= 2:
            return tuple(dims)
        num_pieces = {dim: len({block.box[dim] for block in self.blocks}) for dim in dims}
        return tuple(sorted(sorted(dims, key=lambda dim: (num_pieces[dim], dim))[-2:]))

    def edges(self, dim: int) -> list[int]:
        """Where blocks begin and end along a dim."""
        found = {0, self.shape[dim]} | {edge for block in self.blocks for edge in block.box[dim]}
        return sorted(found)

    def title(self) -> str:
        """Shape, placements and mesh in one line."""
        mesh = self.layout.mesh
        names = mesh.mesh_dim_names or tuple(f"axis {number}" for number in range(mesh.ndim))
        axes = ", ".join(
            f"{name} ({size}): {placement}"
            for name, size, placement in zip(names, mesh.shape, self.layout.placements, strict=True)
        )
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] on {axes}"

    def label(self, devices: Sequence[int]) -> str:
        """What stands in a block: its devices, and ``+`` between those that hold terms of a sum."""
        ops = sorted({p.op for p in self.layout.placements if isinstance(p, Partial)})
        if not ops:
            return _numbers(devices)
        terms: dict[tuple[int, ...], list[int]] = {}
        for device in devices:
            terms.setdefault(self._term(device), []).append(device)
        sign = " + " if ops == ["sum"] else f" {'/'.join(ops)} "
        return sign.join(_numbers(held) for held in terms.values())

    def _term(self, device: int) -> tuple[int, ...]:
        """Which term of a sum a device holds: its places on the axes that are partial."""
        place = self.layout.mesh.coordinate(device)
        assert place is not None, "a device of the mesh"
        pairs = zip(place, self.layout.placements, strict=True)
        return tuple(index for index, placement in pairs if isinstance(placement, Partial))

    def cells(self) -> list[list[tuple[Block, ...]]]:
        """The blocks of each cell of the drawing; several where dims that are not drawn are cut too."""
        rows, columns = self._axes()
        return [
            [
                tuple(block for block in self.blocks if self._covers(block, row, column))
                for column in pairwise(columns)
            ]
            for row in pairwise(rows)
        ]

    def _axes(self) -> tuple[list[int], list[int]]:
        """Edges of rows and of columns; a vector is one row, a number one cell."""
        dims = self.drawn_dims
        columns = self.edges(dims[-1]) if dims else [0, 1]
        rows = self.edges(dims[0]) if len(dims) == 2 else [0, 1]
        return rows, columns

    def _covers(self, block: Block, row: tuple[int, int], column: tuple[int, int]) -> bool:
        dims = self.drawn_dims
        parts = {dims[-1]: column} if dims else {}
        if len(dims) == 2:
            parts[dims[0]] = row
        return all(
            block.box[dim][0] <= low and high <= block.box[dim][1] for dim, (low, high) in parts.items()
        )

    def lines_of(self, blocks: Sequence[Block]) -> list[str]:
        """The text of a cell."""
        hidden = [dim for dim in range(len(self.shape)) if dim not in self.drawn_dims]
        cut = [dim for dim in hidden if len({block.box[dim] for block in self.blocks}) > 1]
        if not cut:
            return [self.label(blocks[0].devices)]
        return [
            ", ".join(f"{_run(block.box[dim])} of dim {dim}" for dim in cut)
            + f": {self.label(block.devices)}"
            for block in blocks
        ]

    # ---- as text ----

    def __str__(self) -> str:
        lines = [self.title()]
        if not self.blocks:
            return f"{lines[0]}\nempty"
        cells = self.cells()
        texts = [[self.lines_of(blocks) for blocks in row] for row in cells]
        rows, columns = self._axes()
        least = [
            2 + max(len(line) for row in texts for line in row[number]) for number in range(len(columns) - 1)
        ]
        widths = _sizes(columns, least, _TEXT_WIDTH)
        heights = _sizes(rows, [max(map(len, row)) for row in texts], _TEXT_HEIGHT if len(rows) > 2 else 1)
        dims = self.drawn_dims
        margin = max((len(_run(run)) for run in pairwise(rows)), default=0) + 1 if len(dims) == 2 else 0
        if dims:
            lines.append(
                " " * (margin + 1) + " ".join(map(_centred, map(_run, pairwise(columns)), widths)).rstrip()
            )
        lines.append(" " * margin + "┌" + "┬".join("─" * width for width in widths) + "┐")
        for number, (row, height) in enumerate(zip(texts, heights, strict=True)):
            if number:
                lines.append(" " * margin + "├" + "┼".join("─" * width for width in widths) + "┤")
            name = _run((rows[number], rows[number + 1])) if len(dims) == 2 else ""
            for line in range(height):
                shown = [_line(text, line, height, width) for text, width in zip(row, widths, strict=True)]
                side = name if line == (height - 1) // 2 else ""
                lines.append(side.ljust(margin) + "│" + "│".join(shown) + "│")
        lines.append(" " * margin + "└" + "┴".join("─" * width for width in widths) + "┘")
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """What the drawing does not show by itself."""
        found = []
        if len(self.shape) > 2:
            found.append(f"rows are dim {self.drawn_dims[0]}, columns dim {self.drawn_dims[1]}")
        if self.without and self.blocks:
            found.append(f"nothing on {_numbers(self.without)}")
        return found

    __repr__ = __str__

    # ---- as SVG ----

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        cells = self.cells() if self.blocks else []
        texts = [[self.lines_of(blocks) for blocks in row] for row in cells]
        rows, columns = self._axes() if self.blocks else ([0], [0])
        least = [
            round(max(len(line) for row in texts for line in row[number]) * _CELL_PX) + 2 * _PAD_PX
            for number in range(len(columns) - 1)
        ]
        widths = _sizes(columns, least, _WIDTH_PX)
        lowest = [max(map(len, row)) * _LINE_PX + _PAD_PX for row in texts]
        heights = _sizes(rows, lowest, _HEIGHT_PX if len(rows) > 2 else 0)
        has_rows = len(self.drawn_dims) == 2
        left = (
            round(max((len(_run(run)) for run in pairwise(rows)), default=0) * _CELL_PX) + _PAD_PX
            if has_rows
            else 0
        )
        top = 3 * _LINE_PX
        parts = [_text(0, _LINE_PX, self.title(), "start")]
        if self.drawn_dims:
            middles = _middles(widths)
            for run, middle in zip(pairwise(columns), middles, strict=True):
                parts.append(_text(left + middle, top - 6, _run(run)))
        for row, held, y, height, run in zip(
            texts, cells, _starts(heights), heights, pairwise(rows), strict=True
        ):
            if has_rows:
                parts.append(_text(0, top + y + height // 2 + 5, _run(run), "start"))
            for text, blocks, x, width in zip(row, held, _starts(widths), widths, strict=True):
                first = blocks[0].devices[0]
                fill = _COLOURS[self.layout.mesh.devices.index(first) % len(_COLOURS)]
                parts.append(
                    f'<rect x="{left + x}" y="{top + y}" width="{width}" height="{height}" '
                    f'fill="{fill}" stroke="#444"/>'
                )
                base = top + y + (height - (len(text) - 1) * _LINE_PX) // 2 + 5
                for index, line in enumerate(text):
                    parts.append(_text(left + x + width // 2, base + index * _LINE_PX, line))
        bottom = top + sum(heights)
        notes = self.notes() if self.blocks else ["empty"]
        for number, note in enumerate(notes):
            parts.append(_text(0, bottom + (number + 1) * _LINE_PX, note, "start"))
        width = max(left + sum(widths), *(round(len(t) * _CELL_PX) for t in (self.title(), *notes))) + 2
        height = bottom + len(notes) * _LINE_PX + _PAD_PX
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="12">'
            f"{''.join(parts)}</svg>"
        )


def _run(run: tuple[int, int]) -> str:
    """Rows from the first up to, and without, the last, as in a slice."""
    return f"{run[0]}:{run[1]}"


def _numbers(devices: Sequence[int]) -> str:
    """``0,1,2`` or, of four and more in a row, ``0-3``."""
    ordered = sorted(devices)
    if len(ordered) > 3 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _sizes(edges: Sequence[int], least: Sequence[int], whole: int) -> list[int]:
    """Sizes of runs in proportion, none below what its text takes."""
    total = edges[-1] - edges[0]
    shares = [round(whole * (high - low) / total) if total else 0 for low, high in pairwise(edges)]
    return [max(share, needed) for share, needed in zip(shares, least, strict=True)]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _middles(sizes: Sequence[int]) -> list[int]:
    return [start + size // 2 for start, size in zip(_starts(sizes), sizes, strict=True)]


def _centred(text: str, width: int) -> str:
    return text.center(width)


def _line(text: Sequence[str], line: int, height: int, width: int) -> str:
    first = (height - len(text)) // 2
    return text[line - first].center(width) if 0 <= line - first < len(text) else " " * width


def _text(x: int, y: int, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
