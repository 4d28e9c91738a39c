"""Redistributions as passes read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dtorch_runtime.ir.body import BodyOp
from dtorch_runtime.ir.layout import Layout
from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.records import layout_from_record
from dtorch_runtime.ir.transfer_cost import transfer_bytes
from dtorch_runtime.wire.records import Slot, TemplateRecord, TransferArg

_REDISTRIBUTE: Final = "dtorch::redistribute"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a redistribution does, with its layouts read."""

    arg: TransferArg
    source: Layout
    target: Layout

    def bytes_from(self, source: Layout) -> int:
        """For elements of one byte; only compared."""
        return transfer_bytes(tuple(self.arg.shape), 1, source, self.target)


def transfer_arg(template: TemplateRecord) -> TransferArg | None:
    """What a redistribution does; None for other ops."""
    if template.op != _REDISTRIBUTE or (template.num_inputs, template.num_outputs) != (1, 1):
        return None
    return next((arg for arg in template.args if isinstance(arg, TransferArg)), None)


def read_transfer(op: BodyOp, meshes: Mapping[int, DeviceMesh]) -> Transfer | None:
    """None for other ops, and for a redistribution that is wrong: the workers will say so."""
    arg = transfer_arg(op.template)
    if arg is None or not op.outputs[0]:
        return None
    try:
        return Transfer(arg, layout_from_record(arg.source, meshes), layout_from_record(arg.target, meshes))
    except (KeyError, ValueError):
        return None


def transfer_template(arg: TransferArg) -> TemplateRecord:
    """A redistribution that a pass makes."""
    meshes = dict.fromkeys((arg.source.mesh_id, arg.target.mesh_id))
    return TemplateRecord(0, _REDISTRIBUTE, [Slot(0), arg], {}, 1, 1, 0, list(meshes), views=[-1])
