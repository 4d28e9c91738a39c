"""CUDA streams and NCCL. Skipped where there is no GPU: nothing here has run in continuous integration."""

from __future__ import annotations

import threading

import pytest
import torch

from dtorch_runtime.errors import UnsupportedError
from dtorch_runtime.settings import Settings
from dtorch_runtime.worker.collectives import nccl
from dtorch_runtime.worker.executor import WorkerExecutor
from dtorch_runtime.worker.streams import cuda
from dtorch_runtime.worker.streams.cpu import CpuEvent, CpuStream

gpu = pytest.mark.gpu
needs_nccl = pytest.mark.skipif(
    not nccl.is_available(), reason="needs CuPy, a CUDA device and libnccl: pip install dtorch[gpu]"
)


@gpu
def test_kernels_run_on_the_stream_and_events_order_streams():
    device = torch.device("cuda", 0)
    first, second = cuda.CudaStream(device), cuda.CudaStream(device)
    with first.activate():
        x = torch.ones(1 << 20, device=first.torch_device) * 3
        event = first.record()
    second.wait_for(event)
    with second.activate():
        y = x + 1
        second.record().wait(10.0, "an addition")
    assert y.sum().item() == 4 * (1 << 20)
    assert event.is_done()


@gpu
@needs_nccl
def test_nccl_among_all_gpus():
    num_ranks = torch.cuda.device_count()
    unique_id = nccl.new_unique_id()
    results: dict[int, torch.Tensor] = {}

    def rank_main(rank: int) -> None:
        device = torch.device("cuda", rank)
        stream = cuda.CudaStream(device)
        with stream.activate():
            communicator = nccl.NcclCommunicator(num_ranks, unique_id, rank, device)
            source = torch.full((1000,), float(rank), device=device)
            total, passed = torch.empty_like(source), torch.empty_like(source)
            communicator.all_reduce(source, total, "sum")
            communicator.exchange([((rank + 1) % num_ranks, source)], [((rank - 1) % num_ranks, passed)])
            stream.record().wait(30.0, "NCCL")
            results[rank] = torch.stack([total, passed]).cpu()
            communicator.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
    for rank in range(num_ranks):
        total, passed = results[rank]
        assert total.eq(sum(range(num_ranks))).all()
        assert passed.eq((rank - 1) % num_ranks).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_is_said_and_not_crashed():
    assert not nccl.is_available()
    with pytest.raises(UnsupportedError):
        cuda.CudaStream(torch.device("cuda", 0))
    with pytest.raises(UnsupportedError):
        WorkerExecutor(Settings(), "n0", "cuda", lambda _: None)
    with pytest.raises(UnsupportedError):
        nccl.NcclCommunicator(1, b"", 0, torch.device("cuda", 0))


def test_a_cpu_stream_orders_events():
    stream = CpuStream(wait_timeout_s=5.0)
    assert stream.record().is_done()
    pending = CpuEvent(is_done=False)
    threading.Thread(target=pending.set).start()
    stream.wait_for(pending)
    assert pending.is_done()
