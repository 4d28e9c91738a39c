"""``describe``: what of a model lives where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from torch import nn

from dtorch.tensors import Tensor
from dtorch_runtime.ir.layout import Layout, box_shape, local_box, num_elements
from dtorch_runtime.ir.mesh import DeviceMesh

#: The number of a layer in the name of a weight.
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One weight: its global shape, and the bytes of it on each device. Tied weights have one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes_by_device: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Report:
    """A row for each weight, and the node of each device. ``str()`` folds layers that are alike into one row.

    ``notes`` say where the plan comes from, and which linear layers it left whole because it did not know them.
    """

    rows: tuple[LayerRow, ...]
    node_by_device: Mapping[int, str]
    notes: tuple[str, ...] = ()

    @property
    def bytes_by_device(self) -> dict[int, int]:
        """Bytes of all weights on each device."""
        total: dict[int, int] = {}
        for row in self.rows:
            for device, num_bytes in row.bytes_by_device.items():
                total[device] = total.get(device, 0) + num_bytes
        return dict(sorted(total.items()))

    def table(self, fold: bool = True) -> str:
        """The rows as text; ``fold=False`` gives every weight a line of its own."""
        devices = list(self.bytes_by_device)
        heads = [f"device {d} ({self.node_by_device.get(d, 'unknown node')})" for d in devices]
        lines = [["weight", "shape", "placements", *heads]]
        for name, rows in self._folded() if fold else [(row.name, [row]) for row in self.rows]:
            first = rows[0]
            bytes_on = [sum(row.bytes_by_device.get(device, 0) for row in rows) for device in devices]
            lines.append([name, _shape(first), str(first.layout), *map(size_text, bytes_on)])
        lines.append(["all weights", "", "", *(size_text(self.bytes_by_device[d]) for d in devices)])
        return aligned(lines)

    def _folded(self) -> list[tuple[str, list[LayerRow]]]:
        groups: dict[tuple[object, ...], list[LayerRow]] = {}
        for row in self.rows:
            key = (_NUMBER.sub("*", row.name), row.shape, row.dtype, row.layout)
            groups.setdefault(key, []).append(row)
        return [(folded_name([row.name for row in rows]), rows) for rows in groups.values()]

    def __str__(self) -> str:
        return "\n".join([self.table(), *self.notes])


def describe(model: nn.Module) -> Report:
    """Which device holds how much of each weight of ``model``, and on which node.

    Weights that are not distributed are left out.
    """
    rows = []
    session = None
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Tensor):
            session = parameter.graph.session
            rows.append(_row(name, parameter))
    nodes = () if session is None else session.nodes()
    names = {device: node.name for node in nodes for device in node.devices}
    return Report(tuple(rows), names, getattr(model, "dtorch_notes", ()))


def _row(name: str, parameter: Tensor) -> LayerRow:
    mesh: DeviceMesh = parameter.device_mesh
    layout = Layout(mesh, tuple(parameter.placements))
    shape = tuple(parameter.shape)
    sizes = {}
    for device in mesh.devices:
        coordinate = mesh.coordinate(device)
        assert coordinate is not None, "a mesh knows its own devices"
        num_local = num_elements(box_shape(local_box(shape, layout, coordinate)))
        sizes[device] = num_local * parameter.dtype.itemsize
    return LayerRow(
        name=name,
        shape=shape,
        dtype=str(parameter.dtype).removeprefix("torch."),
        layout=layout,
        bytes_by_device=sizes,
    )


def folded_name(names: Sequence[str]) -> str:
    """``layers.0.up``, ``layers.1.up``, ``layers.2.up`` as ``layers.[0-2].up``."""
    if len(names) == 1:
        return names[0]
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in names]
    columns = [_ranges(sorted(set(column))) for column in zip(*numbers, strict=True)]
    parts = _NUMBER.split(names[0])
    return "".join(part + column for part, column in zip(parts, [*columns, ""], strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    ]
    return f"[{','.join(str(r[0]) if len(r) == 1 else f'{r[0]}-{r[-1]}' for r in runs)}]"


def _shape(row: LayerRow) -> str:
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def size_text(num_bytes: int) -> str:
    """``1.2 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    exponent = min((len(str(num_bytes)) - 1) // 3, 3)
    return f"{num_bytes / 1000**exponent:.1f} {('B', 'kB', 'MB', 'GB')[exponent]}"


def aligned(lines: Sequence[Sequence[str]], num_left: int = 3) -> str:
    """Lines of cells as columns: the first ones of text, the others of numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:num_left], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(line[num_left:], widths[num_left:], strict=True)]
        text.append("  ".join([*left, *right]).rstrip())
    return "\n".join(text)
