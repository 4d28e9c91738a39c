"""What the status of a cluster looks like."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from dtorch_launcher.report import duration, id_ranges, status_json, status_summary, status_table
from dtorch_runtime.wire.messages import Status
from dtorch_runtime.wire.records import NodeRecord


def node(name: str, devices: list[int]) -> NodeRecord:
    return NodeRecord(
        name=name, host="h1", pid=17, device_type="cpu", devices=devices, data_endpoint="tcp://127.0.0.1:1"
    )


STATUS = Status(
    nodes=[node("second", [2, 3, 4]), node("[red]first", [0, 1])],
    sessions=[1, 2, 5],
    num_ops=12345,
    uptime_s=75.5,
)


def test_a_person_sees_nodes_in_the_order_of_their_devices() -> None:
    stream = io.StringIO()
    Console(file=stream, width=100).print(status_table(STATUS))
    assert [line.split() for line in stream.getvalue().splitlines()] == [
        ["node", "host", "process", "type", "devices"],
        ["[red]first", "h1", "17", "cpu", "0-1"],
        ["second", "h1", "17", "cpu", "2-4"],
    ]


def test_the_summary_counts() -> None:
    assert status_summary("ipc:///c", STATUS) == (
        "ipc:///c: 2 nodes, 5 devices, 3 sessions (1-2, 5), 12,345 ops, up 1 min 15 s"
    )
    lonely = Status(nodes=[node("n", [0])], sessions=[], num_ops=0, uptime_s=0.2)
    assert status_summary("a", lonely) == "a: 1 node, 1 device, 0 sessions, 0 ops, up 0 s"


def test_a_program_reads_json() -> None:
    read = json.loads(status_json("ipc:///c", STATUS))
    assert read["address"] == "ipc:///c"
    assert [(n["name"], n["devices"]) for n in read["nodes"]] == [
        ("[red]first", [0, 1]),
        ("second", [2, 3, 4]),
    ]
    assert (read["sessions"], read["num_ops"], read["uptime_s"]) == ([1, 2, 5], 12345, 75.5)


@pytest.mark.parametrize(
    ("ids", "text"), [([], "none"), ([3], "3"), ([2, 1, 0], "0-2"), ([0, 1, 4, 6, 7], "0-1, 4, 6-7")]
)
def test_ids_are_shown_as_ranges(ids: list[int], text: str) -> None:
    assert id_ranges(ids) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min 0 s"),
        (7500, "2 h 5 min"),
        (3 * 86400 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)
def test_durations_have_two_parts_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
