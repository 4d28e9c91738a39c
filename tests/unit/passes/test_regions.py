"""Which ops of a body become regions. Inputs are values 1 and 2, the outputs follow."""

from __future__ import annotations

from dtorch_runtime.wire.records import RegionArg, Slot
from tests.support.bodies import BodyWriter


def body(inputs: str = "R R", outputs: int = 1) -> BodyWriter:
    return BodyWriter(inputs.split(), outputs)


def test_neighbouring_elementwise_ops_become_one() -> None:
    b = body(outputs=2)
    one = b.op("neg", 1)
    b.op("add", b.op("relu", one), 2, out=3)
    b.op("max", one, out=(0, 4))
    assert b.shown("compile") == ["5 3 = region 1 2", "0 4 = max 5"]
    [made] = b.rewritten("compile").made
    [arg, *slots] = made.args
    assert slots == [Slot(0), Slot(1)]
    assert isinstance(arg, RegionArg)
    assert [(step.op, step.inputs) for step in arg.steps] == [
        ("aten::neg", [0]),
        ("aten::relu", [2]),
        ("aten::add.Tensor", [3, 1]),
    ]
    assert arg.outputs == [2, 4]
    assert made.views == [-1, -1]
    assert str(b.rewritten("compile")) == "compile joined 3"


def test_other_ops_come_between_regions() -> None:
    b = body(outputs=2)
    moved = b.op("t", b.op("relu", b.op("neg", 1)))
    b.op("neg", b.op("random", moved), out=3)
    b.op("neg_", 2)
    b.op("relu", b.op("neg", 2), out=4)
    assert b.shown("compile") == [
        "6 = region 1",
        "7 = t 6",
        "8 = random 7",
        "3 = neg 8",
        "neg_ 2",
        "4 = region 2",
    ]


def test_a_region_is_of_one_mesh() -> None:
    b = body("R R'", outputs=2)
    b.op("relu", b.op("neg", 1), out=3)
    b.op("relu", b.op("neg", 2, mesh=2), out=4, mesh=2)
    assert b.shown("compile") == ["3 = region 1", "4 = region 2"]
