"""A client that is quicker than its devices: it waits, and nothing grows without bound on any side."""

from __future__ import annotations

import psutil
import torch

import dtorch

MIB = 1024 * 1024
MAX_OPS = 4_000
NUM_OPS = 120_000


def test_ops_behind_a_slow_one_wait_for_credit() -> None:
    cluster = dtorch.init(settings=dtorch.Settings.from_environment(max_outstanding_ops=MAX_OPS))
    try:
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        one = dtorch.ones((1,), device_mesh=mesh)
        (one + dtorch.rand((1,), device_mesh=mesh)).to_torch()  # loads what random numbers need
        agent, client = psutil.Process(cluster.nodes[0].pid), psutil.Process()
        before = [process.memory_info().rss for process in (agent, client)]
        slow = dtorch.rand((1500, 1500), device_mesh=mesh)
        for _ in range(8):
            slow = slow @ slow
        total, most = one, 0
        state = cluster.session._state
        for index in range(NUM_OPS):
            total = total + one
            if index % 500 == 0:
                most = max(most, state.num_ops)
        assert MAX_OPS / 2 < most <= MAX_OPS, "the client ran ahead, as far as it may"
        assert total.item() == NUM_OPS + 1
        after = [process.memory_info().rss for process in (agent, client)]
        # The ops themselves, if all were held: more than 120 bytes each on the wire and 500 as objects.
        slow_bytes = 12 * 1500 * 1500 * 4
        assert after[0] - before[0] < slow_bytes + 64 * MIB
        assert after[1] - before[1] < 48 * MIB
    finally:
        dtorch.shutdown()


def test_uploads_behind_a_slow_op_wait_for_room() -> None:
    cluster = dtorch.init(settings=dtorch.Settings.from_environment(max_outstanding_bytes=8 * MIB))
    try:
        mesh = dtorch.DeviceMesh("cpu", [0])
        piece = torch.ones(MIB)
        state = cluster.session._state
        client = psutil.Process()
        dtorch.from_torch(piece, device_mesh=mesh).sum().item()
        before, most = client.memory_info().rss, 0
        for _ in range(60):
            total = dtorch.from_torch(piece, device_mesh=mesh).sum()
            most = max(most, state.num_bytes)
        assert 0 < most <= 8 * MIB
        assert total.item() == MIB
        assert client.memory_info().rss - before < 40 * MIB, (
            "60 uploads of 4 MiB left the client as they came"
        )
    finally:
        dtorch.shutdown()
