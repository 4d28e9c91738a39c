"""Redistributions as a device's session runs them: at once, or beside the ops that follow. And exchanges of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.stream import FREE
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.arguments import Runner
from dtorch_runtime.worker.blobs import Blobs, Pending, Poison, UnderWay
from dtorch_runtime.worker.bodies import ExchangeRows, Move
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import REDISTRIBUTE
from dtorch_runtime.worker.redistribute import Redistributor, Transfer, check_piece
from dtorch_runtime.worker.row_exchange import RowExchange
from dtorch_runtime.worker.streams.cpu import CpuEvent
from dtorch_runtime.worker.transfers import Transfers

#: ``(value, its id, id of the result, location, batch) -> new piece``.
_Move: TypeAlias = Callable[[Any, int, int, int, int], Any]


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
        self._is_at_once = False

    def at_once(self, run: Callable[[list[int], int], None]) -> Callable[[list[int]], None]:
        """Runs records, and carries nothing out beside them."""

        def run_at_once(words: list[int]) -> None:
            self._is_at_once = True
            try:
                run(words, 0)
            finally:
                self._is_at_once = False

        return run_at_once

    def move(self, record: TemplateRecord) -> Move:
        """How this device takes part in a redistribution inside of a captured call.

        Raises:
            InternalFailure: the template contradicts itself.
        """
        transfer, move, is_source, is_target = self._plan(record)

        def move_now(value: Any, value_id: int, out: int, location_id: int) -> Any:
            return move(value, value_id, out, location_id, self._seq())

        return Move(move_now, is_source, is_target, self._starter(record, transfer, move))

    def runner(self, record: TemplateRecord, blobs: Blobs) -> Runner:
        """The runner of a redistribution.

        Raises: as ``move``.
        """
        transfer, move, is_source, is_target = self._plan(record)
        transfers, width, seq = self._transfers, record.width, self._seq
        start = self._starter(record, transfer, move)

        def run(words: list[int], i: int) -> int:
            out = words[i + 3]
            if out:
                value = blobs.get(words[i + 2]) if is_source else None
                result: Any
                if start is not None and self._pays(words, i + width, out):
                    result = start(value, words[i + 2], out, words[i + 1])
                    if is_target:
                        assert transfers is not None
                        transfers.unresolved[out] = result
                else:
                    if type(value) is Pending:
                        assert transfers is not None
                        transfers.resolve(blobs, (words[i + 2],))
                        value = blobs.get(words[i + 2])
                    result = move(value, words[i + 2], out, words[i + 1], seq())
                if is_target:
                    blobs[out] = result
            return i + width

        return run

    def exchange(self, record: TemplateRecord) -> ExchangeRows:
        """How this device takes part in an exchange of rows. It never raises: errors become the poison of its result.

        Raises:
            InternalFailure: the template contradicts itself.
        """
        mesh = self._meshes[record.mesh_ids[0]]
        exchange = RowExchange(record, mesh, self._device, self._redistributor)

        def exchange_rows(values: Sequence[Any], value_ids: Sequence[int], out: int, location_id: int) -> Any:
            def fail(error: Exception) -> Poison:
                words = [record.template_id, location_id, *value_ids, out]
                return self._poison(record, words, error, self._seq())

            rows, counts = values
            return exchange.run(rows, counts, self._session, out, fail)

        return exchange_rows

    def exchange_runner(self, record: TemplateRecord, blobs: Blobs) -> Runner:
        """The runner of an exchange of rows.

        Raises: as ``exchange``.
        """
        exchange, transfers, width = self.exchange(record), self._transfers, record.width

        def run(words: list[int], i: int) -> int:
            inputs, out = words[i + 2 : i + 4], words[i + 4]
            if out:
                if transfers is not None:
                    transfers.resolve(blobs, inputs)
                blobs[out] = exchange([blobs.get(value) for value in inputs], inputs, out, words[i + 1])
            return i + width

        return run

    def _plan(self, record: TemplateRecord) -> tuple[Transfer, _Move, bool, bool]:
        transfer = self._redistributor.planner.of(record, self._meshes)
        device, number = self._device, self._session
        is_source = transfer.source.mesh.coordinate(device) is not None
        is_target = transfer.target.mesh.coordinate(device) is not None
        redistribute = self._redistributor.run

        def move(value: Any, value_id: int, out: int, location_id: int, seq: int) -> Any:
            def fail(error: Exception) -> Poison:
                return self._poison(record, [record.template_id, location_id, value_id, out], error, seq)

            if is_source:
                try:
                    check_piece(value, value_id, transfer, device)
                except InternalFailure as error:
                    value = fail(error)
            result = redistribute(transfer, device, value, number, out, fail)
            assert result is not None or not is_target, f"{transfer} left device {device} without its piece"
            return result

        return transfer, move, is_source, is_target

    def _starter(
        self, record: TemplateRecord, transfer: Transfer, move: _Move
    ) -> Callable[[Any, int, int, int], Pending] | None:
        """Starts a transfer beside the ops that follow, as a mover does it at once; None for a small one."""
        if self._transfers is None or not transfer.is_beside:
            return None
        begin, made_bytes = self._transfers.start, transfer.made_bytes(self._device)
        num_bytes = made_bytes + transfer.read_bytes(self._device)

        def start(value: Any, value_id: int, out: int, location_id: int) -> Pending:
            seq = self._seq()

            def fail(error: Exception) -> Poison:
                return self._poison(record, [record.template_id, location_id, value_id, out], error, seq)

            under_way = UnderWay(value, num_bytes, transfer, CpuEvent(is_done=False))
            pending = Pending(under_way, made_bytes, (REDISTRIBUTE, location_id))
            begin(
                pending, record.template_id, lambda piece: move(piece, value_id, out, location_id, seq), fail
            )
            return pending

        return start

    def _pays(self, words: Sequence[int], i: int, value_id: int) -> bool:
        """Whether the next op, from index ``i`` on, would not wait at once for a value that is made beside."""
        if self._is_at_once:
            return False
        while i < len(words) and words[i] == FREE:
            i += 2 + words[i + 1]
        record = self._templates.get(words[i]) if i < len(words) else None
        return record is None or value_id not in words[i + 2 : i + 2 + record.num_inputs]
