"""What ``dtorch-launch status`` shows: a table for people, JSON for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dtorch_runtime.wire.messages import Status
from dtorch_runtime.wire.records import NodeRecord

_SECONDS_PER_MINUTE, _SECONDS_PER_HOUR, _SECONDS_PER_DAY = 60, 3600, 86400


def status_table(status: Status) -> Table:
    """One row for each node, in the order of its devices."""
    table = Table("node", "host", "process", "type", "devices", title=None, box=None, pad_edge=False)
    for node in _in_order(status.nodes):
        cells = (node.name, node.host, str(node.pid), node.device_type, id_ranges(node.devices))
        # Text, not str: a name from the network is shown as it is and never read as markup.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def status_summary(address: str, status: Status) -> str:
    """One line: how much of everything."""
    num_devices = sum(len(node.devices) for node in status.nodes)
    return (
        f"{address}: {count(len(status.nodes), 'node')}, {count(num_devices, 'device')}, "
        f"{count(len(status.sessions), 'session')}{_numbers(status.sessions)}, {count(status.num_ops, 'op')}, "
        f"up {duration(status.uptime_s)}"
    )


def status_json(address: str, status: Status) -> str:
    """The same for programs, one line of JSON."""
    return json.dumps(
        {
            "address": address,
            "uptime_s": status.uptime_s,
            "num_ops": status.num_ops,
            "sessions": status.sessions,
            "nodes": [
                {
                    "name": node.name,
                    "host": node.host,
                    "pid": node.pid,
                    "device_type": node.device_type,
                    "devices": node.devices,
                }
                for node in _in_order(status.nodes)
            ],
        }
    )


def id_ranges(ids: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def duration(seconds: float) -> str:
    """``3 d 4 h``, ``2 h 5 min``, ``4 min 10 s`` or ``7 s``."""
    whole = int(seconds)
    for size, unit, next_size, next_unit in (
        (_SECONDS_PER_DAY, "d", _SECONDS_PER_HOUR, "h"),
        (_SECONDS_PER_HOUR, "h", _SECONDS_PER_MINUTE, "min"),
        (_SECONDS_PER_MINUTE, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // next_size} {next_unit}"
    return f"{whole} s"


def count(number: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _numbers(numbers: Sequence[int]) -> str:
    return f" ({id_ranges(numbers)})" if numbers else ""


def _in_order(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    return sorted(nodes, key=lambda node: (min(node.devices, default=-1), node.name))
