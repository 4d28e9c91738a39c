"""Pictures of layouts: the exact text, and SVG that says the same."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from dtorch.insight.blocks import Block, Picture
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard

GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
LINE = DeviceMesh("cpu", [4, 2, 7])
CUBE = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=("dp", "tp", "ep"))
R = Replicate()


def picture(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Placement) -> Picture:
    return Picture(shape, Layout(mesh, placements), "float32")


DRAWINGS = {
    "both dims are cut": (
        picture((8, 6), GRID, Shard(0), Shard(1)),
        """
float32[8, 6] on dp (2): S(0), tp (2): S(1)
               0:3                      3:6
    ┌────────────────────────┬────────────────────────┐
    │                        │                        │
0:4 │           0            │           1            │
    │                        │                        │
    ├────────────────────────┼────────────────────────┤
    │                        │                        │
4:8 │           2            │           3            │
    │                        │                        │
    └────────────────────────┴────────────────────────┘
""",
    ),
    "a vector, uneven, on axes without names": (
        picture((10,), LINE, Shard(0)),
        """
float32[10] on axis 0 (3): S(0)
         0:4              4:7            7:10
┌───────────────────┬──────────────┬──────────────┐
│         4         │      2       │      7       │
└───────────────────┴──────────────┴──────────────┘
""",
    ),
    "terms of a sum, each twice": (
        picture((), GRID, Partial("sum"), R),
        """
float32[] on dp (2): P, tp (2): R
┌────────────────────────────────────────────────┐
│                   0,1 + 2,3                    │
└────────────────────────────────────────────────┘
""",
    ),
    "candidates for a maximum of rows that are cut": (
        picture((3, 4), GRID, Partial("max"), Shard(0)),
        """
float32[3, 4] on dp (2): P(max), tp (2): S(0)
                           0:4
    ┌────────────────────────────────────────────────┐
    │                                                │
0:2 │                    0 max 2                     │
    │                                                │
    │                                                │
    ├────────────────────────────────────────────────┤
2:3 │                    1 max 3                     │
    │                                                │
    └────────────────────────────────────────────────┘
""",
    ),
    "fewer rows than devices": (
        picture((1, 5), LINE, Shard(0)),
        """
float32[1, 5] on axis 0 (3): S(0)
                           0:5
    ┌────────────────────────────────────────────────┐
0:1 │                       4                        │
    └────────────────────────────────────────────────┘
nothing on 2,7
""",
    ),
    "three dims, all cut": (
        picture((4, 8, 6), CUBE, Shard(0), Shard(1), Shard(2)),
        """
float32[4, 8, 6] on dp (2): S(0), tp (2): S(1), ep (2): S(2)
               0:3                      3:6
    ┌────────────────────────┬────────────────────────┐
    │    0:2 of dim 0: 0     │    0:2 of dim 0: 1     │
0:4 │    2:4 of dim 0: 4     │    2:4 of dim 0: 5     │
    │                        │                        │
    ├────────────────────────┼────────────────────────┤
    │    0:2 of dim 0: 2     │    0:2 of dim 0: 3     │
4:8 │    2:4 of dim 0: 6     │    2:4 of dim 0: 7     │
    │                        │                        │
    └────────────────────────┴────────────────────────┘
rows are dim 1, columns dim 2
""",
    ),
    "whole on all": (
        picture((6, 6), CUBE, R, R, R),
        """
float32[6, 6] on dp (2): R, tp (2): R, ep (2): R
                           0:6
    ┌────────────────────────────────────────────────┐
0:6 │                      0-7                       │
    └────────────────────────────────────────────────┘
""",
    ),
    "nothing": (picture((0, 5), LINE, Shard(0)), "\nfloat32[0, 5] on axis 0 (3): S(0)\nempty\n"),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_text(name: str) -> None:
    drawn, expected = DRAWINGS[name]
    assert str(drawn) == repr(drawn) == expected.strip("\n")


@pytest.mark.parametrize("name", DRAWINGS)
def test_svg_says_what_the_text_says(name: str) -> None:
    drawn, _ = DRAWINGS[name]
    root = ElementTree.fromstring(drawn._repr_svg_())
    space = "{http://www.w3.org/2000/svg}"
    said = [element.text for element in root.iter(f"{space}text")]
    boxes = [
        {key: int(value) for key, value in rect.items() if value.isdigit()}
        for rect in root.iter(f"{space}rect")
    ]
    cells = [cell for row in drawn.cells() for cell in row] if drawn.blocks else []
    assert said[0] == drawn.title()
    assert {line for cell in cells for line in drawn.lines_of(cell)} <= set(said)
    assert len(boxes) == len(cells)
    for box in boxes:
        assert box["x"] + box["width"] <= int(root.get("width", 0))
        assert box["y"] + box["height"] <= int(root.get("height", 0))


def test_blocks() -> None:
    assert picture((4, 4), GRID, Shard(0), R).blocks == [
        Block(((0, 2), (0, 4)), (0, 1)),
        Block(((2, 4), (0, 4)), (2, 3)),
    ]


def test_dims_that_are_cut_are_drawn() -> None:
    assert picture((2, 8, 6), GRID, Shard(0), Shard(2)).drawn_dims == (0, 2)
    assert picture((2, 3, 4, 5), GRID, R, R).drawn_dims == (2, 3)
