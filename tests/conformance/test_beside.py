"""Redistributions beside ops, on real executors: what goes on while one cannot end, and what waits for it.

A device is stopped by an op that waits for a gate, in the middle of the program, so that its peers' transfers cannot
end. What they do meanwhile is beside them. Nothing is timed. The race detector looks on.
"""

from __future__ import annotations

import itertools
import random
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.node.executor import Replied, ValueReady
from dtorch_runtime.settings import Settings
from dtorch_runtime.tape import BATCH, SPAN_WORDS, WAIT
from dtorch_runtime.wire.records import (
    AskMemory,
    FailureRecord,
    LaneRecord,
    ListArg,
    MeshRecord,
    Slot,
    StartTrace,
    StopTrace,
    TemplateRecord,
    TraceReply,
)
from dtorch_runtime.worker import kernels, redistribute
from tests.support.executors import SESSION, Rig

_WAIT_S = 20.0
BOTH, LAST = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])
SHARDED, WHOLE = Layout(BOTH, (Shard(0),)), Layout(BOTH, (Replicate(),))
TERMS = Layout(BOTH, (Partial(),))
ROWS = torch.arange(8.0).reshape(4, 2)


@pytest.fixture(autouse=True)
def small_ones_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes go beside also inside an agent."""
    monkeypatch.setattr(redistribute, "INSIDE_FACTOR", 8)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed; the op ``dtorch::test_gate`` waits for it."""
    opened = threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        assert opened.wait(_WAIT_S)
        return x.clone()

    kernels.find_kernel.cache_clear()
    monkeypatch.setitem(kernels._own, "dtorch::test_gate", kernels.Kernel(wait))
    yield opened
    opened.set()
    kernels.find_kernel.cache_clear()


@pytest.fixture(params=[[[0], [1]], [[0, 1]]], ids=["two nodes", "one node"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, check=True)
    with Rig(request.param, settings=settings) as started:
        yield started


def put_rows(rig: Rig) -> int:
    return rig.put({0: ROWS[:2], 1: ROWS[2:]})


def close_the_gate(rig: Rig) -> None:
    """Device 1 does nothing of what follows."""
    value = rig.put({1: torch.ones(1)})
    rig.op(rig.template("dtorch::test_gate", Slot(0), inputs=1, meshes=[LAST]), value)


def both(rig: Rig, op: str, *args: object, mutates: tuple[int, ...] = (), outputs: int = 1) -> int:
    inputs = sum(isinstance(arg, Slot) for arg in args)
    return rig.template(op, *args, inputs=inputs, outputs=outputs, meshes=[BOTH], mutates=mutates)


def gather(rig: Rig) -> int:
    return rig.transfer((4, 2), torch.float32, SHARDED, WHOLE)


def test_independent_ops_go_on_while_a_transfer_cannot_end(rig, gate):
    rows, move, neg, add = (
        put_rows(rig),
        gather(rig),
        both(rig, "aten::neg", Slot(0)),
        both(rig, "aten::add.Tensor", Slot(0), Slot(1)),
    )
    close_the_gate(rig)
    whole = rig.op(move, rows)
    other = rig.op(neg, rows)
    for _ in range(3):
        other = rig.op(neg, other)
    assert torch.equal(rig.get(other, [0])[0], ROWS[:2]), "computed beside the transfer"
    total = rig.op(add, whole, whole)
    after = rig.op(neg, total)
    gate.set()
    assert all(torch.equal(piece, -2 * ROWS) for piece in rig.get(after, [0, 1]).values())
    assert not rig.failures


def test_what_the_next_op_reads_is_not_made_beside(rig, gate):
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))
    whole, result = rig.new_value(), rig.new_value()
    rig.run(move, 0, rows, whole, neg, 0, whole, result)
    assert all(torch.equal(piece, -ROWS) for piece in rig.get(result, [0, 1]).values())
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.endswith("communication") for name in names)
    rig.op(move, rows)
    rig.sync()
    assert any(thread.name.endswith("communication") for thread in threading.enumerate())


def test_messages_complete_when_their_transfers_have_ended(rig, gate):
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))
    rig.sync()
    close_the_gate(rig)
    rig.op(move, rows)
    last = rig.run()
    assert torch.equal(rig.get(rig.op(neg, rows), [0])[0], -ROWS[:2])
    assert last not in rig.node_of(0).completed
    gate.set()
    rig.sync()
    assert [*rig.node_of(0).completed] == sorted(rig.node_of(0).completed)


