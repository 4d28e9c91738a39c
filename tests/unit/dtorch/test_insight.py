"""What users see of the engine, made from what was noted: no cluster."""

from __future__ import annotations

import json
import os
import stat
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtorch import DeviceMesh, Partial, Replicate, SettingError, Shard
from dtorch.insight.chrome import chrome_trace
from dtorch.insight.drawing import dot, dump, mermaid
from dtorch.insight.explain import RecordedCall, after_passes
from dtorch.insight.ops import ShownOp, shown_stream
from dtorch.insight.profile import clock_of
from dtorch.insight.spans import Clock, Span, received_bytes, spans_of
from dtorch.insight.table import table_of
from dtorch.meshes import mesh_id
from dtorch.replay.inner_ids import FIRST_INNER_ID
from dtorch.replay.templates import Op
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.tape import BATCH, WAIT
from dtorch_runtime.wire.records import BodyRecord, LaneRecord, ListArg, ScalarSlot, Slot, TemplateRecord

MESH = DeviceMesh("cpu", [0, 1])


def template(number: int, op: str, *args: Any, outputs: int = 1, scalars: int = 0) -> TemplateRecord:
    inputs = sum(isinstance(arg, Slot) for arg in args)
    return TemplateRecord(number, op, list(args), {}, inputs, outputs, scalars, [mesh_id(MESH)])


MUL, ADD, RAND, CALL = 1, 2, 3, 4
#: x * 2 + y, with one input, one output and one value inside of it.
BODY = BodyRecord([MUL, 0, 1, 4, ADD, 0, 4, 2, 3, FREE, 1, 4], 1)
TEMPLATES = {
    MUL: template(MUL, "aten::mul.Tensor", Slot(0), 2.0),
    ADD: template(ADD, "aten::add.Tensor", Slot(0), Slot(1)),
    RAND: template(RAND, "dtorch::rand", ListArg([4, 4]), ScalarSlot(0), scalars=1),
    CALL: TemplateRecord(CALL, "dtorch::captured", [], {}, 2, 1, 1, [mesh_id(MESH)], [], body=BODY),
}


# ---- clocks ----


@pytest.mark.parametrize(
    ("before", "after", "clock", "expected"),
    [
        (100, 200, 150, Clock(0, 0)),
        (100, 200, 101, Clock(0, 0)),
        (100, 200, 5150, Clock(5000, 50)),
        (5100, 5200, 150, Clock(-5000, 50)),
    ],
)
def test_the_offset_of_a_clock_is_known_up_to_half_of_the_round_trip(
    before: int, after: int, clock: int, expected: Clock
) -> None:
    assert clock_of(before, after, clock) == expected


def lane(kind: str, *spans: tuple[int, int, int, int, int], names: tuple[str, ...] = ()) -> LaneRecord:
    return LaneRecord(
        kind, 1, list(names), 0, array("q", [word for span in spans for word in span]).tobytes()
    )


def test_spans_are_on_the_clock_of_the_client() -> None:
    found = spans_of(
        lane("worker", (MUL, 0, 1000, 1500, 0), (BATCH, 7, 900, 1600, 0)),
        "node a",
        "",
        Clock(400, 3),
        TEMPLATES,
        {},
    )
    op, batch = found
    assert (op.start_ns, op.end_ns, op.name, op.lane) == (600, 1100, "aten::mul.Tensor", "device 1")
    assert (batch.start_ns, batch.end_ns, batch.batch) == (500, 1200, 7)


def test_a_device_has_a_lane_for_transfers_and_shows_waits_for_them() -> None:
    beside = lane("communication", (MUL, 0, 1000, 1500, 0))
    (span,) = spans_of(beside, "node a", "", Clock(), TEMPLATES, {})
    assert (span.lane, span.name) == ("device 1, communication", "aten::mul.Tensor")
    (wait,) = spans_of(lane("worker", (WAIT, 0, 1, 2, 0)), "node a", "", Clock(), TEMPLATES, {})
    assert (wait.lane, wait.category, wait.name) == ("device 1", "wait", "wait for transfers")


def test_templates_that_passes_made_come_with_the_lane() -> None:
    made = template(1 << 40, "dtorch::redistribute", Slot(0))
    record = LaneRecord("worker", 0, [], 0, array("q", [1 << 40, 0, 1, 2, 0]).tobytes(), [made])
    (span,) = spans_of(record, "node a", "", Clock(), {}, {})
    assert span.name == "dtorch::redistribute"


def test_calls_of_captured_functions_have_their_names() -> None:
    (span,) = spans_of(lane("worker", (CALL, 0, 1, 2, 1)), "node a", "", Clock(), TEMPLATES, {CALL: "step"})
    assert (span.category, span.name, span.args["failed"]) == ("captured call", "step", True)


