"""Two devices of one agent that run a captured call, without an agent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import Partial, Placement, Replicate, Shard
from dtorch_runtime.ir.records import layout_to_record
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import BodyRecord, FailureRecord, Slot, TemplateRecord, TransferArg
from dtorch_runtime.worker.blobs import Poison
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.threads import ThreadExchange
from dtorch_runtime.worker.redistribute import Redistributor, TransferPlanner
from dtorch_runtime.worker.session import DeviceSession, Session
from dtorch_runtime.worker.watch import StreamWatch, Watch
from tests.support.device_bench import ADD, ADD_IN_PLACE, BAD, CPU, ELSEWHERE, NEG, TEMPLATES, VIEW, template

REDUCE, SCATTER, GATHER, TO_ONE, FROM_ONE, COPY, BAD_ELSEWHERE, CAPTURED = range(20, 28)
#: Inputs 1 and 2 (values 10 and 11), outputs 3 and 4 (values 30 and 31), inner values from 5 (ids from 1000).
STREAM = [CAPTURED, 0, 10, 11, 30, 31, 1000]
BOTH, SECOND = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])

BODIES = {
    "values": [NEG, 0, 1, 5, ADD, 0, 5, 2, 3, FREE, 1, 5, NEG, 0, 3, 4],
    "a write": [ADD_IN_PLACE, 0, 1, 2, NEG, 0, 1, 3, NEG, 0, 2, 4],
    "a write to what was reduced": [REDUCE, 0, 1, 5, ADD_IN_PLACE, 0, 5, 2, NEG, 0, 5, 3, REDUCE, 0, 5, 4],
    "a copy is a copy": [COPY, 0, 1, 3, ADD_IN_PLACE, 0, 3, 2, NEG, 0, 1, 4],
    "scatter and gather": [SCATTER, 0, 1, 5, ELSEWHERE, 0, 5, 6, GATHER, 0, 6, 3, NEG, 0, 2, 4],
    "to one device and back": [TO_ONE, 0, 1, 5, ELSEWHERE, 0, 5, 6, FROM_ONE, 0, 6, 3, NEG, 0, 2, 4],
    "a failure": [NEG, 0, 1, 5, BAD, 7, 5, 3, REDUCE, 0, 1, 4],
    "a failure at first": [BAD, 7, 1, 3, NEG, 0, 1, 4],
    "a failure and what depends on it": [BAD, 7, 1, 5, REDUCE, 0, 5, 3, NEG, 0, 3, 4],
    "a failure of one device": [TO_ONE, 0, 1, 5, BAD_ELSEWHERE, 7, 5, 6, FROM_ONE, 0, 6, 3, REDUCE, 0, 2, 4],
    "a failure of one device after a write": [
        *(ADD_IN_PLACE, 0, 1, 2, TO_ONE, 0, 1, 5, BAD_ELSEWHERE, 7, 5, 6, ADD_IN_PLACE, 0, 1, 2),
        *(FROM_ONE, 0, 6, 3, NEG, 0, 1, 4),
    ],
    "a view of an inner value": [NEG, 0, 1, 5, VIEW, 0, 5, 3, BAD, 7, 5, 4],
}


class Pair:
    """A session on devices 0 and 1 of one agent, each with values 10 and 11. The captured call is ``words``."""

    def __init__(self, words: list[int], timeout_s: float = 10.0, watch: Watch | None = None) -> None:
        self.reported: list[FailureRecord] = []
        self.session = Session(1, timeout_s)
        self.session.meshes = {1: BOTH, 2: SECOND}
        self.session.templates = {record.template_id: record for record in _templates(words)}
        run_ahead = RunAhead(1 << 20, timeout_s)
        self.exchange = ThreadExchange(timeout_s, run_ahead)
        planner = TransferPlanner("n0", {0: CPU, 1: CPU}, {0: "n0", 1: "n0"})
        redistributor = Redistributor(planner, self.exchange, None, run_ahead)
        for device in (0, 1):
            told = None if watch is None else StreamWatch(watch, f"device {device}")
            values = DeviceSession(self.session, device, CPU, "n0", redistributor, self._report, watch=told)
            values.blobs[10] = torch.tensor([1.0, 2.0]) * (device + 1)
            values.blobs[11] = torch.tensor([3.0, 4.0]) * (device + 1)
            self.session.devices[device] = values

    def _report(self, session: int, failure: FailureRecord) -> None:
        self.reported.append(failure)

    @property
    def record(self) -> TemplateRecord:
        return self.session.templates[CAPTURED]

    def run(self, words: list[int]) -> None:
        """On both devices, each on a thread of its own."""
        together(*(lambda d=device: self.session.devices[d].run(5, words) for device in (0, 1)))

    def shown(self) -> list[dict[int, object]]:
        """By device, the values that are not inner ones."""
        return [
            {
                value_id: blob.failure.failure_id if isinstance(blob, Poison) else blob.tolist()
                for value_id, blob in sorted(values.blobs.items())
            }
            for values in self.session.devices.values()
        ]

    def failures(self) -> list[tuple[str, int]]:
        return sorted((failure.failure_id, failure.location_id) for failure in self.reported)


def together(*calls: Callable[[], None]) -> None:
    """Each on a thread; all must end."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "a device waits for another"


def move(
    number: int, source: tuple[DeviceMesh, Placement], target: tuple[DeviceMesh, Placement]
) -> TemplateRecord:
    ids = {BOTH: 1, SECOND: 2}
    ends = [layout_to_record(Layout(mesh, (placement,)), ids[mesh]) for mesh, placement in (source, target)]
    # Each device's piece has two elements, unless they are pieces of one.
    shape = [4] if isinstance(target[1], Shard) or isinstance(source[1], Shard) else [2]
    return TemplateRecord(
        number,
        "dtorch::redistribute",
        [Slot(0), TransferArg(shape, "float32", *ends)],
        {},
        1,
        1,
        0,
        sorted({ids[source[0]], ids[target[0]]}),
    )


def _templates(words: list[int]) -> list[TemplateRecord]:
    num_inner = max((value for value in words if value in (5, 6)), default=4) - 4
    return [
        *TEMPLATES,
        move(REDUCE, (BOTH, Partial()), (BOTH, Replicate())),
        move(SCATTER, (BOTH, Shard(0)), (SECOND, Replicate())),
        move(GATHER, (SECOND, Replicate()), (BOTH, Shard(0))),
        move(TO_ONE, (BOTH, Partial()), (SECOND, Replicate())),
        move(FROM_ONE, (SECOND, Replicate()), (BOTH, Replicate())),
        move(COPY, (BOTH, Replicate()), (BOTH, Replicate())),
        template(BAD_ELSEWHERE, "aten::unsqueeze", Slot(0), 99, mesh=2),
        TemplateRecord(
            CAPTURED, "dtorch::captured", [], {}, 2, 2, 1, [1, 2], [0], body=BodyRecord(words, num_inner)
        ),
    ]
