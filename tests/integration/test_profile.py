"""``dtorch.profile`` and ``dtorch.counters`` on a cluster in processes: what is in a trace, and what it must not do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

#: Times in a trace are in microseconds, as floats.
ROUNDING_US = 0.01


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def lanes(trace: dict[str, Any]) -> dict[tuple[int, int], tuple[str, str]]:
    """The names of process and thread of each lane."""
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): (processes[e["pid"]], e["args"]["name"])
        for e in meta
        if e["name"] == "thread_name"
    }


def check_lanes(trace: dict[str, Any]) -> None:
    """Spans of one lane follow one another, or lie in one another."""
    by_lane: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in complete(trace):
        by_lane[event["pid"], event["tid"]].append(event)
    assert by_lane.keys() <= lanes(trace).keys()
    for events in by_lane.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[float] = []
        for event in events:
            while open_until and open_until[-1] <= event["ts"] + ROUNDING_US:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + ROUNDING_US, event
            open_until.append(end)


def test_a_program_on_two_devices(mesh: dtorch.DeviceMesh, tmp_path: Path) -> None:
    x = dtorch.rand(64, 64, device_mesh=mesh, placements=[Shard(0)])
    before = x * 3  # not in the trace
    with dtorch.profile(tmp_path / "trace.json") as profile:
        y = (before + x).redistribute(placements=[Replicate()])
        value = y.sum().item()
    after = x * 4
    assert value == pytest.approx((x.to_torch() * 4).sum().item(), rel=1e-4)
    assert torch.equal(after.to_torch(), x.to_torch() * 4)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = set(lanes(trace).values())
    assert {("controller", "messages"), ("client", "MainThread"), ("client", "fetches")} <= names
    assert {thread for process, thread in names if process == "node node0"} == {
        "messages",
        *(f"device {device}" for device in mesh.devices),
    }
    check_lanes(trace)
    where = lanes(trace)
    ops = [event for event in complete(trace) if event["cat"] == "op"]
    for device in mesh.devices:
        mine = [event for event in ops if where[event["pid"], event["tid"]][1] == f"device {device}"]
        assert [event["name"] for event in mine] == [
            "aten::add.Tensor",
            "dtorch::redistribute",
            "aten::sum.default",
        ]
        assert all("test_profile.py" in event["args"]["line"] for event in mine)
        assert "(before + x).redistribute" in mine[0]["args"]["line"]
        assert mine[1]["args"]["bytes"] == 32 * 64 * 4
        assert (mine[1]["args"]["from"], mine[1]["args"]["to"]) == ("[S(0)]", "[R]")
    messages = {event["name"] for event in complete(trace) if event["cat"] == "message"}
    assert {"ops", "fetch", "subgraph", "value_data"} <= messages
    client = {event["name"] for event in complete(trace) if event["cat"] == "client"}
    assert "batch" in client
    assert any(name.startswith("wait for the value of sum issued at") for name in client)
    flows = [event for event in trace["traceEvents"] if event.get("cat") == "flow"]
    arrows: dict[str, list[str]] = defaultdict(list)
    for event in flows:
        arrows[event["id"]].append(event["ph"])
    assert {name.rpartition(":")[2] for name in arrows} == {"device 0", "device 1"}
    assert all(phases == ["s", "t", "t", "f"] for phases in arrows.values())
    assert profile.notes == trace["otherData"]["notes"] == []
    assert {clock.offset_ns for clock in profile.clocks.values()} == {0}, "processes of one machine"


def test_batches_go_from_client_to_controller_to_node_to_worker(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh)
    with dtorch.profile() as profile:
        for _ in range(3):
            x = x + 1
            x.to_torch()
    ways: dict[int, list[Any]] = defaultdict(list)
    for span in profile.spans:
        if span.batch is not None:
            ways[span.batch].append(span)
    assert len(ways) >= 3, "a batch leaves for each fetch, others by their age"
    for spans in ways.values():
        order = ("client", "controller", "node node0", "node node0", "node node0")
        assert tuple(span.process for span in spans) == order
        assert all(early.start_ns <= late.start_ns for early, late in pairwise(spans[:3]))


def test_the_table_counts_by_op_and_device(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.rand(8, 8, device_mesh=mesh, placements=[Shard(0)])
    with dtorch.profile() as profile:
        for _ in range(5):
            y = x + 1
        y.redistribute(placements=[Replicate()])
    rows = [line.split() for line in str(profile).splitlines()]
    assert rows[0] == ["op", "device", "count", "total", "us", "mean", "us", "bytes"]
    assert [row[:3] for row in rows if row[0] == "aten::add.Tensor"].count(
        ["aten::add.Tensor", "0", "5"]
    ) == 1
    (move,) = [row for row in rows if row[:2] == ["dtorch::redistribute", "1"]]
    assert (move[2], move[5]) == ("1", str(4 * 8 * 4))
    assert str(profile).count("busy") == 2


def test_captured_calls_show_their_ops_and_count_as_before(mesh: dtorch.DeviceMesh) -> None:
    @dtorch.capture
    def step(x: Any) -> Any:
        return torch.relu(x * 2 - 1)

    x = dtorch.rand(4, 4, device_mesh=mesh)
    step(x)
    plain = step(x).to_torch()
    before = dtorch.counters()
    with dtorch.profile() as profile:
        profiled = step(x).to_torch()
    assert torch.equal(profiled, plain)
    assert dtorch.counters().replays == before.replays + 1
    assert dtorch.counters().recordings == before.recordings
    lane = [span for span in profile.spans if span.lane == "device 0"]
    (call,) = [span for span in lane if span.category == "captured call"]
    assert call.name.endswith("step")
    ops = [span for span in lane if span.category == "op"]
    # As the passes have left them: what dies is written over.
    assert [op.name for op in ops] == ["aten::mul.Tensor", "aten::sub_.Tensor", "aten::relu_.default"]
    assert all(call.start_ns <= op.start_ns <= op.end_ns <= call.end_ns for op in ops)
    assert all("torch.relu(x * 2 - 1)" in op.args["line"] for op in ops)
    assert any(span.name.startswith("replay of") for span in profile.spans if span.process == "client")
    assert torch.equal(step(x).to_torch(), plain), "afterwards as before"


def test_ops_that_passes_made_have_their_names(mesh: dtorch.DeviceMesh) -> None:
    @dtorch.capture
    def turn(x: Any) -> Any:
        return x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)])

    x = dtorch.rand(4, 8, device_mesh=mesh, placements=[Shard(0)])
    turn(x)
    with dtorch.profile() as profile:
        assert torch.equal(turn(x).to_torch(), x.to_torch())
    (op,) = [span for span in profile.spans if span.lane == "device 1" and span.category == "op"]
    assert (op.name, op.args["from"], op.args["to"]) == ("dtorch::redistribute", "[S(0)]", "[S(1)]")
    assert op.num_bytes == 2 * 4 * 4, "half of what gathering the whole would take"


def test_an_op_that_fails_is_marked_and_its_error_is_the_same(mesh: dtorch.DeviceMesh) -> None:
    x, index = dtorch.ones(3, device_mesh=mesh), dtorch.full((1,), 99, device_mesh=mesh, dtype=torch.int64)
    with dtorch.profile() as profile:
        bad = x.index_select(0, index)
        with pytest.raises(dtorch.RemoteOpError, match="index_select"):
            bad.to_torch()
    (op,) = [span for span in profile.spans if span.lane == "device 0" and "index_select" in span.name]
    assert op.args["failed"]


def test_an_error_in_the_scope_is_the_users_and_the_trace_is_written(
    mesh: dtorch.DeviceMesh, tmp_path: Path
) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    with pytest.raises(ZeroDivisionError), dtorch.profile(tmp_path / "t.json"):  # noqa: PT012
        x = x + 1
        raise ZeroDivisionError
    assert "aten::add.Tensor" in (tmp_path / "t.json").read_text()
    with dtorch.profile() as profile:  # the one before has ended
        x = x + 1
    assert [span.name for span in profile.spans if span.lane == "device 0" and span.category == "op"] == [
        "aten::add.Tensor"
    ]


def test_the_oldest_are_dropped_and_it_says_so(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh)
    with dtorch.profile(max_spans=10) as profile:
        for _ in range(50):
            x = x + 1
        x.to_torch()
    assert len([span for span in profile.spans if span.lane == "device 0"]) == 10
    assert any("device 0: the oldest" in note for note in profile.notes)
    assert "were dropped" in str(profile)


def test_threads_and_tasks_have_lanes_of_their_own(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(3, device_mesh=mesh)

    def work() -> None:
        (x + 1).to_torch()

    async def both() -> None:
        await asyncio.gather((x + 2).value(), (x + 3).value())

    with dtorch.profile() as profile:
        thread = threading.Thread(target=work, name="helper")
        thread.start()
        thread.join()
        asyncio.run(both())
    check_lanes(profile.trace())
    assert "helper" in {span.lane for span in profile.spans if span.process == "client"}
    assert len([span for span in profile.spans if span.category == "fetch"]) == 3


def test_what_profile_refuses(mesh: dtorch.DeviceMesh, tmp_path: Path) -> None:
    with pytest.raises(dtorch.SettingError, match="folder that exists"):
        dtorch.profile(tmp_path / "nowhere" / "trace.json")
    with pytest.raises(dtorch.SettingError, match="path of a file"):
        dtorch.profile(3)
    with pytest.raises(dtorch.SettingError, match="max_spans takes"):
        dtorch.profile(max_spans=0)
    with dtorch.profile() as profile, pytest.raises(dtorch.SettingError, match="runs already"):
        dtorch.profile().__enter__()
    with pytest.raises(dtorch.SettingError, match="used already"):
        profile.__enter__()


def test_counters_count(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.rand(16, 16, device_mesh=mesh, placements=[Shard(0)])
    x.to_torch()
    before = dtorch.counters()
    for _ in range(7):
        y = x * 1.25
    y.to_torch()
    after = dtorch.counters()
    assert after.ops == before.ops + 7
    assert after.misses == before.misses + 1
    assert after.fetches == before.fetches + 1
    assert after.batches > before.batches
    up, down = ("client", "controller"), ("controller", "client")
    assert after.link_bytes[up] > before.link_bytes[up]
    assert after.link_bytes[down] >= before.link_bytes[down] + 16 * 16 * 4
    assert "controller -> client" in str(after)
    threads = after.threads["node0"]
    assert threads.num_workers >= 2
    assert (threads.num_threads, threads.is_fixed) == (1, True), "the setting of the tests' cluster"
    assert f"1 intra-op threads for each of {threads.num_workers} workers, by DTORCH_NUM_THREADS" in str(
        after
    )


def test_ops_that_were_not_sent_yet_count(mesh: dtorch.DeviceMesh) -> None:
    graph = dtorch.Graph.default_graph()
    x = dtorch.ones(3, device_mesh=mesh)
    graph.sync()
    before = dtorch.counters()
    with graph.lock:  # whose thread issues right now: nobody sends
        graph.num_ops += 5
        assert dtorch.counters().ops == before.ops + 5
        graph.num_ops -= 5
    assert x.sum().item() == 3
