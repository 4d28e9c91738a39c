"""Spans as text: totals by op and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dtorch.insight.spans import Span


@dataclass(slots=True)
class _Total:
    count: int = 0
    total_ns: int = 0
    num_bytes: int = 0


def table_of(spans: Sequence[Span], wall_ns: int, notes: Sequence[str]) -> str:
    """A line for each op and device, most time first; then one for each device, and what else is to be said."""
    by_op: dict[tuple[str, str], _Total] = defaultdict(_Total)
    busy_ns: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.category in ("op", "captured call"):
            name = f"{span.name} (captured)" if span.category == "captured call" else span.name
            total = by_op[name, span.lane]
            total.count += 1
            total.total_ns += span.end_ns - span.start_ns
            total.num_bytes += span.num_bytes
        elif span.category == "batch":
            busy_ns[span.lane] += span.end_ns - span.start_ns
    rows = [("op", "device", "count", "total us", "mean us", "bytes")]
    for (name, lane), total in sorted(by_op.items(), key=lambda item: -item[1].total_ns):
        total_us = total.total_ns / 1000
        rows.append(
            (
                name,
                lane.removeprefix("device "),
                str(total.count),
                f"{total_us:.1f}",
                f"{total_us / total.count:.1f}",
                str(total.num_bytes),
            )
        )
    lines = _aligned(rows)
    for lane in sorted(busy_ns, key=lambda lane: int(lane.removeprefix("device "))):
        lines.append(f"{lane}: busy {busy_ns[lane] / 1000:.1f} us of {wall_ns / 1000:.1f} us")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
