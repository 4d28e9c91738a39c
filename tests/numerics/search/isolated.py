"""Runs a function in a process of its own: a kernel that trusts its arguments may corrupt memory, given pieces."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")
_fork = multiprocessing.get_context("fork")  # what the parent has imported need not be imported again


def isolated(function: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> T | None:
    """The result of ``function(*args)``, or None when its process died or took too long."""
    mine, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_send, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(timeout_s) else None  # type: ignore[no-any-return]
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
        mine.close()


def _send(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))
    pipe.close()