def test_what_a_transfer_reads_is_not_written_to_before(rig, gate):
    """Device 0 gives its memory itself, because it receives too; it must keep it until device 1 has read."""
    rows, move = put_rows(rig), gather(rig)
    fill = both(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    close_the_gate(rig)
    whole = rig.op(move, rows)
    rig.run(fill, 0, rows)
    gate.set()
    assert all(torch.equal(piece, ROWS) for piece in rig.get(whole, [0, 1]).values())
    assert all(torch.equal(piece, torch.full((2, 2), -1.0)) for piece in rig.get(rows, [0, 1]).values())


def test_a_write_to_a_result_waits_for_it(rig, gate):
    rows, move = put_rows(rig), gather(rig)
    add = both(rig, "aten::add_.Tensor", Slot(0), Slot(1), mutates=(0,), outputs=0)
    close_the_gate(rig)
    first, second = rig.op(move, rows), rig.op(move, rows)
    rig.run(add, 0, first, second)
    rig.run(add, 0, first, second)
    gate.set()
    assert all(torch.equal(piece, 3 * ROWS) for piece in rig.get(first, [0, 1]).values())


def test_chains_run_in_order_and_freed_values_still_arrive(rig, gate):
    rows, move, back = put_rows(rig), gather(rig), rig.transfer((4, 2), torch.float32, WHOLE, SHARDED)
    close_the_gate(rig)
    whole = rig.op(move, rows)
    shards = rig.op(back, whole)
    again = rig.op(move, shards)
    rig.run(0, 3, rows, whole, shards)
    gate.set()
    assert all(torch.equal(piece, ROWS) for piece in rig.get(again, [0, 1]).values())


def test_poison_takes_part_and_arrives(rig, gate):
    rows, move = put_rows(rig), gather(rig)
    bad = rig.template("aten::unsqueeze", Slot(0), 99, inputs=1, meshes=[BOTH])
    neg = both(rig, "aten::neg", Slot(0))
    close_the_gate(rig)
    whole = rig.op(move, rig.op(bad, rows, location=7))
    result = rig.op(neg, whole)
    gate.set()
    for device in (0, 1):
        failure = rig.fetch(result, device)
        assert isinstance(failure, FailureRecord)
        assert (failure.op, failure.location_id) == ("aten::unsqueeze", 7)
    rig.sync()
    assert {failure.op for failure in rig.failures} == {"aten::unsqueeze"}


def test_a_failure_of_a_transfer_is_reported_before_its_message_completes(rig, gate):
    move = gather(rig)
    wrong = rig.put({0: torch.ones(3), 1: torch.ones(3)})
    out = rig.op(move, wrong, location=8)
    rig.sync()
    assert {(failure.op, failure.location_id) for failure in rig.failures} == {("dtorch::redistribute", 8)}
    assert isinstance(rig.fetch(out, 0), FailureRecord)


@pytest.mark.parametrize("is_captured", [False, True])
def test_an_ended_session_ends_transfers_and_their_waits(rig, gate, is_captured):
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))
    close_the_gate(rig)
    if is_captured:
        words = [move, 0, rows, 1001, neg, 0, rows, 1002, neg, 0, 1001, 1003]
        rig.call(rig.captured(words, [rows], [1002, 1003], [BOTH]), [rows], 2)
    else:
        rig.op(neg, rig.op(move, rows))
    for node in rig.nodes:
        node.executor.end_session(SESSION)
        node.executor.open_session(SESSION)
    gate.set()
    rig._mesh_ids.clear()
    rows, move = put_rows(rig), gather(rig)
    assert all(torch.equal(piece, ROWS) for piece in rig.get(rig.op(move, rows), [0, 1]).values())


def test_another_session_is_not_held_up(rig, gate):
    rows, move = put_rows(rig), gather(rig)
    close_the_gate(rig)
    whole = rig.op(move, rows)
    node = rig.node_of(0)
    node.executor.open_session(2)
    node.executor.define_mesh(2, MeshRecord(1, "cpu", [1], [0]))
    ones = TemplateRecord(1, "aten::ones", [ListArg([2])], {}, 0, 1, 0, [1])
    node.executor.define_templates(2, [ones])
    node.executor.run(2, 1000, [1, 0, 50])
    node.executor.fetch(2, 88, 50, 0)
    while (88, 0) not in node.values or 1000 not in node.completed:
        node.pump()
    assert isinstance(node.values[88, 0], ValueReady)
    gate.set()
    assert all(torch.equal(piece, ROWS) for piece in rig.get(whole, [0, 1]).values())


