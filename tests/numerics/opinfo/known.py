"""Entries that are known to fail, each with the reason and the day by which that shall end."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parents[1] / "known.toml"
#: More than these are not excused.
MAX_KNOWN = 10


@dataclass(frozen=True)
class Known:
    """An entry of the operator database that fails."""

    entry: str
    reason: str
    closes: datetime.date


def load_known() -> dict[str, Known]:
    """The list, by entry.

    Raises:
        TypeError: an item lacks a field or has another one.
    """
    items = tomllib.loads(PATH.read_text()).get("known", [])
    return {item["entry"]: Known(**item) for item in items}