def test_bytes_of_a_redistribute_are_those_that_a_device_receives() -> None:
    whole, cut = Layout(MESH, (Replicate(),)), Layout(MESH, (Shard(0),))
    assert received_bytes((8, 4), "float32", cut, whole) == {0: 64, 1: 64}
    assert received_bytes((8, 4), "float32", whole, cut) == {}
    terms = Layout(MESH, (Partial(),))
    assert received_bytes((8, 4), "float64", terms, cut) == {0: 128, 1: 128}


# ---- a trace ----


def test_the_trace_has_names_arrows_and_lost_nodes() -> None:
    spans = [
        Span("client", "main", "client", "batch", 1000, 2000, 3),
        Span("controller", "messages", "message", "ops", 3000, 4000, 3),
        Span("node a", "messages", "message", "subgraph", 5000, 5500, 3),
        Span("node b", "messages", "message", "subgraph", 5000, 5600, 3),
        Span("node a", "device 0", "batch", "batch 3", 6000, 9000, 3),
        Span("node a", "device 0", "op", "aten::add", 6500, 7000),
        Span("client", "fetches", "fetch", "a value", 500, 9500, args={"fetch": 4}),
    ]
    processes = [("client", ["main", "fetches"]), ("controller", ["messages"]), ("node a", ["messages"])]
    trace = chrome_trace(processes, spans, 500, {"node c": "silent"}, {"notes": ["x"]})
    events = json.loads(json.dumps(trace))["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(names) == ["client", "controller", "node a", "node b", "node c"]
    (op,) = [event for event in events if event["name"] == "aten::add"]
    assert (op["ph"], op["ts"], op["dur"], op["pid"]) == ("X", 6.0, 0.5, names["node a"])
    flow = [(e["ph"], e["pid"], e["ts"]) for e in events if e.get("cat") == "flow"]
    assert flow == [
        ("s", names["client"], 0.5),
        ("t", names["controller"], 2.5),
        ("t", names["node a"], 4.5),
        ("f", names["node a"], 5.5),
    ]
    assert [(e["ph"], e["ts"], e["id"]) for e in events if e.get("cat") == "fetch"] == [
        ("b", 0.0, 4),
        ("e", 9.0, 4),
    ]
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert (mark["name"], mark["pid"]) == ("no lane: silent", names["node c"])
    assert trace["otherData"] == {"notes": ["x"]}


def test_the_table_sums_up() -> None:
    spans = [
        Span("node a", "device 0", "op", "aten::add", 0, 3000),
        Span("node a", "device 0", "op", "aten::add", 4000, 5000),
        Span("node a", "device 10", "op", "move", 0, 9000, num_bytes=64),
        Span("node a", "device 2", "batch", "batch 1", 0, 500, 1),
        Span("node a", "device 10", "batch", "batch 1", 0, 9000, 1),
    ]
    lines = table_of(spans, 20_000, ["something is missing"]).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["move", "10", "1", "9.0", "9.0", "64"],
        ["aten::add", "0", "2", "4.0", "2.0", "0"],
    ]
    assert lines[3:] == [
        "device 2: busy 0.5 us of 20.0 us",
        "device 10: busy 9.0 us of 20.0 us",
        "note: something is missing",
    ]
    assert table_of([], 0, []).split()[0] == "op", "nothing ran"


# ---- ops for people ----


def test_a_stream_is_shown_with_captured_calls_taken_apart() -> None:
    words = [RAND, 0, 5, 99, FREE, 1, 4, CALL, 0, 5, 6, 7, FIRST_INNER_ID + 3, MUL, 0, 7, 0]
    assert [str(op) for op in shown_stream(words, TEMPLATES, {CALL: "step"})] == [
        "%5 = dtorch::rand([4, 4], seed 99) on [0, 1]",
        "%c3 = aten::mul.Tensor(%5, 2.0) on [0, 1]",
        "%7 = aten::add.Tensor(%c3, %6) on [0, 1]",
        "_ = aten::mul.Tensor(%7, 2.0) on [0, 1]",
    ]
    groups = [op.group for op in shown_stream(words, TEMPLATES, {CALL: "step"})]
    assert groups == [None, (1, "step"), (1, "step"), None]


