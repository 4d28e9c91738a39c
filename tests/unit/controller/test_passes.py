"""The controller tells nodes of captured calls as its passes have left them."""

from __future__ import annotations

import pytest

from dtorch_runtime.ir.body import parse_body
from dtorch_runtime.passes.rewrite import FIRST_OWN_ID, PASSES
from dtorch_runtime.wire.messages import DefineMesh, DefineTemplates, Refused
from dtorch_runtime.wire.records import LayoutRecord, PlacementRecord, Slot, TemplateRecord, TransferArg
from tests.support.bodies import BodyWriter
from tests.support.control import ControllerRig, mesh, template


def there_and_back(value: int = 1) -> BodyWriter:
    """Of one mesh with devices 0 and 1."""
    writer = BodyWriter(["R", "R"], 1)
    writer.move(writer.move(value, "R", "S0"), "S0", "R", out=3)
    return writer


def define(rig: ControllerRig, client: int, writer: BodyWriter) -> None:
    rig.define(client, [mesh(1, [0, 1]), mesh(2, [0])], [*writer.templates.values(), writer.record()])


def told(rig: ControllerRig, node: int) -> list[TemplateRecord]:
    return [record for message in rig.all(node, DefineTemplates) for record in message.templates]


@pytest.fixture
def rig() -> ControllerRig:
    return ControllerRig()


def test_a_body_comes_after_the_templates_that_passes_have_made(rig: ControllerRig) -> None:
    node = rig.add_node()
    writer = there_and_back()
    client = rig.add_client(passes=list(PASSES))
    define(rig, client, writer)
    records = told(rig, node)
    assert [record.template_id for record in records] == [1, 2, FIRST_OWN_ID, 1000]
    whole = LayoutRecord(1, [PlacementRecord("R")])
    assert records[2].args == [Slot(0), TransferArg([4, 4], "float64", whole, whole)]
    [step] = parse_body(records[3], {record.template_id: record for record in records[:3]})
    assert (step.inputs, step.outputs) == ((1,), (3,))


def test_a_node_that_comes_later_is_told_the_same(rig: ControllerRig) -> None:
    first = rig.add_node()
    define(rig, rig.add_client(passes=list(PASSES)), there_and_back())
    later = rig.add_node("node1")
    assert told(rig, later) == told(rig, first)
    assert len(rig.all(later, DefineMesh)) == 2


def test_what_was_made_once_is_used_again(rig: ControllerRig) -> None:
    node, client = rig.add_node(), rig.add_client(passes=list(PASSES))
    define(rig, client, there_and_back())
    define(rig, client, there_and_back())  # may be told twice
    again = there_and_back(2)
    record = again.record()
    changed = {name: getattr(record, name) for name in record.__struct_fields__} | {"template_id": 1001}
    rig.receive(client, DefineTemplates(templates=[TemplateRecord(**changed)]))
    assert rig.all(client, Refused) == []
    assert {r.template_id for r in told(rig, node)} == {1, 2, FIRST_OWN_ID, 1000, 1001}


def test_sessions_do_not_share_what_was_made(rig: ControllerRig) -> None:
    node = rig.add_node()
    for _ in range(2):
        define(rig, rig.add_client(passes=list(PASSES)), there_and_back())
    made = [
        (message.session, record)
        for message in rig.all(node, DefineTemplates)
        for record in message.templates
    ]
    assert [number for number, record in made if record.template_id == FIRST_OWN_ID] == [1, 2]


def test_without_passes_a_body_is_sent_on_as_it_was(rig: ControllerRig) -> None:
    node = rig.add_node()
    writer = BodyWriter(["R"], 1)
    writer.op("neg", 1)
    writer.op("neg", 1, out=2)
    define(rig, rig.add_client(), writer)
    assert told(rig, node)[-1] == writer.record()


@pytest.mark.parametrize(
    "wrong",
    [
        TransferArg(
            [4], "float64", LayoutRecord(9, [PlacementRecord("R")]), LayoutRecord(1, [PlacementRecord("R")])
        ),
        TransferArg([4], "float64", LayoutRecord(1, []), LayoutRecord(1, [PlacementRecord("R")])),
        TransferArg(
            [4],
            "float64",
            LayoutRecord(1, [PlacementRecord("S", 5)]),
            LayoutRecord(1, [PlacementRecord("R")]),
        ),
        TransferArg(
            [4], "float64", LayoutRecord(1, [PlacementRecord("X")]), LayoutRecord(1, [PlacementRecord("R")])
        ),
        TransferArg(
            [4], "?", LayoutRecord(1, [PlacementRecord("S", 0, 0)]), LayoutRecord(1, [PlacementRecord("R")])
        ),
        TransferArg(
            [-4], "?", LayoutRecord(1, [PlacementRecord("S", 0, 1)]), LayoutRecord(1, [PlacementRecord("R")])
        ),
        TransferArg(
            [4], "?", LayoutRecord(1, [PlacementRecord("P", op="?")]), LayoutRecord(1, [PlacementRecord("R")])
        ),
    ],
)
def test_redistributions_that_cannot_be_are_left_to_the_workers(
    rig: ControllerRig, wrong: TransferArg
) -> None:
    node, client = rig.add_node(), rig.add_client(passes=list(PASSES))
    writer = there_and_back()
    for number, record in writer.templates.items():
        ends = (wrong.source, wrong.target) if number == 1 else (wrong.target, wrong.source)
        arg = TransferArg(wrong.shape, wrong.dtype, *ends)
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        writer.templates[number] = TemplateRecord(**(fields | {"args": [Slot(0), arg]}))
    define(rig, client, writer)
    assert told(rig, node)[-1].template_id == 1000
    assert rig.all(client, Refused) == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (template(FIRST_OWN_ID), "the controller's own"),
        (template(9, 1, views=[1]), "makes views of inputs"),
        (template(9, 1, views=[-2]), "makes views of inputs"),
        (template(9, 1, views=[]), "makes views of inputs"),
    ],
)
def test_templates_that_cannot_be_are_refused(
    rig: ControllerRig, record: TemplateRecord, reason: str
) -> None:
    client = rig.add_client(passes=list(PASSES))
    rig.define(client, [mesh(1, [0])], [record])
    assert reason in rig.only(client, Refused).reason


def test_a_client_that_asks_for_other_passes_is_refused(rig: ControllerRig) -> None:
    client = rig.add_client(passes=["dead", "fuse"])
    assert "you asked for ['dead', 'fuse']" in rig.only(client, Refused).reason
