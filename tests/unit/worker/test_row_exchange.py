"""Exchanges of rows: whatever the counts, each row comes home, and back to where it was."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from dtorch_runtime.ir.placement import split
from dtorch_runtime.worker.row_exchange import Table, by_rank, runs_of

tables = st.integers(1, 4).flatmap(
    lambda ranks: st.integers(ranks, 6).flatmap(
        lambda kinds: st.lists(
            st.lists(st.integers(0, 3), min_size=kinds, max_size=kinds), min_size=ranks, max_size=ranks
        )
    )
)


def exchanged(pieces: list[torch.Tensor], counts: Table, *, is_back: bool) -> list[torch.Tensor]:
    """What every rank has afterwards, made of what the runs say."""
    runs = runs_of(counts, is_back=is_back)
    if is_back:
        pieces = [by_rank(piece, counts, rank) for rank, piece in enumerate(pieces)]
    assert [piece.shape[0] for piece in pieces] == [row[-1] for row in runs.starts]
    made = []
    for target, blocks in enumerate(runs.blocks):
        for source, start, size in blocks:  # all of it is in the run that the source gives this target
            assert runs.starts[source][target] <= start
            assert start + size <= runs.starts[source][target + 1]
        parts = [pieces[source][start : start + size] for source, start, size in blocks]
        made.append(torch.cat(parts) if parts else torch.empty(0, 3, dtype=torch.int64))
    return made


@settings(max_examples=200, deadline=None)
@given(counts=tables)
def test_rows_come_home_and_back(counts: Table) -> None:
    num_kinds = len(counts[0])
    away = [
        torch.tensor([(rank, kind, i) for kind in range(num_kinds) for i in range(row[kind])]).reshape(-1, 3)
        for rank, row in enumerate(counts)
    ]
    home = exchanged(away, counts, is_back=False)
    for (start, stop), rows in zip(split(num_kinds, len(counts)), home, strict=True):
        expected = [
            (rank, kind, i)
            for kind in range(start, stop)
            for rank, row in enumerate(counts)
            for i in range(row[kind])
        ]
        assert [tuple(row) for row in rows.tolist()] == expected
    back = exchanged(home, counts, is_back=True)
    assert [rows.tolist() for rows in back] == [rows.tolist() for rows in away]
