"""NCCL through CuPy: all-reduce, and grouped sends and receives, among CUDA devices.

Written against the documented behaviour of ``cupy.cuda.nccl``; it has not run on a GPU yet, and the executor does not
use it yet: CUDA devices exchange by peer copies among threads (``threads``) and through host memory between agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch_runtime.errors import UnsupportedError

try:
    from cupy.cuda import is_available as cuda_is_available, nccl
except ImportError:
    nccl = None

#: NCCL knows no bool: its bytes are sent as they are.
_DTYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.bool: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}
_OPS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN", "avg": "NCCL_AVG"}


def is_available() -> bool:
    """Whether CuPy, a GPU and libnccl are there."""
    if nccl is None:
        return False
    try:
        return bool(cuda_is_available() and nccl.available)
    except RuntimeError:  # CuPy without a driver
        return False


def new_unique_id() -> Any:
    """What the ranks of one communicator must share: bytes in CuPy 14, a tuple in 13."""
    return nccl.get_unique_id()


class NcclCommunicator:
    """One rank of a communicator. Its calls queue work on the calling thread's current torch stream, and return.

    Every rank makes it at the same time, on a thread of its own: that call waits for all of them.

    Raises:
        UnsupportedError: NCCL is not available here.
    """

    def __init__(self, num_ranks: int, unique_id: Any, rank: int, torch_device: torch.device) -> None:
        if not is_available():
            raise UnsupportedError("NCCL needs CuPy, a CUDA device and libnccl: pip install dtorch[gpu]")
        self._torch_device = torch_device
        with torch.cuda.device(torch_device):
            self._communicator = nccl.NcclCommunicator(num_ranks, unique_id, rank)

    def all_reduce(self, source: torch.Tensor, target: torch.Tensor, op: str) -> None:
        """Reduce over all ranks into ``target``, which has ``source``'s shape and dtype. Both are contiguous."""
        self._communicator.allReduce(
            source.data_ptr(),
            target.data_ptr(),
            source.numel(),
            _code(_DTYPES[source.dtype]),
            _code(_OPS[op]),
            self._stream(),
        )

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send tensors to ranks and receive into others, all at once. All are contiguous.

        What one rank sends to another arrives there in order.
        """
        stream = self._stream()
        nccl.groupStart()
        for rank, tensor in sends:
            dtype = _code(_DTYPES[tensor.dtype])
            self._communicator.send(tensor.data_ptr(), tensor.numel(), dtype, rank, stream)
        for rank, tensor in receives:
            dtype = _code(_DTYPES[tensor.dtype])
            self._communicator.recv(tensor.data_ptr(), tensor.numel(), dtype, rank, stream)
        nccl.groupEnd()

    def close(self) -> None:
        """Free the communicator; pending work is waited for by NCCL."""
        self._communicator.destroy()

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._torch_device).cuda_stream)


def _code(name: str) -> int:
    return int(getattr(nccl, name))
