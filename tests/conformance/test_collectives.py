"""Every way in which devices exchange pieces, held against what layouts mean and against plain torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from dtorch_runtime.ir import transfer
from dtorch_runtime.ir.layout import Layout, local_shape
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.settings import Settings
from dtorch_runtime.wire.records import FailureRecord, ListArg, ScalarSlot, Slot
from dtorch_runtime.worker import redistribute
from dtorch_runtime.worker.collectives import threads, zeromq
from tests.support.executors import SESSION, Rig
from tests.support.layouts import Array, layout_pairs, meshes, numbers, put_together, shapes, take_apart

ALL = range(12)
#: Nodes whose devices alternate, so that every mesh of two devices spans both.
TWO_NODES = (range(0, 12, 2), range(1, 12, 2))


@dataclass(frozen=True)
class Way:
    """One way to exchange: which nodes there are, and what is made small so that few bytes take the path."""

    nodes: Sequence[Sequence[int]]
    shares_memory: bool = False
    parallel_bytes: int | None = None
    #: From this size on a gift is counted, and goes through shared memory where there is some.
    large_bytes: int | None = None
    #: Bytes that a device may run ahead of its readers.
    run_ahead_bytes: int = 1 << 26
    chunk_bytes: int = 1 << 20
    #: From this size on the communication worker does it.
    beside_bytes: int = 1 << 30


WAYS = {
    "threads, the last one builds": Way((ALL,), parallel_bytes=1 << 40),
    "threads, all build": Way((ALL,), parallel_bytes=0, large_bytes=0, run_ahead_bytes=1),
    "threads, beside ops": Way((ALL,), run_ahead_bytes=1, large_bytes=0, beside_bytes=1),
    "sockets between nodes": Way(TWO_NODES),
    "sockets, many chunks": Way(
        TWO_NODES, chunk_bytes=24, parallel_bytes=0, large_bytes=0, run_ahead_bytes=1
    ),
    "segments between nodes": Way(TWO_NODES, shares_memory=True, large_bytes=0, beside_bytes=1),
    "mailboxes between nodes": Way(TWO_NODES, shares_memory=True),
    "mailboxes, beside ops": Way(TWO_NODES, shares_memory=True, beside_bytes=1),
}


@pytest.fixture(params=[*WAYS.values()], ids=[*WAYS])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    way: Way = request.param
    if way.parallel_bytes is not None:
        monkeypatch.setattr(redistribute, "PARALLEL_BYTES", way.parallel_bytes)
    if way.large_bytes is not None:
        monkeypatch.setattr(zeromq, "MIN_BYTES", way.large_bytes)
        monkeypatch.setattr(threads, "MIN_BYTES", way.large_bytes)
    options = Settings(
        collective_timeout_s=10.0,
        num_threads=1,
        chunk_bytes=way.chunk_bytes,
        max_outstanding_bytes=way.run_ahead_bytes,
        beside_bytes=way.beside_bytes,
    )
    with Rig(way.nodes, shares_memory=way.shares_memory, settings=options) as started:
        yield started


def layout(mesh: DeviceMesh, *placements: object) -> Layout:
    return Layout(mesh, placements)


def torch_pieces(
    value: Array, source: Layout, dtype: torch.dtype, rng: random.Random
) -> dict[int, torch.Tensor]:
    pieces = take_apart(value.astype(bool) if dtype is torch.bool else value, source, rng)
    return {device: torch.from_numpy(piece).to(dtype) for device, piece in pieces.items()}


def check(
    rig: Rig, value: Array, source: Layout, target: Layout, dtype: torch.dtype, rng: random.Random
) -> None:
    """Redistribute, and compare with the value that the pieces stand for."""
    put = rig.put(torch_pieces(value, source, dtype, rng))
    out = rig.op(rig.transfer(value.shape, dtype, source, target), put)
    check_value(rig.get(out, target.mesh.devices), value, target, dtype)
    assert not rig.failures


def check_value(pieces: Mapping[int, torch.Tensor], value: Array, target: Layout, dtype: torch.dtype) -> None:
    for device, piece in pieces.items():
        assert tuple(piece.shape) == local_shape(value.shape, target, device)
        assert piece.dtype == dtype
    plain = np.bool_ if dtype is torch.bool else np.float64 if dtype.is_floating_point else np.int64
    exact = torch.float64 if dtype.is_floating_point else dtype
    if dtype.is_complex:
        assert all(torch.equal(piece.imag, torch.zeros_like(piece.imag)) for piece in pieces.values())
        pieces = {device: piece.real for device, piece in pieces.items()}
        exact = torch.float64
    arrays = {device: piece.to(exact).numpy().astype(plain) for device, piece in pieces.items()}
    expected = value.astype(bool) if dtype is torch.bool else value
    np.testing.assert_array_equal(put_together(arrays, target), expected)


LINE = DeviceMesh("cpu", [3, 0, 1])
GRID = DeviceMesh("cpu", [[4, 1, 2], [0, 5, 3]])
OTHER_GRID = DeviceMesh("cpu", [[2, 4], [3, 9]])
APART = DeviceMesh("cpu", [10, 11])
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()

CASES = {
    "all-gather, uneven": ((7, 3), layout(LINE, S0), layout(LINE, R)),
    "all-gather of an inner dim": ((2, 5), layout(LINE, S1), layout(LINE, R)),
    "more ranks than rows": ((2, 3), layout(LINE, S0), layout(LINE, R)),
    "no rows at all": ((0, 3), layout(LINE, S0), layout(LINE, S1)),
    "0-dim all-reduce": ((), layout(LINE, P), layout(LINE, R)),
    "0-dim broadcast to another mesh": ((), layout(LINE, R), layout(APART, R)),
    "all-to-all": ((5, 4), layout(LINE, S0), layout(LINE, S1)),
    "other unit": ((8, 2), layout(LINE, S0), layout(LINE, Shard(0, unit=3))),
    "cut": ((5, 4), layout(LINE, R), layout(LINE, S0)),
    "spread into terms": ((5, 4), layout(LINE, R), layout(LINE, P)),
    "reduce-scatter": ((5, 4), layout(LINE, P), layout(LINE, S0)),
    "reduce-scatter of an inner dim": ((2, 9), layout(LINE, P), layout(LINE, S1)),
    "sum": ((5, 4), layout(LINE, P), layout(LINE, R)),
    "average": ((5, 4), layout(LINE, Partial("avg")), layout(LINE, R)),
    "maximum": ((5, 4), layout(LINE, Partial("max")), layout(LINE, R)),
    "minimum": ((5, 4), layout(LINE, Partial("min")), layout(LINE, S1)),
    "product": ((5, 4), layout(LINE, Partial("prod")), layout(LINE, R)),
    "grid: both dims": ((5, 4), layout(GRID, S0, S1), layout(GRID, R, R)),
    "grid: one dim cut twice": ((11, 2), layout(GRID, S0, S0), layout(GRID, R, S0)),
    "grid: sum along one axis": ((4, 4), layout(GRID, R, P), layout(GRID, R, R)),
    "grid: sums along both": ((4, 4), layout(GRID, P, P), layout(GRID, S0, R)),
    "grid: maximum of sums": ((4, 4), layout(GRID, Partial("max"), P), layout(GRID, R, S0)),
    "grid: one sum stays": ((4, 4), layout(GRID, P, P), layout(GRID, P, R)),
    "grid: axes change places": ((6, 4), layout(GRID, S0, S1), layout(GRID, S1, S0)),
    "to an overlapping mesh": ((7, 4), layout(GRID, S0, S1), layout(OTHER_GRID, S1, S0)),
    "to a mesh apart": ((7, 4), layout(GRID, S0, S1), layout(APART, S0)),
    "sum to a mesh apart": ((7, 4), layout(LINE, P), layout(APART, R)),
    "shards become terms": ((5, 4), layout(LINE, S0), layout(LINE, P)),
    "shards become terms of a maximum": ((5, 4), layout(LINE, S1), layout(LINE, Partial("max"))),
    "terms of a sum become terms of a maximum": ((5, 4), layout(LINE, P), layout(LINE, Partial("max"))),
    "grid: terms change places": ((6, 4), layout(GRID, P, S0), layout(GRID, S0, P)),
    "terms to a mesh apart": ((7, 4), layout(LINE, P), layout(APART, P)),
    "a piece that one has and all want": ((1, 6), layout(LINE, S0), layout(LINE, R)),
    "one device to many": ((7, 4), layout(DeviceMesh("cpu", [8]), R), layout(GRID, S0, S1)),
    "many devices to one": ((7, 4), layout(GRID, S0, S1), layout(DeviceMesh("cpu", [8]), R)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_pair_of_layouts_gives_the_same_tensor(rig, case, rng):
    shape, source, target = case
    check(rig, numbers(shape, rng), source, target, torch.float32, rng)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
    ],
)
def test_every_dtype(rig, dtype, rng):
    value = abs(numbers((5, 3), rng))
    check(rig, value, layout(LINE, S0), layout(LINE, R), dtype, rng)
    check(rig, value, layout(LINE, P), layout(LINE, S1), dtype, rng)
    check(rig, value, layout(LINE, S1), layout(LINE, P), dtype, rng)
    if not dtype.is_complex:
        check(rig, value, layout(LINE, Partial("min")), layout(LINE, R), dtype, rng)
        check(rig, value, layout(LINE, S0), layout(LINE, Partial("max")), dtype, rng)
        check(rig, value, layout(LINE, S0), layout(LINE, Partial("min")), dtype, rng)


def test_in_as_many_steps_as_save_bytes(rig, rng, monkeypatch):
    monkeypatch.setattr(transfer, "STEP_COST_BYTES", 0)
    for shape, source, target in CASES.values():
        check(rig, numbers(shape, rng), source, target, torch.float32, rng)


def test_sources_with_any_strides(rig, rng):
    value = numbers((5, 4), rng)
    transposed = rig.template("aten::t", Slot(0), inputs=1, meshes=[LINE])
    source, target = layout(LINE, S0), layout(LINE, R)
    flipped = {device: piece.t() for device, piece in torch_pieces(value, source, torch.float32, rng).items()}
    view = rig.op(transposed, rig.put(flipped))
    out = rig.op(rig.transfer(value.shape, torch.float32, source, target), view)
    check_value(rig.get(out, LINE.devices), value, target, torch.float32)


@pytest.mark.parametrize(
    ("source", "target"),
    [(R, R), (R, S0), (S0, R), (P, R), (P, S0), (S0, S1), (R, P)],
    ids=lambda placement: str(placement),
)
def test_a_result_shares_no_memory_with_its_source(rig, source, target, rng):
    """A write to the source behind the transfer, and one to the result, do not change the other."""
    value = numbers((6, 4), rng)
    put = rig.put(torch_pieces(value, layout(LINE, source), torch.float32, rng))
    before = rig.get(put, LINE.devices)
    out = rig.op(rig.transfer(value.shape, torch.float32, layout(LINE, source), layout(LINE, target)), put)
    fill = rig.template("aten::fill_.Scalar", Slot(0), 99.0, inputs=1, outputs=0, mutates=[0], meshes=[LINE])
    rig.run(fill, 0, put)
    check_value(rig.get(out, LINE.devices), value, layout(LINE, target), torch.float32)
    put_again = rig.put(before)
    again = rig.op(
        rig.transfer(value.shape, torch.float32, layout(LINE, source), layout(LINE, target)), put_again
    )
    rig.run(fill, 0, again)
    for device, piece in rig.get(put_again, LINE.devices).items():
        assert torch.equal(piece, before[device])


def test_results_of_two_devices_share_no_memory(rig, rng):
    value = numbers((6, 4), rng)
    put = rig.put(torch_pieces(value, layout(LINE, P), torch.float32, rng))
    out = rig.op(rig.transfer(value.shape, torch.float32, layout(LINE, P), layout(LINE, R)), put)
    double = rig.template("aten::mul_.Scalar", Slot(0), 2, inputs=1, outputs=0, mutates=[0], meshes=[LINE])
    rig.run(double, 0, out)
    check_value(rig.get(out, LINE.devices), value * 2, layout(LINE, R), torch.float32)


def test_replicas_are_equal_to_the_last_bit(rig):
    """0.1, 1e8 and -1e8 give another sum in another order: every rank must take the same one."""
    terms = dict(zip(LINE.devices, (0.1, 1e8, -1e8), strict=True))
    put = rig.put({device: torch.full((5,), term) for device, term in terms.items()})
    out = rig.op(rig.transfer((5,), torch.float32, layout(LINE, P), layout(LINE, R)), put)
    pieces = list(rig.get(out, LINE.devices).values())
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)


def test_many_transfers_one_behind_the_other(rig, rng):
    """A ring of shapes and layouts through which a value goes many times, all issued before the first is awaited."""
    value = numbers((6, 5), rng)
    stations = [
        layout(GRID, S0, S1),
        layout(APART, S1),
        layout(LINE, R),
        layout(GRID, P, S0),
        layout(GRID, S0, S1),
    ]
    templates = [
        rig.transfer(value.shape, torch.int64, source, target)
        for source, target in itertools.pairwise(stations)
    ]
    at = rig.put(torch_pieces(value, stations[0], torch.int64, rng))
    for _ in range(20):
        for template in templates:
            at = rig.op(template, at)
    check_value(rig.get(at, GRID.devices), value, stations[-1], torch.int64)


@pytest.mark.parametrize(
    "way",
    [Way((ALL,)), Way(TWO_NODES), Way(TWO_NODES, shares_memory=True)],
    ids=["threads", "sockets", "segments"],
)
def test_pieces_of_megabytes(way, rng):
    """Nothing is made small here: chunks, parallel building and segments are used as in earnest."""
    value = numbers((400_000, 2), rng)
    with Rig(way.nodes, shares_memory=way.shares_memory, settings=Settings(num_threads=1)) as rig:
        check(rig, value, layout(LINE, P), layout(LINE, R), torch.float32, rng)
        check(rig, value, layout(LINE, S0), layout(APART, R), torch.float32, rng)


def test_the_same_numbers_as_plain_torch(rig):
    """A matrix product cut along the inner dim, summed by a transfer."""
    left, right = torch.randn(6, 9), torch.randn(9, 4)
    cuts = [(0, 3), (3, 6), (6, 9)]
    columns = rig.put({d: left[:, a:b] for d, (a, b) in zip(LINE.devices, cuts, strict=True)})
    rows = rig.put({d: right[a:b] for d, (a, b) in zip(LINE.devices, cuts, strict=True)})
    product = rig.op(rig.template("aten::mm", Slot(0), Slot(1), inputs=2, meshes=[LINE]), columns, rows)
    out = rig.op(rig.transfer((6, 4), torch.float32, layout(LINE, P), layout(LINE, R)), product)
    for piece in rig.get(out, LINE.devices).values():
        torch.testing.assert_close(piece, left @ right)


# ------------------------------------------------------------------------------------------- failures


def failing_on(rig: Rig, mesh: DeviceMesh, bad: Sequence[int], rows: int) -> int:
    """A value of ``rows`` ones on each device of the mesh, which is missing on the bad ones: their kernel raised."""
    pieces = {device: torch.tensor([rows * 10 if device in bad else 0]) for device in mesh.devices}
    take = rig.template("aten::index_select", Slot(0), 0, Slot(1), inputs=2, meshes=[mesh])
    table = rig.put({device: torch.ones(rows) for device in mesh.devices})
    index = rig.put({device: piece.expand(rows) for device, piece in pieces.items()})
    return rig.op(take, table, index, location=7)


def test_a_failed_rank_poisons_the_result_of_all(rig):
    failed = failing_on(rig, LINE, bad=[0], rows=4)
    out = rig.op(rig.transfer((4,), torch.float32, layout(LINE, P), layout(LINE, R)), failed)
    causes = [rig.fetch(out, device) for device in LINE.devices]
    assert all(isinstance(cause, FailureRecord) for cause in causes)
    assert {(cause.failure_id, cause.device, cause.location_id, cause.op) for cause in causes} == {
        (causes[0].failure_id, 0, 7, "aten::index_select")
    }
    rig.sync()
    assert [failure.failure_id for failure in rig.failures] == [causes[0].failure_id]


def test_poison_reaches_only_those_who_need_the_value(rig):
    """On a grid, the sum along the second axis of the row without a failure is there."""
    failed = failing_on(rig, GRID, bad=[5], rows=4)
    out = rig.op(rig.transfer((4,), torch.float32, layout(GRID, R, P), layout(GRID, R, R)), failed)
    for device in (4, 1, 2):
        assert torch.equal(rig.fetch(out, device), torch.full((4,), 3.0))
    for device in (0, 5, 3):
        assert rig.fetch(out, device).device == 5


def test_poison_of_a_shard_reaches_only_its_new_holder(rig):
    source = DeviceMesh("cpu", [0, 1])
    failed = failing_on(rig, source, bad=[1], rows=2)
    out = rig.op(rig.transfer((4,), torch.float32, layout(source, S0), layout(APART, S0)), failed)
    assert torch.equal(rig.fetch(out, 10), torch.ones(2))
    assert rig.fetch(out, 11).device == 1


def test_a_wrong_piece_is_a_failure_and_no_crash(rig):
    put = rig.put({0: torch.ones(3), 1: torch.ones(4), 3: torch.ones(3)})
    out = rig.op(rig.transfer((3,), torch.float32, layout(LINE, P), layout(LINE, R)), put)
    causes = [rig.fetch(out, device) for device in LINE.devices]
    assert {(cause.kind, cause.device) for cause in causes} == {("internal", 1)}
    assert "[4]" in causes[0].message


def test_a_missing_piece_is_a_failure(rig):
    put = rig.put({0: torch.ones(3), 1: torch.ones(3)})
    out = rig.op(rig.transfer((3,), torch.float32, layout(LINE, P), layout(LINE, R)), put)
    assert {rig.fetch(out, device).kind for device in LINE.devices} == {"internal"}


def test_an_output_that_nobody_wants_moves_nothing(rig):
    put = rig.put({device: torch.ones(3) for device in LINE.devices})
    rig.run(rig.transfer((3,), torch.float32, layout(LINE, P), layout(LINE, R)), 0, put, 0)
    rig.sync()
    assert not rig.failures


def only_one_arrives(rig: Rig) -> tuple[int, int]:
    """A transfer that device 0 waits in and device 1 never comes to; its output and device 0's node."""
    mesh = DeviceMesh("cpu", [0, 1])
    put = rig.put({0: torch.ones(3), 1: torch.ones(3)})
    template = rig.transfer((3,), torch.float32, layout(mesh, P), layout(mesh, R))
    rig.mesh_id(mesh)
    out = rig.new_value()
    node = rig.node_of(0)
    worker, values = node.executor._sessions[SESSION].devices[0]
    worker.submit(lambda: values.run(1, [template, 0, put, out]))
    return out, 0


