"""Sees what a session sends, to know whether a call made devices communicate."""

from __future__ import annotations

from typing import Any

from dtorch.connection import Session
from dtorch.meshes import mesh_of
from dtorch_runtime.ir.records import layout_from_record
from dtorch_runtime.ir.stream import unpack, walk
from dtorch_runtime.ir.transfer import plan_redistribute
from dtorch_runtime.wire.records import LayoutRecord, TemplateRecord, TransferArg


class OpStream:
    """Notes the redistributions of a session that move bytes between devices; no other op does."""

    def __init__(self, session: Session) -> None:
        self._define, self._send = session.define_template, session.send_ops
        self._widths: dict[int, int] = {}
        self._communicates: dict[int, bool] = {}
        self._num_communicating = 0
        session.define_template = self._define_template  # type: ignore[method-assign]
        session.send_ops = self._send_ops  # type: ignore[method-assign]

    def take(self) -> int:
        """How many communicating ops were sent since the last call."""
        number, self._num_communicating = self._num_communicating, 0
        return number

    def _define_template(self, record: TemplateRecord) -> int:
        number = self._define(record)
        if number not in self._widths:
            self._communicates[number] = record.op == "dtorch::redistribute" and _moves_bytes(record)
            self._widths[number] = record.width
        return number

    def _send_ops(self, graph_id: int, frame: bytes, num_ops: int) -> int:
        words = unpack(frame)
        for start, _ in walk(words, self._widths):
            self._num_communicating += self._communicates.get(words[start], False)
        return self._send(graph_id, frame, num_ops)


def _moves_bytes(record: TemplateRecord) -> bool:
    [transfer] = [argument for argument in record.args if isinstance(argument, TransferArg)]
    steps = plan_redistribute(
        transfer.shape, _layout(transfer.source), _layout(transfer.target), itemsize_bytes=4
    )
    return any(not step.is_local for step in steps)


def _layout(record: LayoutRecord) -> Any:
    return layout_from_record(record, {record.mesh_id: mesh_of(record.mesh_id)})