def test_a_fetch_of_what_is_pending_waits_for_it(rig, gate):
    rows, move = put_rows(rig), gather(rig)
    rig.sync()
    close_the_gate(rig)
    whole = rig.op(move, rows)
    node = rig.node_of(0)
    node.executor.fetch(SESSION, 77, whole, 0)
    gate.set()
    while (77, 0) not in node.values:
        node.pump()
    assert isinstance(node.values[77, 0], ValueReady)


def test_a_profile_has_a_lane_for_transfers(rig, gate):
    rows, move, neg = put_rows(rig), gather(rig), both(rig, "aten::neg", Slot(0))
    rig.get(rig.op(neg, rows), [0])  # what was uploaded has come
    close_the_gate(rig)
    node = rig.node_of(0)
    node.executor.ask(SESSION, 1, StartTrace(100))
    whole = rig.op(move, rows, location=3)
    rig.op(neg, rows, location=4)
    rig.op(neg, whole, location=5)
    gate.set()
    node.executor.ask(SESSION, 2, StopTrace())
    replies = [node.events.get(timeout=_WAIT_S)]
    while not (isinstance(replies[-1], Replied) and replies[-1].request_id == 2):
        replies.append(node.events.get(timeout=_WAIT_S))
    reply = replies[-1].reply
    assert isinstance(reply, TraceReply)
    compute, beside = (lane for lane in reply.lanes if lane.device == 0)
    assert (compute.kind, beside.kind) == ("worker", "communication")
    ops = [span[:2] for span in spans(compute) if span[0] != BATCH]
    assert ops == [[neg, 4], [WAIT, 5], [neg, 5]], "what is noted there is not noted here"
    assert [span[:2] for span in spans(beside)] == [[move, 3]]
    assert spans(beside)[0][3] <= next(span[3] for span in spans(compute) if span[0] == WAIT)


def test_independent_ops_of_a_captured_call_go_on(gate, monkeypatch):
    seen = threading.Event()

    def mark_seen(x: torch.Tensor) -> torch.Tensor:
        seen.set()
        return x.clone()

    monkeypatch.setitem(kernels._own, "dtorch::test_seen", kernels.Kernel(mark_seen))
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, check=True)
    with Rig([[0], [1]], settings=settings) as rig:
        rows, move, add = put_rows(rig), gather(rig), both(rig, "aten::add.Tensor", Slot(0), Slot(1))
        mark = both(rig, "dtorch::test_seen", Slot(0))
        whole, marked, total = 1001, 1002, 1003
        words = [move, 0, rows, whole, mark, 0, rows, marked, add, 0, whole, whole, total]
        captured = rig.captured(words, [rows], [total, marked], [BOTH])
        close_the_gate(rig)
        outputs = rig.call(captured, [rows], 2)
        assert seen.wait(_WAIT_S), "computed beside the transfer"
        assert not any(node.completed and max(node.completed) == rig._seq for node in rig.nodes)
        gate.set()
        assert all(torch.equal(piece, 2 * ROWS) for piece in rig.get(outputs[0], [0, 1]).values())
        assert torch.equal(rig.get(outputs[1], [0])[0], ROWS[:2])
        rig.sync()
        assert not rig.failures


@pytest.fixture
def apart(gate) -> Iterator[Rig]:
    """Two nodes, whose devices run captured calls each by itself."""
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, check=True)
    with Rig([[0], [1]], settings=settings) as rig:
        yield rig


def test_a_result_of_a_captured_call_may_be_under_way_when_it_ends(apart, gate):
    rig = apart
    columns = Layout(BOTH, (Shard(1),))
    rows, neg = put_rows(rig), both(rig, "aten::neg", Slot(0))
    move, back = (
        rig.transfer((4, 2), torch.float32, source, target)
        for source, target in itertools.pairwise((SHARDED, columns, SHARDED))
    )
    words = [move, 0, rows, 1001, neg, 0, rows, 1003, back, 0, 1001, 1002, neg, 0, 1003, 1004]
    captured = rig.captured(words, [rows], [1001, 1002, 1003], [BOTH])
    close_the_gate(rig)
    _, again, other = rig.call(captured, [rows], 3)
    assert torch.equal(rig.get(other, [0])[0], -ROWS[:2]), "the call has ended"
    result = rig.op(neg, again)
    gate.set()
    pieces = rig.get(result, [0, 1])
    assert torch.equal(torch.cat([pieces[0], pieces[1]]), -ROWS)


