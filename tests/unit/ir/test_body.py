"""Bodies of templates: what is refused, and how one record becomes many."""

from __future__ import annotations

import pytest

from dtorch_runtime.ir.body import BodyFree, BodyOp, expand, parse_body
from dtorch_runtime.ir.graph import GraphError
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import BodyRecord, ScalarSlot, Slot, TemplateRecord

NEG, ADD, RAND, ELSEWHERE, NESTED = range(1, 6)


def template(number: int, inputs: int, outputs: int = 1, scalars: int = 0, mesh: int = 1) -> TemplateRecord:
    args = [*map(Slot, range(inputs)), *map(ScalarSlot, range(scalars))]
    return TemplateRecord(number, f"test::op{number}", args, {}, inputs, outputs, scalars, [mesh])


TEMPLATES = {
    NEG: template(NEG, 1),
    ADD: template(ADD, 2),
    RAND: template(RAND, 0, scalars=1),
    ELSEWHERE: template(ELSEWHERE, 1, mesh=2),
}


def captured(words: list[int], num_inner: int, scalars: int = 1) -> TemplateRecord:
    """Inputs 1 and 2, output 3, inner values from 4."""
    return TemplateRecord(
        9, "dtorch::captured", [], {}, 2, 1, scalars, [1], body=BodyRecord(words, num_inner)
    )


GOOD = captured([NEG, 7, 1, 4, RAND, 8, 5, 1, ADD, 9, 4, 5, 6, FREE, 2, 4, 5, ADD, 9, 6, 2, 3], 3, scalars=2)


def test_steps_are_in_order():
    steps = parse_body(GOOD, TEMPLATES)
    assert steps == [
        BodyOp(TEMPLATES[NEG], 7, (1,), (4,), ()),
        BodyOp(TEMPLATES[RAND], 8, (), (5,), (1,)),
        BodyOp(TEMPLATES[ADD], 9, (4, 5), (6,), ()),
        BodyFree((4, 5)),
        BodyOp(TEMPLATES[ADD], 9, (6, 2), (3,), ()),
    ]


def test_a_record_expands_to_the_ops_with_ids_of_its_own():
    steps = parse_body(GOOD, TEMPLATES)
    stream = [0, 9, 99, 10, 20, 30, 1000, 555]
    words, starts, ids = expand(GOOD, steps, stream, 1)
    assert ids == [0, 10, 20, 30, 1000, 1001, 1002]
    assert words == [
        *(NEG, 7, 10, 1000),
        *(RAND, 8, 1001, 555),
        *(ADD, 9, 1000, 1001, 1002),
        *(FREE, 2, 1000, 1001),
        *(ADD, 9, 1002, 20, 30),
    ]
    assert starts == [0, 4, 8, 13, 17]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TEMPLATES[NEG], "has no body"),
        (captured([77, 0, 1, 3], 0), "template 77, which was not defined"),
        (captured([NEG, 0, 1], 0), "ends inside a record"),
        (captured([NEG, 0, 4, 3], 1), r"uses values \(4,\)"),
        (captured([NEG, 0, 0, 3], 0), r"uses values \(0,\)"),
        (captured([NEG, 0, 1, 2], 0), r"makes values \(2,\)"),
        (captured([NEG, 0, 1, 3, NEG, 0, 1, 3], 0), r"makes values \(3,\)"),
        (captured([NEG, 0, 1, -3], 0), r"makes values \(-3,\)"),
        (captured([NEG, 0, 1, 4], 1), "should make its outputs"),
        (captured([NEG, 0, 1, 3, NEG, 0, 1, 9], 1), "should make its outputs"),
        (captured([RAND, 0, 3, 0], 0), r"takes scalars \(0,\)"),
        (captured([RAND, 0, 3, 1], 0), r"takes scalars \(1,\)"),
        (captured([ELSEWHERE, 0, 1, 3], 0), r"meshes \[2\]"),
        (captured([NEG, 0, 1, 3, FREE, 1, 3], 0), r"frees \(3,\)"),
        (captured([NEG, 0, 1, 3, FREE, 1, 4], 1), r"frees \(4,\)"),
    ],
)
def test_what_cannot_be_is_refused(record: TemplateRecord, message: str):
    with pytest.raises(GraphError, match=message):
        parse_body(record, TEMPLATES)


def test_a_body_in_a_body_is_refused():
    nested = captured([9, 0, 1, 2, 3, 1, 1], 0, scalars=2)
    with pytest.raises(GraphError, match="another body"):
        parse_body(nested, {**TEMPLATES, 9: GOOD})
