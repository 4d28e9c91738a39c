"""Redistributions as a device's session runs them: at once, or beside the ops that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blob, Blobs, Pending, Poison
from dtorch_runtime.worker.bodies import Mover
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import REDISTRIBUTE
from dtorch_runtime.worker.redistribute import Redistributor, Transfer, check_piece
from dtorch_runtime.worker.transfers import Transfers


class MakePoison(Protocol):
    """Poison for what an op was to make, which is reported."""

    def __call__(self, record: TemplateRecord, words: list[int], error: Exception, seq: int) -> Poison:
        """Args:
        words: of the op's record.
        seq: the batch that it came in.
        """


class Moves:
    """How one device takes part in redistributions of one session.

    Args:
        session: its number.
        transfers: carries out what is large; None when everything is done at once.
        seq: the number of the batch that runs.
    """

    def __init__(
        self,
        session: int,
        device: int,
        templates: Mapping[int, TemplateRecord],
        meshes: Mapping[int, DeviceMesh],
        redistributor: Redistributor,
        transfers: Transfers | None,
        poison: MakePoison,
        seq: Callable[[], int],
    ) -> None:
        self._session = session
        self._device = device
        self._templates = templates
        self._meshes = meshes
        self._redistributor = redistributor
        self._transfers = transfers
        self._poison = poison
        self._seq = seq

    def mover(self, record: TemplateRecord) -> tuple[Mover, bool, bool]:
        """How a redistribution moves this device's piece, and whether there is one before and one after it.

        Raises:
            InternalFailure: the template contradicts itself.
        """
        transfer = self._redistributor.planner.of(record, self._meshes)
        is_source, is_target = self._ends(transfer)

        def move(value: Any, value_id: int, out: int, location_id: int) -> Any:
            words = [record.template_id, location_id, value_id, out]
            return self._move(transfer, words, self._failing(record, words), value)

        return move, is_source, is_target

    def runner(self, record: TemplateRecord, blobs: Blobs) -> Runner:
        """The runner of a redistribution.

        Raises: as ``mover``.
        """
        transfer = self._redistributor.planner.of(record, self._meshes)
        is_source, is_target = self._ends(transfer)
        transfers, width = self._transfers, record.width
        is_beside = transfer.is_beside and transfers is not None

        def run(words: list[int], i: int) -> int:
            out = words[i + 3]
            if out:
                value = blobs.get(words[i + 2]) if is_source else None
                one = words[i : i + width]
                fail = self._failing(record, one)
                if is_beside and not self._is_read_next(words, i + width, out):
                    pending = self._start(transfer, one, value, fail)
                    if is_target:
                        assert transfers is not None
                        transfers.note(blobs, out, pending)
                        blobs[out] = pending
                    return i + width
                if type(value) is Pending:
                    assert transfers is not None
                    transfers.resolve(blobs, (words[i + 2],))
                    value = blobs.get(words[i + 2])
                result = self._move(transfer, one, fail, value)
                if is_target:
                    assert result is not None
                    blobs[out] = result
            return i + width

        return run

    def _start(
        self,
        transfer: Transfer,
        words: list[int],
        value: Blob | Pending | None,
        fail: Callable[[Exception], Poison],
    ) -> Pending:
        assert self._transfers is not None
        made_bytes = transfer.made_bytes(self._device)
        num_bytes = made_bytes + transfer.read_bytes(self._device)
        pending = Pending(value, num_bytes, made_bytes, (REDISTRIBUTE, words[1]), transfer)
        self._transfers.start(pending, words[0], partial(self._move, transfer, words, fail), fail)
        return pending

    def _move(
        self,
        transfer: Transfer,
        words: Sequence[int],
        fail: Callable[[Exception], Poison],
        value: Any,
    ) -> Any:
        is_source, is_target = self._ends(transfer)
        if is_source:
            try:
                check_piece(value, words[2], transfer, self._device)
            except InternalFailure as error:
                value = fail(error)
        result = self._redistributor.run(transfer, self._device, value, self._session, words[3], fail)
        assert result is not None or not is_target, f"{transfer} left device {self._device} without its piece"
        return result

    def _failing(self, record: TemplateRecord, words: list[int]) -> Callable[[Exception], Poison]:
        seq = self._seq()
        return lambda error: self._poison(record, words, error, seq)

    def _ends(self, transfer: Transfer) -> tuple[bool, bool]:
        device = self._device
        is_source = transfer.source.mesh.coordinate(device) is not None
        return is_source, transfer.target.mesh.coordinate(device) is not None

    def _is_read_next(self, words: Sequence[int], i: int, value_id: int) -> bool:
        """Whether the op behind index ``i`` would wait for a value at once: then nothing is won by making it beside."""
        while i < len(words) and words[i] == FREE:
            i += 2 + words[i + 1]
        record = self._templates.get(words[i]) if i < len(words) else None
        return record is not None and value_id in words[i + 2 : i + 2 + record.num_inputs]