def test_a_recorded_call_is_shown_before_and_after() -> None:
    first = Op(TEMPLATES[MUL], 0, (50,), (60,), ())
    dead = Op(TEMPLATES[MUL], 0, (60,), (61,), ())
    last = Op(TEMPLATES[ADD], 0, (60, 51), (62,), ())
    call = RecordedCall("f", [first, dead, last], [first, last], {50: 0, 51: 1, 62: 2}, 2, TEMPLATES[CALL])
    assert str(call).splitlines() == [
        "f(%1, %2) -> %3",
        "as recorded, 3 ops:",
        "    %4 = aten::mul.Tensor(%1, 2.0) on [0, 1]",
        "  - %5 = aten::mul.Tensor(%4, 2.0) on [0, 1]",
        "    %3 = aten::add.Tensor(%4, %2) on [0, 1]",
        "without dead values, 2 ops:",
        "    %4 = aten::mul.Tensor(%1, 2.0) on [0, 1]",
        "    %3 = aten::add.Tensor(%4, %2) on [0, 1]",
    ]


def test_what_passes_leave_of_a_call() -> None:
    twice = BodyRecord([MUL, 0, 1, 4, MUL, 0, 1, 5, ADD, 0, 4, 5, 3, FREE, 2, 4, 5], 2)
    record = TemplateRecord(CALL, "dtorch::captured", [], {}, 2, 1, 1, [mesh_id(MESH)], [], body=twice)
    templates = {
        number: msgspec.structs.replace(each, views=[-1])
        for number, each in TEMPLATES.items()
        if number != CALL
    }
    assert [str(op) for op in after_passes(record, templates, ("dead", "common"), {})] == [
        "%4 = aten::mul.Tensor(%1, 2.0) on [0, 1]",
        "%3 = aten::add.Tensor(%4, %4) on [0, 1]",
    ]


OPS = [
    ShownOp(template(1, 'my::"op"', Slot(0), "<b>"), ("%1",), ("%2",), (), 0),
    ShownOp(TEMPLATES[ADD], ("%2", "%2"), ("%3",), (), 0, (1, "step")),
    ShownOp(TEMPLATES[ADD], ("%3", "%1"), ("%4",), (), 0, (1, "step")),
]


def test_mermaid() -> None:
    assert mermaid(OPS).splitlines() == [
        "flowchart TD",
        '  v1(["%1"])',
        "  op0[\"%2 = my::&quot;op&quot;(%1, '&lt;b&gt;')<br/>on [0, 1]\"]",
        '  subgraph call1 ["step"]',
        '  op1["%3 = aten::add.Tensor(%2, %2)<br/>on [0, 1]"]',
        '  op2["%4 = aten::add.Tensor(%3, %1)<br/>on [0, 1]"]',
        "  end",
        '  v1 -->|"%1"| op0',
        '  op0 -->|"%2"| op1',
        '  op1 -->|"%3"| op2',
        '  v1 -->|"%1"| op2',
    ]


def test_dot() -> None:
    lines = dot(OPS).splitlines()
    assert lines[0] == "digraph dtorch {"
    assert lines[-1] == "}"
    assert '  op0 [label="%2 = my::\\"op\\"(%1, \'<b>\')\\non [0, 1]"];' in lines
    assert '  op0 -> op1 [label="%2"];' in lines
    assert dot(OPS).count("{") == dot(OPS).count("}") == 2


def test_dump_writes_what_the_suffix_says(tmp_path: Path) -> None:
    for suffix, expected in ((".mmd", mermaid(OPS)), (".dot", dot(OPS))):
        path = tmp_path / f"g{suffix}"
        assert dump(OPS, path) == path.read_text() == expected
    assert dump(OPS, None) == "\n".join(map(str, OPS))


@pytest.mark.parametrize("path", ["g.png", "g", 5])
def test_dump_refuses_other_suffixes(path: Any) -> None:
    with pytest.raises(SettingError, match=r"\.mmd, \.dot, \.svg.*write 'g\.mmd'"):
        dump(OPS, path)
    with pytest.raises(SettingError, match="folder that exists"):
        dump(OPS, "/no/such/folder/g.dot")


def test_a_picture_needs_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match=r"install graphviz.*'g\.mmd' or 'g\.dot'"):
        dump(OPS, tmp_path / "g.svg")
    assert not (tmp_path / "g.svg").exists()


@pytest.mark.parametrize("works", [True, False])
def test_a_picture_is_what_dot_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    program = tmp_path / "dot"
    program.write_text(
        '#!/bin/sh\necho "<svg>$1"; cat\n'
        if works
        else '#!/bin/sh\ncat > /dev/null; echo "no way" >&2; exit 1\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if works:
        assert dump(OPS, tmp_path / "g.svg") == dot(OPS)
        assert (tmp_path / "g.svg").read_text() == f"<svg>-Tsvg\n{dot(OPS)}"
    else:
        with pytest.raises(SettingError, match="could not draw 'g.svg': no way"):
            dump(OPS, tmp_path / "g.svg")
