"""Which ops on lists become one. Inputs are values 1 and so on, the outputs follow."""

from __future__ import annotations

from typing import Any

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import ListArg, RegionStep, ScalarSlot, Slot, TilesArg
from tests.support import bodies
from tests.support.bodies import BodyWriter

_EACH = "aten::_foreach_"


def body(inputs: str = "R R R R", outputs: int = 1) -> BodyWriter:
    return BodyWriter(inputs.split(), outputs)


def tile(b: BodyWriter) -> BodyWriter:
    b.op("doubled", 1, 2)
    b.op("added", 1, 2, 3, 4)
    return b


def test_neighbours_on_lists_become_one():
    b = body(outputs=2)
    b.op("doubled", 1, 2)
    roots = b.op("both", 1, 2, out=(b.inner(), b.inner()))
    b.op("scaled", roots, roots + 1, 3)
    b.op("sums", 4, 4, roots, roots + 1, out=(5, 6))
    b.op("shifted", 1, 2)
    assert b.shown("tile") == ["5 6 = tiles 1 2 4 3"]
    found = b.rewritten("tile")
    [made] = found.made
    [arg, *rest] = made.args
    assert rest == [Slot(0), Slot(1), Slot(2), Slot(2), Slot(3), ScalarSlot(0)]
    assert arg == TilesArg(
        2,
        2,
        [
            RegionStep(f"{_EACH}mul_.Scalar", [Slot(0), 2.0], {}, [0]),
            RegionStep(f"{_EACH}abs", [Slot(0)], {}, [0]),
            RegionStep(f"{_EACH}mul_.Tensor", [Slot(0), Slot(1)], {}, [5, 2]),
            RegionStep(f"{_EACH}add.List", [Slot(0), Slot(1)], {}, [1, 5]),
            RegionStep(f"{_EACH}add_.Scalar", [Slot(0), Slot(1)], {}, [0, 3]),
        ],
        [7],
    )
    assert (made.mutates, made.views, made.num_scalars) == ([0, 1], [-1, -1], 1)
    assert str(found) == "tile joined 5"


def test_one_alone_stays():
    b = body()
    b.op("doubled", 1, 2)
    b.op("neg", 1, out=5)
    b.op("doubled", 3, 4)
    assert b.shown("tile") == b.shown()


def test_other_ops_come_between():
    b = tile(body())
    b.op("neg", 1, out=5)
    tile(b)
    assert b.shown("tile") == ["tiles 1 2 3 4", "5 = neg 1", "tiles 1 2 3 4"]


def test_lists_are_of_as_many_tensors():
    b = tile(body())
    b.op("three", 1, 2, 3)
    b.op("three", 2, 3, 4)
    b.op("neg", 1, out=5)
    assert b.shown("tile") == ["tiles 1 2 3 4", "tiles 1 2 3 4", "5 = neg 1"]


def test_a_part_of_a_list_that_is_made_is_not_read_inside():
    b = body(outputs=2)
    b.op("doubled", 1, 2)
    one = b.op("both", 1, 2, out=(b.inner(), b.inner()))
    b.op("doubled", one, 3)
    b.op("scaled", 1, 2, one + 1)
    b.op("sums", one, one + 1, one + 1, one, out=(5, 6))
    assert b.shown("tile") == ["7 8 = tiles 1 2", "5 6 = tiles 7 3 1 2 8"]


def test_a_result_that_nobody_reads_keeps_an_op_apart():
    b = body()
    b.op("doubled", 1, 2)
    b.op("both", 1, 2, out=(5, b.inner()))
    b.op("doubled", 1, 2)
    assert b.shown("dead", "tile") == ["doubled 1 2", "5 0 = both 1 2", "doubled 1 2"]


def test_all_are_on_the_same_devices():
    b = body("R R R' R'")
    b.op("doubled", 1, 2)
    b.op("doubled", 3, 4, mesh=2)
    b.op("neg", 1, out=5)
    assert b.shown("tile") == b.shown()


def test_meshes_of_the_same_devices_are_as_good():
    b = body("R R R| R|")
    b.op("doubled", 1, 2)
    b.op("doubled", 3, 4, mesh=3)
    b.op("neg", 1, out=5)
    assert b.shown("tile") == ["tiles 1 2 3 4", "5 = neg 1"]
    [made] = b.rewritten("tile").made
    assert made.mesh_ids == [1, 3]


def test_on_other_devices_one_op_is_one_kernel(monkeypatch):
    monkeypatch.setitem(bodies.MESHES, 1, DeviceMesh("cuda", [0, 1]))
    b = tile(body())
    b.op("neg", 1, out=5)
    assert b.shown("tile") == b.shown()


def test_numbers_that_differ_by_position_keep_an_op_apart(monkeypatch):
    numbers: Any = (f"{_EACH}mul_.ScalarList", [ListArg([Slot(0), Slot(1)]), ListArg([2.0, 3.0])], [])
    monkeypatch.setitem(bodies._OPS, "doubled", numbers)
    b = tile(body())
    b.op("neg", 1, out=5)
    assert b.shown("tile") == b.shown()
