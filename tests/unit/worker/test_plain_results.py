"""What a kernel makes that could not be sent is the failure of its op, and no later failure trips over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import FailureRecord, Slot, TemplateRecord
from dtorch_runtime.worker.blobs import Poison, check_plain
from dtorch_runtime.worker.collectives.run_ahead import RunAhead
from dtorch_runtime.worker.collectives.threads import ThreadExchange
from dtorch_runtime.worker.redistribute import Redistributor, TransferPlanner
from dtorch_runtime.worker.session import DeviceSession, Session

CPU = torch.device("cpu")
MKLDNN, NEG, BAD_IN_PLACE, SPARSE = 1, 2, 3, 4


def _template(
    number: int, op: str, *args: Any, outputs: int = 1, mutates: tuple[int, ...] = ()
) -> TemplateRecord:
    return TemplateRecord(number, op, list(args), {}, 1, outputs, 0, [1], list(mutates))


TEMPLATES = [
    _template(MKLDNN, "aten::to_mkldnn", Slot(0)),
    _template(NEG, "aten::neg", Slot(0)),
    _template(BAD_IN_PLACE, "aten::unsqueeze_", Slot(0), 99, outputs=0, mutates=(0,)),
    _template(SPARSE, "aten::_to_sparse", Slot(0)),
]


class Device:
    """A session on one device, with value 10."""

    def __init__(self) -> None:
        self.reported: list[FailureRecord] = []
        session = Session(1)
        session.meshes = {1: DeviceMesh("cpu", [0])}
        session.templates = {record.template_id: record for record in TEMPLATES}
        run_ahead = RunAhead(1 << 20, 1.0)
        planner = TransferPlanner("n0", {0: CPU}, {0: "n0"})
        redistributor = Redistributor(planner, ThreadExchange(1.0, run_ahead), None, run_ahead)
        self.values = DeviceSession(
            session, 0, CPU, "n0", redistributor, lambda _, failure: self.reported.append(failure)
        )
        self.blobs = self.values.blobs
        self.blobs[10] = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(("template", "kind"), [(MKLDNN, "_mkldnn"), (SPARSE, "sparse_coo")])
def test_a_result_that_cannot_be_sent_is_a_failure(template: int, kind: str) -> None:
    device = Device()
    device.values.run(5, [template, 0, 10, 20, NEG, 0, 20, 21, NEG, 0, 10, 22])
    (failure,) = device.reported
    assert (failure.kind, failure.error_type) == ("op", "TypeError")
    assert kind in failure.message
    assert "x.cpu()" in failure.message
    assert isinstance(device.blobs[20], Poison)
    assert device.blobs[21] is device.blobs[20]
    assert isinstance(device.blobs[22], torch.Tensor)


def test_a_failure_after_it_poisons_as_ever() -> None:
    device = Device()
    device.values.run(5, [MKLDNN, 0, 10, 20, BAD_IN_PLACE, 0, 10, NEG, 0, 10, 21])
    assert [failure.op for failure in device.reported] == ["aten::to_mkldnn", "aten::unsqueeze_"]
    assert device.blobs[21] is device.blobs[10]
    assert isinstance(device.blobs[10], Poison)


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "torch.qint8"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        (lambda: 3, "int"),
    ],
)
def test_what_is_not_plain(make: Callable[[], Any], kind: str) -> None:
    with pytest.raises(TypeError, match=kind):
        check_plain(make())


def test_what_is_plain() -> None:
    check_plain(torch.zeros(2, 3).t())
    check_plain(None)
