"""What passes make of the memory of a body. Inputs are values 1 and 2, the outputs follow."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.passes.reuse import IN_PLACE, OUT
from dtorch_runtime.wire.records import Slot
from tests.support.bodies import BodyWriter


def body(inputs: str = "R R", outputs: int = 1) -> BodyWriter:
    return BodyWriter(inputs.split(), outputs)


# ---- reuse ----


def test_an_elementwise_op_writes_to_what_dies_there():
    b = body()
    b.op("relu", b.op("neg", b.op("neg", 1)), out=3)
    assert b.shown("reuse") == ["3 = neg 1", "neg_.default 3", "relu_.default 3"]
    assert [made.mutates for made in b.rewritten("reuse").made] == [[0], [0]]
    assert str(b.rewritten("reuse")) == "reuse changed 2"


def test_the_second_operand_is_written_to_where_only_that_dies():
    b = body()
    b.op("add", 1, b.op("relu", 2), out=3)
    assert b.shown("reuse") == ["3 = relu 2", "add.out 1 3"]
    [made] = b.rewritten("reuse").made
    assert made.kwargs == {"out": Slot(1)}
    assert made.mutates == [1]


def test_views_that_died_before_keep_no_memory():
    b = body()
    own = b.op("neg", 1)
    b.op("add", b.op("relu", own), b.op("neg", b.op("t", own), fits=False), out=3)
    assert b.shown("reuse") == ["4 = neg 1", "3 = relu 4", "6 = t 4", "7 = neg 6", "add_.Tensor 3 7"]


def an_input(b: BodyWriter) -> None:
    b.op("neg", 1, out=3)


def a_view_of_an_input(b: BodyWriter) -> None:
    b.op("neg", b.op("alias", 1), out=3)


def what_may_be_an_input(b: BodyWriter) -> None:
    b.op("neg", b.op("unknown", 1), out=3)


def an_output(b: BodyWriter) -> None:
    b.op("relu", b.op("neg", 1, out=4), out=3)


def a_view_that_is_read_later(b: BodyWriter) -> None:
    own = b.op("neg", 1)
    view = b.op("t", own)
    b.op("max", b.op("add", 1, b.op("relu", own), fits=False), out=(0, 3))
    b.op("add", view, 1, out=4, fits=False)


def a_view_that_the_op_reads(b: BodyWriter) -> None:
    own = b.op("neg", 1)
    b.op("add", own, b.op("t", own), out=3)


def a_view_that_dies_with_it(b: BodyWriter) -> None:
    b.op("relu", b.op("alias", b.op("neg", 1)), out=3)


def another_shape_or_layout(b: BodyWriter) -> None:
    b.op("relu", b.op("neg", 1), out=3, fits=False)


def what_may_be_under_way(b: BodyWriter) -> None:
    own = b.op("neg", 1)
    b.op("max", b.move(own, "P", "R"), out=(0, 4))
    b.op("relu", own, out=3)


def no_elementwise_op(b: BodyWriter) -> None:
    b.op("max", b.op("neg", 1), out=(3, 0))


NEW_MEMORY = [
    an_input,
    a_view_of_an_input,
    what_may_be_an_input,
    an_output,
    a_view_that_is_read_later,
    a_view_that_the_op_reads,
    a_view_that_dies_with_it,
    another_shape_or_layout,
    what_may_be_under_way,
    no_elementwise_op,
]


def test_what_is_sent_afterwards_may_be_written_to_before():
    b = body("P R")
    b.move(b.op("relu", b.op("neg", 1)), "P", "R", out=3)
    assert b.shown("reuse") == ["4 = neg 1", "relu_.default 4", "3 = P->R 4"]


@pytest.mark.parametrize("write", NEW_MEMORY, ids=lambda function: function.__name__)
def test_what_needs_memory_of_its_own(write):
    b = body(outputs=2)
    write(b)
    if 4 not in b.made:
        b.op("max", 2, out=(0, 4))
    assert b.shown("reuse") == b.shown()


@pytest.mark.parametrize("name", [*IN_PLACE.values(), *(out for out, _ in OUT.values())])
def test_there_are_such_ops(name: str) -> None:
    base, overload = name.removeprefix("aten::").split(".")
    schema = getattr(getattr(torch.ops.aten, base), overload)._schema
    written = [argument for argument in schema.arguments if argument.is_write]
    assert len(written) == 1
    assert len(schema.returns) == 1


@pytest.mark.parametrize(
    ("name", "found"), [*IN_PLACE.items(), *((name, found) for name, (found, _) in OUT.items())]
)
def test_their_arguments_are_those_of_the_op(name: str, found: str) -> None:
    def arguments(op: str) -> list[tuple[str, bool]]:
        base, overload = op.removeprefix("aten::").split(".")
        schema = getattr(getattr(torch.ops.aten, base), overload)._schema
        return [(a.name, a.kwarg_only) for a in schema.arguments if not a.is_out]

    assert arguments(found) == arguments(name)
