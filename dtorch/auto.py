"""The scope in which DTorch moves data by itself, and the list of what was moved.

A scope belongs to a context (``contextvars``): to a thread, or to an asyncio task and those that it starts. Backward
passes run on threads of autograd, which take what the caller has stashed in torch's thread-local state; so a backward
pass is in the scope in which it was started, whatever the forward pass was in.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import torch

from dtorch.location import UNKNOWN, describe
from dtorch_runtime.ir.placement import Placements

_F = TypeVar("_F", bound=Callable[..., Any])

#: Lines that a log tells apart; what comes after is counted together.
MAX_RECORDS: Final = 4096
_TLS_KEY = "dtorch_auto_redistribute"


@dataclass(frozen=True, slots=True)
class Moved:
    """A redistribution of one input that a plan has."""

    op: str
    operand: str
    source: Placements
    target: Placements
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Redistribution:
    """Redistributions that were inserted at one place of a program.

    Attributes:
        op: the op that needed it, ``aten::mm.default``.
        location: ``file:line in function: source`` of the user's line.
        operand: the name of the input in the schema; ``"self (back)"`` for a result that went back to its target.
        source, target: the placements before and after.
        num_bytes: bytes that crossed from one device to another, all calls together.
        count: how many times.
        mode: ``"auto"``: inserted by ``auto_redistribute()``; ``"strict"``: one that strict mode documents.
    """

    op: str
    location: str
    operand: str
    source: Placements
    target: Placements
    num_bytes: int
    count: int
    mode: Literal["auto", "strict"]


class Redistributions(list[Redistribution]):
    """The records, most bytes first; ``str()`` of it is a table."""

    def __str__(self) -> str:
        header = ("bytes", "count", "mode", "op", "input", "from -> to", "line")
        rows = [
            (
                f"{r.num_bytes:,}",
                f"{r.count:,}",
                r.mode,
                r.op,
                r.operand,
                f"{_show(r.source)} -> {_show(r.target)}",
                r.location,
            )
            for r in self
        ]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        lines = [_row(row, widths) for row in (header, *rows)]
        total = sum(r.num_bytes for r in self)
        return "\n".join((*lines, f"{total:,} bytes moved in all"))


def _row(cells: Iterable[str], widths: list[int]) -> str:
    aligned = (
        cell.rjust(width) if column < 2 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(aligned).rstrip()


def _show(placements: Placements) -> str:
    return f"[{', '.join(map(str, placements))}]"


class Log:
    """Counts of redistributions, by op, line, input and placements. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[Any, ...], list[int]] = {}

    def add(self, moves: Iterable[Moved], location: int, mode: Literal["auto", "strict"]) -> None:
        """Count the redistributions of one call."""
        with self._lock:
            for move in moves:
                key = (move.op, location, move.operand, move.source, move.target, mode)
                totals = self._totals.get(key)
                if totals is None:
                    if len(self._totals) >= MAX_RECORDS:
                        key = ("other ops", UNKNOWN, "", (), (), mode)
                    totals = self._totals.setdefault(key, [0, 0])
                totals[0] += move.num_bytes
                totals[1] += 1

    def records(self) -> Redistributions:
        """What was counted, most bytes first."""
        with self._lock:
            items = [(key, tuple(totals)) for key, totals in self._totals.items()]
        merged: dict[tuple[Any, ...], list[int]] = {}
        for (op, location, *rest), (num_bytes, count) in items:
            totals = merged.setdefault((op, describe(location), *rest), [0, 0])
            totals[0] += num_bytes
            totals[1] += count
        found = [
            Redistribution(op, location, operand, source, target, num_bytes, count, mode)
            for (op, location, operand, source, target, mode), (num_bytes, count) in merged.items()
        ]
        return Redistributions(sorted(found, key=lambda r: -r.num_bytes))


@dataclass(frozen=True, slots=True)
class _Entered:
    """What a ``with`` put in place: the log of its scope, or None when it switched off; and what was there before."""

    log: Log | None
    outer: _Entered | None


_entered: ContextVar[_Entered | None] = ContextVar("dtorch_auto_redistribute", default=None)
#: The log of the scope that was entered last, by any thread: what strict mode moves is added to it.
_recent = Log()


def current() -> Log | None:
    """The log of the scope that the calling code is in; None outside of any."""
    found = _entered.get()
    return _of_backward() if found is None else found.log


def _of_backward() -> Log | None:
    """What the caller of the backward pass was in, on a thread of autograd."""
    stashed: Log | None = torch._C._get_obj_in_tls(_TLS_KEY) if torch._C._is_key_in_tls(_TLS_KEY) else None
    return stashed


def stash(log: Log | None) -> Log | None:
    """Let backward passes that this thread starts be in the scope of ``log``; returns what was stashed before."""
    before = _of_backward()
    torch._C._stash_obj_in_tls(_TLS_KEY, log)
    return before


def log_auto(moves: Iterable[Moved], location: int) -> None:
    """Count redistributions that keep a view equal to its base, wherever it is used."""
    (current() or _recent).add(moves, location, "auto")


def log_strict(moves: Iterable[Moved], location: int) -> None:
    """Count redistributions that strict mode inserted because they are documented."""
    (current() or _recent).add(moves, location, "strict")


class auto_redistribute:
    """Inside, an op that no placement signature fits gets its inputs redistributed, the cheapest way by bytes moved.

    A context manager and a decorator, of coroutine functions too::

        with dtorch.auto_redistribute():
            y = torch.relu(x @ w)
        print(dtorch.explain_redistributions())

    Ops whose inputs fit run as outside. A tensor that is written to keeps its placement. A backward pass is in the
    scope that it was started in. Scopes nest; threads that are started inside begin outside.

    Args:
        enabled: False makes a part of a scope strict again.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def __enter__(self) -> auto_redistribute:
        global _recent
        log: Log | None = None
        if self.enabled:
            log = current()
            if log is None:
                log = _recent = Log()
        _entered.set(_Entered(log, _entered.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _entered.get()
        assert entered is not None, "a scope was left in another context than it was entered in"
        _entered.set(entered.outer)

    def __call__(self, function: _F) -> _F:
        """``function``, each call of it in a scope of its own.

        Raises:
            TypeError: a generator function, whose body runs outside of the call.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"auto_redistribute cannot decorate the generator {function.__qualname__}; "
                f"write `with dtorch.auto_redistribute():` inside of it"
            )
        enabled = self.enabled
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with auto_redistribute(enabled):
                    return await function(*args, **kwargs)

            return call_async  # type: ignore[return-value]  # it takes and gives what the function does

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with auto_redistribute(enabled):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # it takes and gives what the function does


def explain_redistributions() -> Redistributions:
    """What was redistributed without being asked for, most bytes first; ``print()`` shows a table.

    Inside ``auto_redistribute()``, that of the scope so far; outside, that of the scope entered last, by any thread.
    Documented conversions of strict mode are listed when they move bytes. Backward passes count for the scope that
    they were started in.
    """
    return (current() or _recent).records()