def test_the_end_of_the_session_ends_a_wait(rig):
    only_one_arrives(rig)
    for node in rig.nodes:
        node.executor.end_session(SESSION)
        node.executor.close(5.0)  # raises when a worker does not stop in half the time of a collective


@pytest.mark.parametrize(
    "way",
    [Way((ALL,)), Way(TWO_NODES), Way(TWO_NODES, shares_memory=True)],
    ids=["threads", "sockets", "mailboxes"],
)
def test_a_wait_has_a_deadline_and_a_name(way):
    options = Settings(collective_timeout_s=0.05, num_threads=1)
    with Rig(way.nodes, shares_memory=way.shares_memory, settings=options) as started:
        out, device = only_one_arrives(started)
        cause = started.fetch(out, device)
        assert cause.error_type == "ClusterTimeout"
        assert "device 1 in step 0 of redistribute [3] from [P] to [R]" in cause.message


@pytest.mark.parametrize("shares_memory", [False, True], ids=["sockets", "mailboxes"])
def test_what_waits_for_a_lost_node_fails(shares_memory):
    with Rig(TWO_NODES, shares_memory=shares_memory) as rig:
        out, device = only_one_arrives(rig)
        node = rig.nodes[0]
        node.executor.node_lost("n1", list(rig.nodes[1].devices), "it was switched off")
        cause = rig.fetch(out, device)
        assert (cause.kind, cause.node, cause.message) == ("node", "n1", "it was switched off")
        later, device = only_one_arrives(rig)
        assert rig.fetch(later, device).kind == "node"


# ----------------------------------------------------------------------------------------------- any pair


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=shapes(), rng=st.randoms(use_true_random=False))
def test_any_layouts(rig, data, shape, rng):
    source, target = data.draw(layout_pairs(len(shape)))
    check(rig, numbers(shape, rng), source, target, torch.float64, rng)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mesh=meshes(), rng=st.randoms(use_true_random=False))
def test_scalars_of_the_record(rig, mesh, rng):
    """Sizes that stand in the op record, not in the template, reach the kernel on every device."""
    rows = rng.randrange(5)
    make = rig.template("aten::ones", ListArg([ScalarSlot(0), 2]), inputs=0, scalars=1, meshes=[mesh])
    out = rig.op(make, scalars=[rows])
    assert all(piece.shape == (rows, 2) for piece in rig.get(out, mesh.devices).values())