def test_a_write_in_a_captured_call_waits_for_what_is_read(apart, gate):
    rig = apart
    rows, move, add = put_rows(rig), gather(rig), both(rig, "aten::add.Tensor", Slot(0), Slot(1))
    view = both(rig, "aten::select.int", Slot(0), 0, 0)
    fill = both(rig, "aten::fill_.Scalar", Slot(0), -1.0, mutates=(0,), outputs=0)
    words = [move, 0, rows, 1001, view, 0, rows, 1002, fill, 0, 1002, add, 0, 1001, 1001, 1003]
    captured = rig.captured(words, [rows], [1003], [BOTH])
    close_the_gate(rig)
    (total,) = rig.call(captured, [rows], 1)
    gate.set()
    assert all(torch.equal(piece, 2 * ROWS) for piece in rig.get(total, [0, 1]).values())
    assert rig.get(rows, [1])[1].tolist() == [[-1.0, -1.0], ROWS[3].tolist()]
    assert not rig.failures


def test_a_captured_call_that_fails_while_a_transfer_is_under_way_goes_on(apart, gate):
    rig = apart
    rows, move, add = put_rows(rig), gather(rig), both(rig, "aten::add.Tensor", Slot(0), Slot(1))
    bad = rig.template("aten::unsqueeze", Slot(0), 99, inputs=1, meshes=[BOTH])
    words = [move, 0, rows, 1001, move, 0, rows, 1002, bad, 7, rows, 1003, add, 0, 1001, 1001, 1004]
    captured = rig.captured(words, [rows], [1002, 1003, 1004], [BOTH])
    close_the_gate(rig)
    whole, failed, total = rig.call(captured, [rows], 3)
    gate.set()
    assert all(torch.equal(piece, 2 * ROWS) for piece in rig.get(total, [0, 1]).values())
    assert all(torch.equal(piece, ROWS) for piece in rig.get(whole, [0, 1]).values())
    failure = rig.fetch(failed, 0)
    assert isinstance(failure, FailureRecord)
    assert (failure.op, failure.location_id) == ("aten::unsqueeze", 7)


def spans(lane: LaneRecord) -> list[list[int]]:
    words = array("q")
    words.frombytes(lane.spans)
    return [list(words[i : i + SPAN_WORDS]) for i in range(0, len(words), SPAN_WORDS)]


def test_memory_counts_results_from_the_start_and_limits_hold(gate):
    settings = Settings(collective_timeout_s=10.0, num_threads=1, beside_bytes=1, device_memory_bytes=100)
    with Rig([[0], [1]], settings=settings) as rig:
        rows, move = put_rows(rig), gather(rig)
        close_the_gate(rig)
        kept = [rig.op(move, rows), rig.op(move, rows), rig.op(move, rows, location=9)]
        node = rig.node_of(0)
        node.executor.ask(SESSION, 1, AskMemory(5, "keep"))
        events = [node.events.get(timeout=_WAIT_S)]
        while not isinstance(events[-1], Replied):
            events.append(node.events.get(timeout=_WAIT_S))
        (record,) = events[-1].reply.devices
        assert (record.current_bytes, record.largest[0].op) == (16 + 2 * 32, "dtorch::redistribute")
        gate.set()
        assert all(torch.equal(piece, ROWS) for piece in rig.get(kept[1], [0, 1]).values())
        failure = rig.fetch(kept[2], 0)
        assert isinstance(failure, FailureRecord)
        assert (failure.error_type, failure.location_id) == ("OutOfMemoryError", 9)


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1]]], ids=["two nodes", "one node"])
@pytest.mark.parametrize("beside_bytes", [1, 24])
@pytest.mark.parametrize("check", [False, True])
def test_random_programs_mix_both_ways(nodes, beside_bytes, check, rng):
    """Some transfers beside, some at once, writes in between, little room ahead of readers: values as in one thread."""
    settings = Settings(
        collective_timeout_s=10.0,
        num_threads=1,
        beside_bytes=beside_bytes,
        max_outstanding_bytes=1,
        check=check,
    )
    with Rig(nodes, settings=settings) as rig:
        for _ in range(3):
            run_random_program(rig, rng)
        rig.sync()
        assert not rig.failures


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1]]], ids=["two nodes", "one node"])
@pytest.mark.parametrize("device_memory_bytes", [0, 1 << 30])
def test_random_captured_programs_mix_both_ways(nodes, device_memory_bytes, rng):
    settings = Settings(
        collective_timeout_s=10.0,
        num_threads=1,
        beside_bytes=1,
        max_outstanding_bytes=1,
        device_memory_bytes=device_memory_bytes,
        check=True,
    )
    with Rig(nodes, settings=settings) as rig:
        for _ in range(3):
            run_random_program(rig, rng, is_captured=True)
        rig.sync()
        assert not rig.failures


