"""When ops and dropped values leave, and what happens when too much is outstanding."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import connection
from dtorch.graph import FREE_BATCH
from dtorch_runtime.errors import ClusterTimeout, ControllerLost, SessionClosed
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.wire.messages import ClientBye, DefineMesh, DefineTemplates, Fetch, Ops, Upload
from tests.support.client import Controller, scripted_session


def test_a_batch_leaves_when_it_is_full() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=4) as controller:
        x = dtorch.ones(2)
        for _ in range(6):
            x = x + 1
        assert len(controller.messages(Ops)) == 1
        assert len(controller.ops()) == 4
        x.graph.flush()
        assert len(controller.ops()) == 7


def test_batches_are_short_after_a_wait_and_grow() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=100) as controller:
        x = dtorch.ones(2)
        for _ in range(2):
            x.value()
            sent = len(controller.messages(Ops))
            left = []
            for count in range(1, 301):
                x + 1
                if len(controller.messages(Ops)) > sent:
                    sent += 1
                    left.append(count)
            assert left == [16, 16 + 32, 16 + 32 + 64, 16 + 32 + 64 + 100]


def test_a_batch_leaves_when_somebody_waits(controller: Controller) -> None:
    x = dtorch.ones(2) + 1
    assert controller.messages(Ops) == []
    x.value()
    kinds = [type(message) for message, _ in controller.link.sent]
    assert kinds[-2:] == [Ops, Fetch]


def test_batches_are_large_when_nobody_waits_and_small_when_somebody_does() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=100) as controller:
        x = dtorch.ones(2)
        for _ in range(249):
            x = x + 1
        assert [message.num_ops for message in controller.messages(Ops)] == [16, 32, 64, 100]
        for _ in range(3):
            x.value()
            x = x + 1
        x.value()
        assert [message.num_ops for message in controller.messages(Ops)] == [16, 32, 64, 100, 38, 1, 1, 1]


def test_a_batch_leaves_when_it_is_old() -> None:
    with scripted_session(batch_age_s=0.001) as controller:
        x = dtorch.ones(2)
        wait_until(lambda: controller.messages(Ops), "the age of the batch to be noticed")
        assert x.graph.words == []


def test_the_thread_is_woken_once_for_many_ops() -> None:
    with scripted_session(batch_age_s=0.05, batch_ops=10_000) as controller:
        x = dtorch.ones(2)
        for _ in range(1000):
            x = x + 1
        assert controller.link.num_wakes <= 5
        wait_until(lambda: len(controller.ops()) == 1001, "all ops to leave")


def test_definitions_come_before_their_first_use(controller: Controller) -> None:
    x = dtorch.ones(2)
    (x + 1).value()
    (x * 2 + 1).value()
    position: dict[int, int] = {}
    for index, (message, _) in enumerate(controller.link.sent):
        if isinstance(message, DefineTemplates):
            position |= {record.template_id: index for record in message.templates}
            meshes = {number for record in message.templates for number in record.mesh_ids}
            defined = [m.mesh.mesh_id for m, _ in controller.link.sent[:index] if isinstance(m, DefineMesh)]
            assert meshes <= set(defined)
    assert sorted(position) == [1, 2, 3]
    assert len(controller.ops()) == 4, "the template of x + 1 is used twice"


def test_dropped_values_are_freed_with_the_next_batch(controller: Controller) -> None:
    x = dtorch.ones(2)
    y = x + 1
    dropped = y._handle.value_id
    same = y.detach()
    del y
    x.graph.flush()
    assert controller.freed() == set(), "another symbol holds the value"
    del same
    (x + 2).graph.flush()
    assert dropped in controller.freed()
    assert x._handle.value_id not in controller.freed()


def test_dropped_values_are_freed_in_a_long_batch(controller: Controller) -> None:
    x = dtorch.ones(2)
    for _ in range(5 * FREE_BATCH):
        x = x + 1
    x.graph.flush()
    records = controller.records()
    num_freed = 0
    longest = 0
    held: set[int] = set()
    for record in records:
        if record[0] == 0:
            num_freed += record[1]
            held -= set(record[2:])
        else:
            held.add(record[-1])
        longest = max(longest, len(held))
    assert num_freed == 5 * FREE_BATCH
    assert longest <= FREE_BATCH + 2


def test_no_record_uses_a_value_after_its_free(controller: Controller) -> None:
    x = dtorch.ones(4)
    kept: list[torch.Tensor] = []
    for index in range(200):
        y = x * 2
        if index % 7 == 0:
            kept.append(y)
        x = y + x if index % 3 else y
        if index % 50 == 0:
            kept.clear()
    x.graph.flush()
    gone: set[int] = set()
    for record in controller.records():
        if record[0] == 0:
            assert gone.isdisjoint(record[2:]), "freed twice"
            gone |= set(record[2:])
        else:
            num_inputs = controller.templates[record[0]].num_inputs
            assert gone.isdisjoint(record[2 : 2 + num_inputs])


def test_a_value_of_another_graph_is_sent_before_and_freed_after_its_use(controller: Controller) -> None:
    x = dtorch.ones(2)
    used = x._handle.value_id
    with dtorch.Graph() as other:
        one = dtorch.ones(2)
        y = one + x
        assert y.graph is other
    del x, one
    dtorch.Graph.default_graph().flush()
    records = controller.records()
    made = next(i for i, r in enumerate(records) if r[0] and r[-1] == used)
    use = next(i for i, r in enumerate(records) if used in r[2:-1] and r[0])
    free = next(i for i, r in enumerate(records) if r[0] == 0 and used in r[2:])
    assert made < use < free
    assert len({message.graph_id for message in controller.messages(Ops)}) == 2


def test_what_an_ended_thread_dropped_is_freed() -> None:
    with scripted_session(batch_age_s=0.001) as controller:
        values: list[int] = []

        def work() -> None:
            values.append(dtorch.ones(2)._handle.value_id)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        dtorch.ones(3)  # any work wakes the session's thread
        wait_until(lambda: values[0] in controller.freed(), "the value of the ended thread to be freed")


def test_what_an_idle_program_drops_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_IDLE_WAIT_S", 0.01)
    with scripted_session(batch_age_s=0.001) as controller:
        x = dtorch.ones(2)
        value = x._handle.value_id
        wait_until(lambda: controller.messages(Ops), "the op to leave")
        del x
        wait_until(lambda: value in controller.freed(), "the dropped value to be freed, though no op follows")


def test_each_thread_has_a_graph_and_any_thread_may_use_any_tensor(controller: Controller) -> None:
    shared = dtorch.ones(2)
    graphs: list[dtorch.Graph] = []

    def work() -> None:
        mine = dtorch.ones(2)
        graphs.append(mine.graph)
        for _ in range(300):
            shared + shared

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({graph.graph_id for graph in graphs} | {shared.graph.graph_id}) == 5
    shared.graph.flush()
    outputs = [record[-1] for record in controller.records() if record[0]]
    assert len(outputs) == len(set(outputs)) >= 4 * 300


def test_guards_nest_and_belong_to_their_graph(controller: Controller) -> None:
    graph = dtorch.Graph.default_graph()
    outer, inner = dtorch.DeviceMesh("cpu", [0, 1]), dtorch.DeviceMesh("cpu", [2])
    assert graph.default_mesh.devices == (0, 1, 2, 3)
    with graph.device_mesh_guard(outer):
        assert dtorch.ones(2).device_mesh == outer
        with graph.device_mesh_guard(inner):
            assert torch.ones(2, device="dtorch").device_mesh == inner
        assert torch.tensor([1], device="dtorch").device_mesh == outer
        assert dtorch.Graph().default_mesh.devices == (0, 1, 2, 3)
    with pytest.raises(dtorch.MeshError, match="takes a DeviceMesh"), graph.device_mesh_guard([0]):  # type: ignore[arg-type]
        pass


def test_a_mesh_of_devices_that_are_not_there(controller: Controller) -> None:
    with pytest.raises(dtorch.MeshError, match=r"names device 9; the cluster at .* has the devices 0 to 3"):
        dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cpu", [0, 9]))
    with pytest.raises(dtorch.MeshError, match="is a 'cpu' device"):
        dtorch.ones(2, device_mesh=dtorch.DeviceMesh("cuda", [0]))


# ---- back-pressure ----


def issue_many(count: int) -> None:
    x = dtorch.ones(2)
    for _ in range(count):
        x = x + 1


def upload(tensor: torch.Tensor) -> None:
    dtorch.from_torch(tensor)


def in_thread(function: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_issuing_waits_for_credits() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=10, max_outstanding_ops=20) as controller:
        thread, errors = in_thread(lambda: issue_many(99))
        for _ in range(20):
            if not thread.is_alive():
                break
            seen = len(controller.messages(Ops))
            assert len(controller.ops()) <= 20 + 10 * seen
            controller.credit(seen)
            wait_until(
                lambda seen=seen: len(controller.messages(Ops)) > seen or not thread.is_alive(),
                "the next batch, or the end",
            )
        thread.join(10)
        assert errors == []
        assert len(controller.ops()) == 100


def test_a_flood_of_one_graph_lets_another_through() -> None:
    limits = {"batch_ops": 10, "max_outstanding_ops": 1000, "shared_window_ops": 20}
    with scripted_session(batch_age_s=3600.0, **limits) as controller:
        flood, small = dtorch.Graph(), dtorch.Graph()

        def issue(graph: dtorch.Graph, count: int) -> None:
            with graph:
                issue_many(count)
            graph.flush()

        issue(small, 1)
        thread, errors = in_thread(lambda: issue(flood, 90))
        wait_until(lambda: len(controller.messages(Ops)) == 3, "the flood's window to be full")
        issue(small, 1)
        by_graph = [message.graph_id for message in controller.messages(Ops)]
        assert by_graph == [small.graph_id, flood.graph_id, flood.graph_id, small.graph_id]
        assert [message.num_ops for message in controller.messages(Ops)] == [2, 10, 10, 2]
        for _ in range(20):
            seen = len(controller.messages(Ops))
            controller.credit(seen)
            wait_until(
                lambda seen=seen: len(controller.messages(Ops)) > seen or not thread.is_alive(),
                "the next batch, or the end",
            )
            if not thread.is_alive():
                break
        thread.join(10)
        assert errors == []


def test_without_progress_issuing_fails_and_says_for_what_it_waited() -> None:
    limits = {"batch_ops": 10, "max_outstanding_ops": 20, "wait_timeout_s": 0.05}
    with scripted_session(batch_age_s=3600.0, **limits) as controller:
        with pytest.raises(ClusterTimeout, match=r"room for more ops.*20 ops and 0 bytes are outstanding"):
            issue_many(100)
        assert len(controller.ops()) == 20


def test_the_end_of_a_program_does_not_wait_for_room() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=10, max_outstanding_ops=10) as controller:
        thread, errors = in_thread(lambda: issue_many(14))
        thread.join(10)
        assert errors == []
        controller.session.sync_all(0.01)
        assert len(controller.ops()) == 10


def test_an_upload_is_cut_and_waits_for_room() -> None:
    limits = {"chunk_bytes": 100, "max_outstanding_bytes": 250}
    with scripted_session(batch_age_s=3600.0, **limits) as controller:
        thread, errors = in_thread(lambda: upload(torch.arange(125, dtype=torch.int64)))
        wait_until(lambda: len(controller.messages(Upload)) == 2, "what there is room for")
        controller.credit(1)
        for number in range(3, 11):
            wait_until(lambda number=number: len(controller.messages(Upload)) >= number, f"chunk {number}")
            controller.credit(number)
        thread.join(10)
        chunks = controller.messages(Upload)
        assert [chunk.offset_bytes for chunk in chunks] == list(range(0, 1000, 100))
        assert errors == []


def test_a_blocked_thread_sees_the_end_of_the_session() -> None:
    with scripted_session(batch_age_s=3600.0, batch_ops=10, max_outstanding_ops=10) as controller:
        thread, errors = in_thread(lambda: issue_many(100))
        wait_until(lambda: controller.messages(Ops), "the first batch")
        controller.session.lost("it was killed")
        thread.join(10)
        assert isinstance(errors[0], ControllerLost)


# ---- the end ----


def test_a_closed_session_refuses_everything(controller: Controller) -> None:
    x = dtorch.ones(1)
    y = x + 1
    waiting = y.value()
    controller.session.close()
    assert [type(message) for message, _ in controller.link.sent][-1] is ClientBye
    for use in (lambda: x + 1, x.to_torch, lambda: x.graph.sync(), waiting.get, lambda: x.item()):
        with pytest.raises(SessionClosed, match=r"closed by dtorch\.shutdown"):
            use()


def test_a_lost_controller_ends_every_wait(controller: Controller) -> None:
    x = dtorch.ones(2)
    waiting = x.value()
    syncing = x.graph.sync_async()
    controller.session.lost("it was killed")
    for use in (waiting.get, syncing.get, lambda: x + 1, x.to_torch):
        with pytest.raises(ControllerLost, match="it was killed"):
            use()


def test_tensors_of_two_sessions_do_not_mix(controller: Controller) -> None:
    x = dtorch.ones(2)
    with scripted_session():
        y = dtorch.ones(2)
        with pytest.raises(SessionClosed, match="tensors of two sessions"):
            y + x
