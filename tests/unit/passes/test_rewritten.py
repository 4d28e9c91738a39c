"""What each pass makes of a body. Inputs are values 1 and 2, the outputs follow."""

from __future__ import annotations

import pytest

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
    assert b.shown("redistribute") == ["5 = contiguous.default 1", "3 = neg 5"]


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
    assert b.shown("redistribute") == ["4 = neg 1", "5 = t 4", "7 = contiguous.default 5", "3 = flat 7"]


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
    assert b.shown("common", "redistribute") == ["5 = contiguous.default 1", "3 = add 5 5"]


@pytest.mark.parametrize(
    ("source", "target"),
    [("S0", "S0|"), ("S0|", "S0"), ("P", "P|"), ("P|", "P"), ("R|", "R"), ("R", "R|")],
)
def test_where_devices_keep_what_they_have_nothing_is_copied(source, target):
    b = body(f"{source} R")
    b.op("neg", b.move(b.op("neg", 1), source, target), out=3)
    assert b.shown("redistribute") == ["4 = neg 1", "5 = contiguous.default 4", "3 = neg 5"]


def test_a_number_needs_no_copy():
    b = body("R R")
    b.shape = ()
    b.op("neg", b.move(b.op("neg", 1), "R", "R|"), out=3)
    assert b.shown("redistribute") == ["4 = neg 1", "3 = neg 4"]


def test_a_write_before_is_no_hindrance():
    b = body("R R")
    value = b.op("neg", 1)
    b.op("neg_", value)
    b.op("neg", b.move(value, "R", "R|"), out=3)
    assert b.shown("redistribute") == ["4 = neg 1", "neg_ 4", "5 = contiguous.default 4", "3 = neg 5"]


def a_result_like_an_input(b: BodyWriter) -> None:
    b.move(1, "R", "R|", out=3)


def a_write_to_what_was_kept(b: BodyWriter) -> None:
    value = b.op("neg", 1)
    same = b.move(value, "R", "R|")
    b.op("neg_", value)
    b.op("neg", same, out=3)


def a_write_to_what_it_became(b: BodyWriter) -> None:
    value = b.op("neg", 1)
    b.op("neg_", b.move(value, "R", "R|"))
    b.op("neg", value, out=3)


def other_devices(b: BodyWriter) -> None:
    b.op("neg", b.move(b.op("neg", 1), "R", "R'"), out=3)


def terms_that_are_reduced(b: BodyWriter) -> None:
    b.op("neg", b.move(2, "P", "R|"), out=3)


def terms_that_are_made(b: BodyWriter) -> None:
    b.op("neg", b.move(b.op("neg", 1), "R", "P|"), out=3)


COPIED = [
    a_result_like_an_input,
    a_write_to_what_was_kept,
    a_write_to_what_it_became,
    other_devices,
    terms_that_are_reduced,
    terms_that_are_made,
]


@pytest.mark.parametrize("write", COPIED, ids=lambda function: function.__name__)
def test_what_is_copied_all_the_same(write):
    b = body("R P")
    write(b)
    assert b.shown("redistribute") == b.shown()


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
