"""What passes make of redistributions of a body: together, early. Inputs are values 1 and 2, the outputs follow."""

from __future__ import annotations

import pytest

from dtorch_runtime.passes import bucket
from dtorch_runtime.wire.records import TransferArg
from tests.support.bodies import BodyWriter


def body(inputs: str = "R R", outputs: int = 1) -> BodyWriter:
    return BodyWriter(inputs.split(), outputs)


# ---- bucket ----


def test_small_all_reduces_become_one():
    b = body("P P")
    one, other = b.move(1, "P", "R"), b.move(2, "P", "R")
    b.op("add", one, other, out=3)
    assert b.shown("bucket") == ["6 = pack 1 2", "7 = P->R 6", "4 5 = unpack 7", "3 = add 4 5"]
    [_, flat, _] = b.rewritten("bucket").made
    assert isinstance(flat.args[1], TransferArg)
    assert flat.args[1].shape == [32]
    assert str(b.rewritten("bucket")) == "bucket joined 2"


def test_small_gathers_become_one():
    b = body("S0 S1")
    b.op("add", b.move(1, "S0", "R"), b.move(2, "S1", "R"), out=3)
    assert b.shown("bucket") == ["6 = pack 1 2", "7 = S0->R 6", "4 5 = unpack 7", "3 = add 4 5"]


def test_on_an_axis_of_one_device_placements_do_not_matter():
    b = body("P| P|", outputs=2)
    b.move(1, "P|", "R|", out=3)
    b.move(2, "P|", "R!", out=4)
    assert b.shown("bucket") == ["5 = pack 1 2", "6 = P|->R| 5", "3 4 = unpack 6"]


@pytest.mark.parametrize(("num_bytes", "num_joined"), [(256, 2), (257, 0)])
def test_in_one_agent_it_depends_on_how_much_is_moved(monkeypatch, num_bytes, num_joined):
    monkeypatch.setattr(bucket, "MEETINGS_BYTES", num_bytes)
    b = body("P P")
    devices_of_one_agent(b)
    assert str(b.rewritten("bucket")) == f"bucket joined {num_joined}"


def test_a_bucket_stands_where_its_last_input_is_made():
    b = body("P P", outputs=2)
    b.move(1, "P", "R", out=3)
    late = b.op("neg", 2)
    b.op("neg", 1)
    b.move(late, "P", "R", out=4)
    assert b.shown("bucket") == ["5 = neg 2", "7 = pack 1 5", "8 = P->R 7", "3 4 = unpack 8", "6 = neg 1"]


def first_reader_before_the_second_input(b: BodyWriter) -> None:
    whole = b.move(1, "P", "R")
    b.op("neg", whole)
    b.move(b.op("neg", 2), "P", "R", out=3)


def one_of_the_other(b: BodyWriter) -> None:
    b.move(b.op("alias", b.move(b.move(1, "P", "R"), "R", "P")), "P", "R", out=3)


def other_kinds(b: BodyWriter) -> None:
    b.op("neg", b.move(1, "P", "S0"))
    b.move(2, "P", "R", out=3)


def a_write_before_the_second_input(b: BodyWriter) -> None:
    own = b.op("neg", 1)
    b.move(own, "P", "R", out=3)
    b.op("neg_", own)
    b.op("neg", b.move(b.op("alias", 2), "P", "R"))


def a_large_one(b: BodyWriter) -> None:
    b.shape = (256, 256)
    b.op("neg", b.move(1, "P", "R"))
    b.move(2, "P", "R", out=3)


def devices_of_one_agent(b: BodyWriter) -> None:
    b.node_of = dict.fromkeys(range(3), "a")
    b.op("neg", b.move(1, "P", "R"))
    b.move(2, "P", "R", out=3)


def another_dtype(b: BodyWriter) -> None:
    b.op("neg", b.move(1, "P", "R"))
    b.dtype = "int64"
    b.move(2, "P", "R", out=3)


ALONE = [
    first_reader_before_the_second_input,
    one_of_the_other,
    other_kinds,
    a_write_before_the_second_input,
    a_large_one,
    devices_of_one_agent,
    another_dtype,
]


@pytest.mark.parametrize("write", ALONE, ids=lambda function: function.__name__)
def test_what_is_moved_alone(write):
    b = body("P P")
    write(b)
    assert b.shown("bucket") == b.shown()


# ---- reorder ----


def test_a_redistribution_begins_when_its_input_is_there():
    b = body("R P", outputs=2)
    b.op("add", b.op("neg", 1), b.op("relu", 1), out=3)
    b.op("max", b.move(2, "P", "R"), out=(4, 0))
    assert b.shown("reorder")[0] == "7 = P->R 2"
    assert b.shown("reorder")[-1].startswith("4 0 = max")
    assert str(b.rewritten("reorder")) == "reorder moved 1"


def test_what_does_not_need_it_comes_before_its_reader():
    b = body("P R", outputs=2)
    b.op("relu", b.op("neg", b.move(1, "P", "R")), out=3)
    b.op("neg", b.op("relu", 2), out=4)
    assert b.shown("reorder") == ["5 = P->R 1", "7 = relu 2", "4 = neg 7", "6 = neg 5", "3 = relu 6"]


def test_redistributions_stay_in_their_order_where_they_can_begin_together():
    b = body("P S0", outputs=2)
    b.op("neg", b.move(1, "P", "R"), out=3)
    b.op("neg", b.move(2, "S0", "R"), out=4)
    assert b.shown("reorder")[:2] == ["5 = P->R 1", "6 = S0->R 2"]


def a_write_to_what_moves(b: BodyWriter) -> None:
    own = b.op("neg", 1)
    b.op("neg_", b.op("t", own))
    b.move(own, "P", "R", out=3)


def a_write_to_what_was_moved(b: BodyWriter) -> None:
    b.move(b.op("neg", 1), "P", "R", out=3)
    b.op("neg_", 3)
    b.op("neg", 3, out=4)


def random_ops_behind(b: BodyWriter) -> None:
    b.op("random", b.move(1, "P", "R"), out=3)
    b.op("random", 2, out=4)


def writes_to_what_the_reader_reads(b: BodyWriter) -> None:
    own = b.op("neg", 2)
    b.op("add", b.move(b.op("alias", 1), "P", "R"), own, out=3)
    b.op("neg_", own)
    b.op("neg", own, out=4)


IN_ORDER = [
    a_write_to_what_moves,
    a_write_to_what_was_moved,
    random_ops_behind,
    writes_to_what_the_reader_reads,
]


@pytest.mark.parametrize("write", IN_ORDER, ids=lambda function: function.__name__)
def test_what_keeps_its_order(write):
    b = body("P R", outputs=2)
    write(b)
    if 4 not in b.made:
        b.op("max", 3, out=(0, 4))
    assert b.shown("reorder") == b.shown()
