"""What each pass makes of a body. Inputs are values 1 and 2, the outputs follow."""

from __future__ import annotations

import pytest
import torch

from dtorch_runtime.passes.reuse import IN_PLACE, OUT
from dtorch_runtime.wire.records import Slot, TransferArg
from tests.support.bodies import BodyWriter


def body(inputs: str = "R R", outputs: int = 1) -> BodyWriter:
    return BodyWriter(inputs.split(), outputs)


# ---- dead ----


def test_what_nobody_reads_is_left_out():
    b = body()
    b.op("neg", b.op("neg", 1))
    b.op("random", 1)
    b.op("max", 1, out=(3, b.inner()))
    assert b.shown("dead") == ["3 0 = max 1"]


def test_a_dead_write_stays_with_what_it_needs():
    b = body()
    copy = b.op("neg", 1)
    b.op("neg_", b.op("t", copy))
    b.op("neg", 1, out=3)
    assert b.shown("dead") == ["4 = neg 1", "5 = t 4", "neg_ 5", "3 = neg 1"]


# ---- common ----


def test_the_same_op_on_the_same_values_is_done_once():
    b = body()
    one, other = b.op("neg", 1), b.op("neg", 1)
    b.op("add", b.op("relu", one), b.op("relu", other), out=3)
    assert b.shown("common") == ["4 = neg 1", "6 = relu 4", "3 = add 6 6"]


def test_the_same_redistribution_for_several_users_is_done_once():
    b = body("S0 R")
    b.op("add", b.op("neg", b.move(1, "S0", "R")), b.op("relu", b.move(1, "S0", "R")), out=3)
    assert b.shown("common") == ["4 = S0->R 1", "5 = neg 4", "7 = relu 4", "3 = add 5 7"]


def test_an_output_of_the_call_keeps_its_number():
    b = body()
    inner = b.op("neg", 1)
    b.op("relu", inner)
    b.op("neg", 1, out=3)
    b.op("relu", inner)
    assert b.shown("common") == ["3 = neg 1", "5 = relu 3"]


def test_views_of_inputs_are_shared():
    b = body()
    b.op("add", b.op("t", 1), b.op("t", 1), out=3)
    assert b.shown("common") == ["4 = t 1", "3 = add 4 4"]


def test_results_that_only_one_of_two_wanted_are_made_once():
    b = body()
    values, places = b.inner(), b.inner()
    b.op("max", 1, out=(values, 0))
    b.op("max", 1, out=(0, places))
    b.op("add", values, places, out=3)
    assert b.shown("common") == ["4 5 = max 1", "3 = add 4 5"]


def two_outputs(b: BodyWriter) -> None:
    b.op("neg", 1, out=3)
    b.op("neg", 1, out=4)


def views_of_two_outputs(b: BodyWriter) -> None:
    b.op("t", b.op("neg", 1), out=3)
    b.op("alias", b.op("neg", 1), out=4)


def random_ops(b: BodyWriter) -> None:
    b.op("add", b.op("random", 1), b.op("random", 1), out=3)
    b.op("neg", 1, out=4)


def a_write_between(b: BodyWriter) -> None:
    b.op("neg", 1, out=3)
    b.op("neg_", b.op("t", 1))
    b.op("add", b.op("neg", 1), 3, out=4)


def a_write_to_an_input_that_may_be_the_same(b: BodyWriter) -> None:
    b.op("neg", 1, out=3)
    b.op("neg_", 2)
    b.op("add", b.op("neg", 1), 3, out=4)


def a_write_to_a_result(b: BodyWriter) -> None:
    written = b.op("neg", 1)
    b.op("neg_", b.op("alias", written))
    b.op("add", b.op("neg", 1), written, out=3)
    b.op("relu", 1, out=4)


def a_write_to_what_may_be_a_result(b: BodyWriter) -> None:
    written = b.op("neg", 1)
    b.op("neg_", b.op("unknown", written))
    b.op("add", b.op("neg", 1), written, out=3)
    b.op("relu", 1, out=4)


def one_that_was_dropped_long_ago(b: BodyWriter) -> None:
    b.op("relu", b.op("neg", 1), out=3)
    value = 2
    for _ in range(40):
        value = b.op("relu", value)
    b.op("add", b.op("neg", 1), value, out=4)


APART = [
    two_outputs,
    views_of_two_outputs,
    random_ops,
    a_write_between,
    a_write_to_an_input_that_may_be_the_same,
    a_write_to_a_result,
    a_write_to_what_may_be_a_result,
    one_that_was_dropped_long_ago,
]


@pytest.mark.parametrize("write", APART, ids=lambda function: function.__name__)
def test_what_must_stay_apart(write):
    b = body(outputs=2)
    write(b)
    assert b.shown("common") == b.shown()


