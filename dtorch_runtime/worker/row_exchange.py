"""Exchange of rows along a mesh axis, where only the data tells who gives how many to whom.

Every row is of a kind, and every rank of the axis is home to a run of kinds: ``split(num_kinds, num_ranks)``. Away from
home, a device's rows lie sorted by kind; at home they lie sorted by kind, and within a kind by the rank they came from.
``counts[rank][kind]`` says how many rows of a kind each rank has; every rank knows all of it. From it each device
sees by itself what it gives and what comes, so that rows travel once and nothing else does.

Who meets whom never depends on the data: along a line of the axis everybody gives every other device a run of rows,
which may be empty. So a device that has failed can give its poison without knowing the counts, and nobody waits for it.

A row exchange is a step of a transfer, as ``redistribute`` carries them out. All shapes here are local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from dtorch_runtime.ir.mesh import DeviceMesh
from dtorch_runtime.ir.placement import split
from dtorch_runtime.wire.records import TemplateRecord
from dtorch_runtime.worker.assembly import Recipe, Term
from dtorch_runtime.worker.blobs import Blob, Poison
from dtorch_runtime.worker.collectives.base import Group, StepKey
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.kernels import EXCHANGE_ROWS
from dtorch_runtime.worker.redistribute import DeviceStep, Outgoing, Redistributor, TransferPlanner

#: Numbers of rows, by rank and kind.
Table: TypeAlias = list[list[int]]


@dataclass(frozen=True, slots=True)
class Runs:
    """What the counts say: which rows of which rank's piece each rank gets.

    Attributes:
        starts: by source, where the runs for each target begin in the piece that it gives; and its number of rows.
        blocks: by target, what its new piece consists of: (source, start in that piece, rows). Empty ones are left out.
    """

    starts: Table
    blocks: list[list[tuple[int, int, int]]]


def runs_of(counts: Table, *, is_back: bool) -> Runs:
    """The runs of an exchange to the homes of the rows, or back from there.

    Args:
        counts: ``[rank][kind]``.
    """
    ranks = range(len(counts))
    homes = split(len(counts[0]), len(counts))
    num = [[sum(row[start:stop]) for start, stop in homes] for row in counts]  # [away][home]
    given = [list(column) for column in zip(*num, strict=True)] if is_back else num
    starts = [[0, *accumulate(row)] for row in given]
    if is_back:
        blocks = [[(s, starts[s][t], given[s][t]) for s in ranks] for t in ranks]
    else:
        offsets = [[0, *accumulate(row)] for row in counts]
        blocks = [
            [(s, offsets[s][kind], counts[s][kind]) for kind in range(*homes[t]) for s in ranks]
            for t in ranks
        ]
    return Runs(starts, [[block for block in row if block[2]] for row in blocks])


def by_rank(rows: torch.Tensor, counts: Table, rank: int) -> torch.Tensor:
    """Rows at home, which lie sorted by kind, sorted by the rank that they came from."""
    start, stop = split(len(counts[0]), len(counts))[rank]
    sizes = [row[kind] for kind in range(start, stop) for row in counts]
    blocks = rows.split(sizes)
    return torch.cat([block for r in range(len(counts)) for block in blocks[r :: len(counts)]] or [rows])


class RowExchange:
    """One device's part in the exchanges of one template.

    Args:
        record: its arguments are the rows, the counts, the axis of the mesh, and whether rows go back from home.

    Raises:
        InternalFailure: the template is none of an exchange.
    """

    def __init__(
        self, record: TemplateRecord, mesh: DeviceMesh, device: int, redistributor: Redistributor
    ) -> None:
        if record.num_inputs != 2 or record.num_outputs != 1 or len(record.args) != 4:
            raise InternalFailure(f"{EXCHANGE_ROWS} takes rows and counts, an axis, and a direction")
        _, _, axis, is_back = record.args
        if not isinstance(axis, int) or not isinstance(is_back, bool) or not 0 <= axis < mesh.ndim:
            raise InternalFailure(f"{EXCHANGE_ROWS} takes an axis of its mesh, got {axis!r} of {mesh}")
        self._device = device
        self._is_back = is_back
        self._redistributor = redistributor
        planner: TransferPlanner = redistributor.planner
        here = planner.torch_device_of(device)
        assert here is not None, f"device {device} is another agent's"
        self._torch_device = here
        place = mesh.coordinate(device)
        assert place is not None, f"device {device} takes no part"
        #: The devices along the axis through this one, by rank.
        self._line = [
            other
            for other in mesh.devices
            if _without(mesh.coordinate(other) or (), axis) == _without(place, axis)
        ]
        self._rank = place[axis]
        self._local = [other for other in self._line if planner.torch_device_of(other) is not None]
        self._nodes = {rank: planner.node_of(other) for rank, other in enumerate(self._line)}
        away = [rank for rank, other in enumerate(self._line) if other not in self._local]
        self._away = away
        ranks_here = [rank for rank, other in enumerate(self._line) if other in self._local]
        #: A device of another agent sends one parcel to each device here, numbered by its rank.
        self._remote = tuple((self._line[source], target) for source in away for target in ranks_here)

    def __str__(self) -> str:
        return f"an exchange of rows among devices {', '.join(map(str, self._line))}"

    def run(
        self,
        rows: Blob | None,
        counts: Blob | None,
        session: int,
        value_id: int,
        fail: Callable[[Exception], Poison],
    ) -> Blob:
        """Give and get rows.

        Args:
            rows: ``[rows, ...]``, as they lie before the exchange.
            counts: all their elements are ``[rank, kind]``.
            value_id: the output, which names the exchange to all devices.
            fail: makes the poison of an error, and reports it.

        Raises:
            SessionEnded: the session ended meanwhile.
        """
        try:
            given, step = self._prepared(rows, counts)
        except Exception as error:  # noqa: BLE001  it becomes the poison of all that depends on it
            given = fail(error)
            step = self._step(None, given)
        key = StepKey(session, value_id, 0)
        result = self._redistributor.take_step(step, key, self._device, given, self, fail)
        assert result is not None, f"{self} left device {self._device} without rows"
        return result

    def _prepared(self, rows: Blob | None, counts: Blob | None) -> tuple[Blob, DeviceStep]:
        if rows is None or counts is None:
            raise InternalFailure(f"device {self._device} does not hold what it is to give in {self}")
        poison = next((blob for blob in (counts, rows) if isinstance(blob, Poison)), None)
        if poison is not None:
            return poison, self._step(None, poison)
        assert isinstance(rows, torch.Tensor)
        assert isinstance(counts, torch.Tensor)
        table: Table = counts.reshape(len(self._line), -1).tolist()
        runs = runs_of(table, is_back=self._is_back)
        expected = runs.starts[self._rank][-1]
        if rows.shape[0] != expected:
            raise InternalFailure(f"device {self._device} has {rows.shape[0]} rows in {self}, not {expected}")
        rows = by_rank(rows, table, self._rank) if self._is_back else rows
        return rows, self._step(runs, rows)

    def _step(self, runs: Runs | None, given: Blob) -> DeviceStep:
        """The step that a device takes; without ``runs`` one that gives poison, and builds it."""
        recipe = self._recipe(runs, given)
        group = Group(
            index=self._line[0],  # several lines of the axis may meet in an agent
            receivers=dict.fromkeys(self._local, recipe),  # each builds for itself, and looks up its own
            contributors=frozenset(self._local),
            snapshots={},
            remote=self._remote,
            is_parallel=True,
            # Nobody writes to rows that were given: they are made for the exchange, and live until all have read.
            read_by_others=frozenset(),
        )
        starts = None if runs is None else runs.starts[self._rank]
        sends = tuple(
            Outgoing(
                self._nodes[rank],
                rank,
                None if starts is None else (slice(starts[rank], starts[rank + 1]),),
            )
            for rank in self._away
        )
        return DeviceStep(sends, group, None, bool(sends))

    def _recipe(self, runs: Runs | None, given: Blob) -> Recipe:
        own = (self._device, 0)
        needs, terms = [own], [Term(own, (slice(0, 0),))]
        if runs is not None:
            needs = [(device, 0 if device in self._local else self._rank) for device in self._line]
            # What comes from another agent is the run for this device alone.
            bases = [runs.starts[s][self._rank] if s in self._away else 0 for s in range(len(self._line))]
            terms = [
                Term(needs[s], (slice(start - bases[s], start - bases[s] + size),))
                for s, start, size in runs.blocks[self._rank]
            ] or terms
        return Recipe(
            shape=(),
            dtype=torch.float32 if isinstance(given, Poison) else given.dtype,
            torch_device=self._torch_device,
            reduce=None,
            pieces=tuple((None, (term,)) for term in terms),
            cat_dim=0,
            fill=None,
            needs=tuple(needs),
        )


def _without(place: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return place[:axis] + place[axis + 1 :]