def run_random_program(rig: Rig, rng: random.Random, *, is_captured: bool = False) -> None:
    shape = (rng.choice((2, 4, 6)), rng.choice((1, 5)))
    layouts = [SHARDED, WHOLE, TERMS]
    moves: dict[tuple[int, int], int] = {}
    neg, add = (
        both(rig, "aten::neg", Slot(0)),
        both(rig, "aten::add_.Tensor", Slot(0), Slot(1), mutates=(0,), outputs=0),
    )
    #: By layout: value ids, and what each device holds.
    held: list[list[tuple[int, list[torch.Tensor]]]] = [[], [], []]
    start = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    pieces = [start[: shape[0] // 2].clone(), start[shape[0] // 2 :].clone()]
    first = rig.put(dict(enumerate(pieces)))
    held[0].append((first, pieces))
    words: list[int] = []
    for _ in range(25):
        index = rng.choice([index for index, values in enumerate(held) if values])
        value, pieces = rng.choice(held[index])
        kind = rng.choice(("move", "move", "neg", "add"))
        if kind == "move":
            target = rng.randrange(3)
            if (index, target) not in moves:
                moves[index, target] = rig.transfer(shape, torch.float32, layouts[index], layouts[target])
            out = rig.new_value()
            words += [moves[index, target], 0, value, out]
            held[target].append((out, moved(pieces, index, target)))
        elif kind == "neg":
            out = rig.new_value()
            words += [neg, 0, value, out]
            held[index].append((out, [-piece for piece in pieces]))
        else:
            other, others = rng.choice(held[index])
            words += [add, 0, value, other]
            for piece, by in zip(pieces, [by.clone() for by in others], strict=True):
                piece += by
        if not is_captured and rng.random() < 0.3:
            rig.run(*words)
            words = []
    if is_captured:
        kept = [item for item in itertools.chain(*held) if item[0] != first and rng.random() < 0.5]
        captured = rig.captured(words, [first], [value for value, _ in kept], [BOTH])
        for _ in range(3):  # in one agent the first call runs op by op, and decides how the others do
            again = rig.put({0: start[: shape[0] // 2], 1: start[shape[0] // 2 :]})
            outputs = rig.call(captured, [again], len(kept))
            check(rig, [(again, held[0][0][1]), *zip(outputs, (pieces for _, pieces in kept), strict=True)])
        return
    rig.run(*words)
    check(rig, itertools.chain(*held))


def check(rig: Rig, values: Iterable[tuple[int, list[torch.Tensor]]]) -> None:
    for value, pieces in values:
        for device, piece in rig.get(value, [0, 1]).items():
            assert torch.equal(piece, pieces[device])


def moved(pieces: list[torch.Tensor], source: int, target: int) -> list[torch.Tensor]:
    """What devices hold of a value after a redistribution."""
    whole: Callable[[], torch.Tensor] = (
        lambda: torch.cat(pieces),
        lambda: pieces[0],
        lambda: pieces[0] + pieces[1],
    )[source]
    if source == target:
        return [piece.clone() for piece in pieces]
    value = whole()
    if target == 0:
        return [value[: len(value) // 2].clone(), value[len(value) // 2 :].clone()]
    if target == 1:
        return [value.clone(), value.clone()]
    if source == 1:
        return [value.clone(), torch.zeros_like(value)]
    half = len(value) // 2
    zeros = torch.zeros_like(value)
    return [torch.cat([value[:half], zeros[half:]]), torch.cat([zeros[:half], value[half:]])]
