"""A session on one device, without a thread or a socket, and templates to run on it."""

from __future__ import annotations

import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import Arg, FailureRecord, ListArg, Slot, TemplateRecord
from dtorch_runtime.worker.blobs import Blobs, Poison
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.threads import ThreadExchange
from dtorch_runtime.worker.ledger import DeviceTotal
from dtorch_runtime.worker.redistribute import Redistributor, TransferPlanner
from dtorch_runtime.worker.session import DeviceSession, Session
from dtorch_runtime.worker.watch import StreamWatch

CPU = torch.device("cpu")
NEG, ADD, ADD_IN_PLACE, BAD, BAD_IN_PLACE, VIEW, UNKNOWN, ELSEWHERE, NO_MESH, SPLIT, ADD_LISTS = range(1, 12)


def template(
    number: int, op: str, *args: Arg, outputs: int = 1, mesh: int = 1, mutates: tuple[int, ...] = ()
) -> TemplateRecord:
    items = [item for arg in args for item in (arg.items if isinstance(arg, ListArg) else [arg])]
    inputs = sum(isinstance(item, Slot) for item in items)
    return TemplateRecord(number, op, list(args), {}, inputs, outputs, 0, [mesh], list(mutates))


TEMPLATES = [
    template(NEG, "aten::neg", Slot(0)),
    template(ADD, "aten::add.Tensor", Slot(0), Slot(1)),
    template(ADD_IN_PLACE, "aten::add_.Tensor", Slot(0), Slot(1), outputs=0, mutates=(0,)),
    template(BAD, "aten::unsqueeze", Slot(0), 99),
    template(BAD_IN_PLACE, "aten::unsqueeze_", Slot(0), 99, outputs=0, mutates=(0,)),
    template(VIEW, "aten::select.int", Slot(0), 0, 0),
    template(UNKNOWN, "aten::no_such_op", Slot(0)),
    template(ELSEWHERE, "aten::neg", Slot(0), mesh=2),
    template(NO_MESH, "aten::neg", Slot(0), mesh=3),
    template(
        ADD_LISTS,
        "aten::_foreach_add_.List",
        ListArg([Slot(0), Slot(1)]),
        ListArg([Slot(2), Slot(3)]),
        outputs=0,
        mutates=(0, 1),
    ),
    template(SPLIT, "aten::split.Tensor", Slot(0), 1, outputs=2),
]


class Bench:
    """A session on device 0, with values 10 and 11. ``total`` counts what all sessions hold, where there is a limit."""

    def __init__(self, total: DeviceTotal | None = None, watch: StreamWatch | None = None) -> None:
        self.reported: list[FailureRecord] = []
        session = Session(1)
        session.meshes = {1: DeviceMesh("cpu", [0]), 2: DeviceMesh("cpu", [1])}
        session.templates = {record.template_id: record for record in TEMPLATES}
        run_ahead = RunAhead(1 << 20, 1.0)
        planner = TransferPlanner("n0", {0: CPU}, {0: "n0"})
        redistributor = Redistributor(planner, ThreadExchange(1.0, run_ahead), None, run_ahead)
        self.values = DeviceSession(
            session,
            0,
            CPU,
            "n0",
            redistributor,
            lambda _, failure: self.reported.append(failure),
            total,
            watch=watch,
        )
        self.blobs[10] = torch.tensor([1.0, 2.0])
        self.blobs[11] = torch.tensor([3.0, 4.0])

    @property
    def blobs(self) -> Blobs:
        """The values by id."""
        return self.values.blobs

    def run(self, *words: int) -> None:
        self.values.run(5, list(words))

    def failure(self, value_id: int) -> FailureRecord:
        blob = self.blobs[value_id]
        assert isinstance(blob, Poison)
        return blob.failure
