"""What is called before devices start, lest their threads call it for the first time at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch_runtime.settings import Settings
from dtorch_runtime.worker.executor import WorkerExecutor
from dtorch_runtime.worker.first_calls import make_first_calls


class Calls(TorchDispatchMode):
    """The ops that are called, with the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.add((func.overloadpacket.__name__, result.dtype))
        return result


def test_an_agent_calls_them_in_both_precisions_once_a_process() -> None:
    make_first_calls.cache_clear()
    with Calls() as calls:
        WorkerExecutor(Settings(), "n0", "cpu", lambda _: None, host="here").close(5.0)
    for name in ("exp", "log", "sqrt", "tanh", "erf"):
        assert {(name, torch.float32), (name, torch.float64)} <= calls.seen
    with Calls() as calls:
        WorkerExecutor(Settings(), "n0", "cpu", lambda _: None, host="here").close(5.0)
    assert ("exp", torch.float32) not in calls.seen
