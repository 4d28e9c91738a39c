"""Runners: every kind of argument reaches the kernel, and outputs land under their ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.wire.records import (
    Arg,
    ComplexArg,
    DeviceArg,
    DTypeArg,
    LayoutArg,
    LayoutRecord,
    ListArg,
    LocalShape,
    LocalStart,
    MemoryFormatArg,
    PlacementRecord,
    ScalarSlot,
    Slot,
    TemplateRecord,
    TransferArg,
)
from dtorch_runtime.worker.arguments import compile_runner, free_runner, skip_runner
from dtorch_runtime.worker.blobs import Blobs
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import Kernel, find_kernel

MESH = DeviceMesh("cpu", [4, 7])
CPU = torch.device("cpu")
#: Dim 0 of a tensor cut over both devices of the mesh.
CUT = LayoutRecord(1, [PlacementRecord("S", dim=0)])


def record(*args: Arg, inputs: int = 0, outputs: int = 1, scalars: int = 0, **kwargs: Arg) -> TemplateRecord:
    return TemplateRecord(1, "test::op", list(args), kwargs, inputs, outputs, scalars, [1])


def run(kernel: Kernel, template: TemplateRecord, blobs: Blobs, *ids: int, device: int = 7) -> int:
    """Run one record that stands behind a word of padding; where the next one starts."""
    runner = compile_runner(kernel, template, blobs, {1: MESH}, device, CPU)
    return runner([99, 1, 0, *ids], 1) - 1


class Recorder:
    """A kernel that keeps what it was called with."""

    def __init__(self) -> None:
        self.kernel = Kernel(self._call)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def _call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.args, self.kwargs = args, kwargs
        return torch.zeros(())


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        (3, 3),
        (0.5, 0.5),
        (True, True),
        (None, None),
        ("sum", "sum"),
        (ComplexArg(1.0, -2.0), complex(1, -2)),
        (DTypeArg("bfloat16"), torch.bfloat16),
        (LayoutArg("strided"), torch.strided),
        (MemoryFormatArg("channels_last"), torch.channels_last),
        (DeviceArg(), CPU),
        (ListArg([1, 2, ListArg([3])]), [1, 2, [3]]),
        (LocalShape([5, 2], CUT), [2, 2]),
        (LocalStart([5, 2], CUT, 0), 3),
        (LocalStart([5, 2], CUT, 1), 0),
    ],
)
def test_constants(arg, expected):
    recorder = Recorder()
    run(recorder.kernel, record(arg, option=arg), {}, 20)
    assert recorder.args == (expected,)
    assert recorder.kwargs == {"option": expected}


def test_inputs_and_scalars_come_from_the_record():
    recorder = Recorder()
    blobs: Blobs = {10: torch.ones(1), 11: torch.zeros(2)}
    template = record(
        ListArg([Slot(1), None, Slot(0)]), ListArg([ScalarSlot(1), -1]), Slot(0), inputs=2, scalars=2
    )
    assert run(recorder.kernel, template, blobs, 10, 11, 20, 50, 60) == template.width
    (first, none, second), sizes, third = recorder.args
    assert first is blobs[11]
    assert none is None
    assert second is third is blobs[10]
    assert sizes == [60, -1]


@pytest.mark.parametrize(
    ("op", "args", "num_outputs", "expected"),
    [
        ("aten::max.dim", (Slot(0), 0), 2, [torch.tensor([3.0, 4.0]), torch.tensor([1, 1])]),
        ("aten::split.Tensor", (Slot(0), 1), 2, [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]),
        ("aten::unbind.int", (Slot(0),), 2, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]),
        ("aten::neg", (Slot(0),), 1, [torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])]),
    ],
)
def test_outputs_land_under_their_ids(op, args, num_outputs, expected):
    blobs: Blobs = {10: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    ids = range(20, 20 + num_outputs)
    run(find_kernel(op), record(*args, inputs=1, outputs=num_outputs), blobs, 10, *ids)
    for value_id, value in zip(ids, expected, strict=True):
        assert torch.equal(blobs[value_id], value)


def test_an_output_with_id_0_is_dropped():
    blobs: Blobs = {10: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    run(find_kernel("aten::max.dim"), record(Slot(0), 0, inputs=1, outputs=2), blobs, 10, 0, 21)
    assert set(blobs) == {10, 21}
    run(find_kernel("aten::neg"), record(Slot(0), inputs=1), blobs, 10, 0)
    assert set(blobs) == {10, 21}


def test_outputs_that_the_kernel_does_not_make_have_no_id():
    """``native_layer_norm_backward`` returns None where its mask says so."""
    x, weight = torch.randn(2, 3), torch.ones(3)
    _, mean, rstd = torch.native_layer_norm(x, [3], weight, None, 1e-5)
    blobs: Blobs = {1: torch.ones(2, 3), 2: x, 3: mean, 4: rstd, 5: weight}
    args = (Slot(0), Slot(1), ListArg([3]), Slot(2), Slot(3), Slot(4), None, ListArg([True, False, False]))
    run(find_kernel("aten::native_layer_norm_backward"), record(*args, inputs=5), blobs, 1, 2, 3, 4, 5, 20)
    assert blobs[20].shape == (2, 3)


def test_a_mutated_input_that_is_returned_is_no_output():
    blobs: Blobs = {10: torch.ones(2), 11: torch.ones(2)}
    run(find_kernel("aten::add_.Tensor"), record(Slot(0), Slot(1), inputs=2, outputs=0), blobs, 10, 11)
    assert torch.equal(blobs[10], torch.full((2,), 2.0))
    assert set(blobs) == {10, 11}


def test_free_forgets_values_and_ignores_those_that_are_not_there():
    blobs: Blobs = {10: torch.ones(1), 11: torch.ones(1)}
    assert free_runner(blobs)([0, 2, 10, 99, 7], 0) == 4
    assert set(blobs) == {11}


def test_skip_steps_over_a_record():
    assert skip_runner(5)([0] * 9, 3) == 8


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (record(Slot(1), inputs=1), "input 1"),
        (record(ScalarSlot(0)), "scalar 0"),
        (record(TransferArg([1], "float32", CUT, CUT)), "no transfer"),
        (record(LayoutArg("float32")), "layout named 'float32'"),
        (record(MemoryFormatArg("nowhere")), "memory_format named 'nowhere'"),
        (record(1, **{"not a name": 1}), "not a name"),
    ],
)
def test_templates_that_contradict_themselves_are_refused(template, message):
    with pytest.raises(InternalFailure, match=message):
        compile_runner(Kernel(torch.neg), template, {}, {1: MESH}, 7, CPU)