# ---- redistribute ----


def test_there_and_back_again_is_a_copy():
    b = body("R R")
    b.move(b.move(1, "R", "S0"), "S0", "R", out=3)
    assert b.shown("redistribute") == ["3 = R->R 1"]


def test_a_gather_of_which_a_slice_is_taken_is_a_slice():
    b = body("S0 R")
    b.op("neg", b.move(b.move(1, "S0", "R"), "R", "S0"), out=3)
    assert b.shown("redistribute") == ["5 = S0->S0 1", "3 = neg 5"]


def test_what_is_contiguous_is_not_copied():
    b = body("P R")
    whole = b.move(1, "P", "R")
    again = b.move(b.move(whole, "R", "S0"), "S0", "R")
    b.op("add", whole, again, out=3)
    assert b.shown("redistribute") == ["4 = P->R 1", "3 = add 4 4"]


def test_what_may_be_strided_is_copied():
    b = body("R R")
    turned = b.op("t", b.op("neg", 1))
    b.op("flat", b.move(b.move(turned, "R", "S0"), "S0", "R"), out=3)
    assert b.shown("redistribute") == ["4 = neg 1", "5 = t 4", "7 = R->R 5", "3 = flat 7"]


def test_a_chain_becomes_one():
    b = body("P R")
    b.move(b.move(b.move(1, "P", "S0"), "S0", "S1"), "S1", "R", out=3)
    assert b.shown("redistribute") == ["3 = P->R 1"]


def test_a_link_that_somebody_reads_stays():
    b = body("R R", outputs=2)
    cut = b.move(1, "R", "S0")
    b.op("neg", cut, out=3)
    b.move(cut, "S0", "R", out=4)
    assert b.shown("redistribute") == ["5 = R->S0 1", "3 = neg 5", "4 = R->R 1"]


def test_across_meshes():
    b = body("R' R")
    b.move(b.move(1, "R'", "R"), "R", "S0'", out=3)
    assert b.shown("redistribute") == ["3 = R'->S0' 1"]


def test_passes_make_work_for_one_another():
    b = body("R R")
    one = b.move(b.move(1, "R", "S0"), "S0", "R")
    other = b.move(b.move(1, "R", "S1"), "S1", "R")
    b.op("add", one, other, out=3)
    assert b.shown("common", "redistribute") == ["5 = R->R 1", "3 = add 5 5"]


def terms_in_the_middle(b: BodyWriter) -> None:
    b.move(b.move(1, "R", "P"), "P", "S0", out=3)


def terms_at_the_end(b: BodyWriter) -> None:
    b.move(b.move(2, "P", "R"), "R", "P", out=3)


def a_write_to_the_source(b: BodyWriter) -> None:
    cut = b.move(1, "R", "S0")
    b.op("neg_", b.op("t", 1))
    b.move(cut, "S0", "R", out=3)


def a_write_to_the_link(b: BodyWriter) -> None:
    cut = b.move(1, "R", "S0")
    b.op("neg_", cut)
    b.move(cut, "S0", "R", out=3)


def dearer(b: BodyWriter) -> None:
    cut = b.move(2, "P", "S0")
    b.op("neg", cut)
    b.move(cut, "S0", "S1", out=3)


def a_source_that_was_dropped_long_ago(b: BodyWriter) -> None:
    value = cut = b.move(b.op("neg", 1), "R", "S0")
    for _ in range(40):
        value = b.op("relu", value)
    b.move(cut, "S0", "R", out=3)


UNFUSED = [
    terms_in_the_middle,
    terms_at_the_end,
    a_write_to_the_source,
    a_write_to_the_link,
    dearer,
    a_source_that_was_dropped_long_ago,
]


@pytest.mark.parametrize("write", UNFUSED, ids=lambda function: function.__name__)
def test_what_is_not_fused(write):
    b = body("R P")
    write(b)
    assert b.shown("redistribute") == b.shown()


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
    no_elementwise_op,
]


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


# ---- all ----


def test_lines_of_the_program_and_counts_are_kept():
    b = body("R R")
    b.op("neg", 1)
    b.move(b.move(1, "R", "S0"), "S0", "R", out=3)
    found = b.rewritten("dead", "common", "redistribute")
    assert found.num_changed == {"dead": 1, "common": 0, "redistribute": 1}
    [made] = found.made
    assert found.record.body is not None
    assert found.record.body.words == [made.template_id, b.words[-3], 1, 3]
    assert made.template_id >= 1 << 40


def test_without_passes_only_frees_may_move():
    b = body()
    b.op("neg", b.op("neg", 1), out=3)
    assert b.rewritten().num_changed == {}
    assert b.shown() == ["4 = neg 1", "3 = neg 4"]
