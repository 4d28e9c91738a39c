"""Captured calls beside the same calls without, plain torch, and PyTorch DTensor on two Gloo ranks.

Run: ``python -m benchmarks.captured [--nodes 2]``. Three programs: 100 additions of one element a call, the forward
pass of an MLP of 12 layers of 64 x 64 with a batch of 8, and that of a random Llama for one token. No grad, tp=2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from benchmarks.gloo import on_gloo_ranks
from benchmarks.harness import Row, median_of, report

NUM_ADDS = 100
NUM_LAYERS = 12
WIDTH = 64
BATCH = 8
CALLS = 30
REPEATS = 9


def adds(x: Any) -> Any:
    """A chain of additions."""
    for _ in range(NUM_ADDS):
        x = x + x
    return x


def mlp() -> torch.nn.Module:
    """Pairs of layers, so that each pair may be cut by columns and rows."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))


def llama() -> torch.nn.Module:
    """Hidden size 256, 4 layers, 8 heads, a vocabulary of 1000; random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def seconds_a_call(call: Callable[[], Any], wait: Callable[[Any], Any]) -> tuple[float, float]:
    """Medians: until a call has returned, and until the value of the last of many has come, divided by their number."""
    issue, whole = [], []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        issued = time.perf_counter()
        wait(result)
        whole.append((time.perf_counter() - start) / CALLS)
        issue.append((issued - start) / CALLS)
    return sorted(issue[1:])[REPEATS // 2], sorted(whole[1:])[REPEATS // 2]


def ours(function: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """The same of a program on DTorch."""
    return seconds_a_call(lambda: function(*args), lambda result: result.to_torch())


def plain(function: Callable[..., Any], *args: Any) -> float:
    """Seconds a call of plain torch."""
    return seconds_a_call(lambda: function(*args), lambda result: result)[1]


def latency(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of one call and its value."""

    def run() -> float:
        start = time.perf_counter()
        function(*args).to_torch()
        return time.perf_counter() - start

    return median_of(run, 50, warm=5)


def plain_latency(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of one call of plain torch."""

    def run() -> float:
        start = time.perf_counter()
        function(*args)
        return time.perf_counter() - start

    return median_of(run, 50, warm=5)


def dtensor_mlp(rank: int) -> float:
    """Seconds of a call of the MLP, cut by columns and rows in turn, on one rank."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp()
    plan = {str(2 * i): ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(NUM_LAYERS)}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)  # type: ignore[arg-type]  # its styles
    x = torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        return plain_latency(model, x)


def cut_by_turns(model: torch.nn.Module, mesh: dtorch.DeviceMesh) -> torch.nn.Module:
    """The MLP on the mesh: columns and rows in turn."""
    plan = {str(2 * i): "colwise" if i % 2 == 0 else "rowwise" for i in range(NUM_LAYERS)}
    return dtorch.parallelize(model, mesh, plan)


def logits(model: Any, ids: Any, mask: Any) -> Any:
    """What a Llama says. The mask is given: without one the model looks at its positions, which a replay cannot."""
    return model(input_ids=ids, attention_mask=mask).logits


def llama_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """One token, and its mask."""
    torch.manual_seed(0)
    return torch.randint(0, 1000, (1, 1)), torch.ones(1, 1, 1, 1, dtype=torch.bool)


def found_by_itself(mesh: dtorch.DeviceMesh) -> tuple[float, float, float, float]:
    """The programs on a graph that looks for repeats: microseconds of an addition, issue and end to end, and of a
    call of the MLP; milliseconds of one of the Llama.
    """
    ids, mask = llama_inputs()
    with dtorch.Graph(auto_capture=True):
        one = dtorch.ones(1, device_mesh=mesh)
        issue, whole = (seconds / NUM_ADDS * 1e6 for seconds in ours(adds, one))
    with dtorch.Graph(auto_capture=True):
        model = cut_by_turns(mlp(), mesh)
        mlp_us = latency(model, dtorch.from_torch(torch.randn(BATCH, WIDTH), device_mesh=mesh)) * 1e6
    with dtorch.Graph(auto_capture=True):
        llama_ms = (
            latency(logits, dtorch.parallelize(llama(), mesh), ids.to("dtorch"), mask.to("dtorch")) * 1e3
        )
    return issue, whole, mlp_us, llama_ms


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2), help="agents that hold the devices")
    num_nodes = parser.parse_args().nodes
    dtorch.init(num_nodes=num_nodes, devices_per_node=2 // num_nodes)
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    one = dtorch.ones(1, device_mesh=mesh)
    x = torch.randn(BATCH, WIDTH)
    ids, mask = llama_inputs()
    rows = []
    with torch.no_grad():
        auto_issue, auto_us, auto_mlp_us, auto_llama_ms = found_by_itself(mesh)
        issue, whole = (seconds / NUM_ADDS * 1e6 for seconds in ours(dtorch.capture(adds), one))
        eager_issue, eager_whole = (seconds / NUM_ADDS * 1e6 for seconds in ours(adds, one))
        torch_us = plain(adds, torch.ones(1)) / NUM_ADDS * 1e6
        rows.append(
            Row(
                "an add of 100 a call, issue",
                "us",
                issue,
                {"not captured": eager_issue, "auto_capture": auto_issue},
                "<= 0.3",
                issue <= 0.3,
            )
        )
        peers = {"not captured": eager_whole, "auto_capture": auto_us, "plain torch": torch_us}
        rows.append(Row("an add of 100 a call, end to end", "us", whole, peers, "<= 3", whole <= 3))

        model = cut_by_turns(mlp(), mesh)
        sent = dtorch.from_torch(x, device_mesh=mesh)
        captured_us = latency(dtorch.capture(model), sent) * 1e6
        peers = {"not captured": latency(model, sent) * 1e6, "auto_capture": auto_mlp_us}
        peers["plain torch"] = plain_latency(mlp(), x) * 1e6
        mlp_row = Row("MLP, 12 layers, forward", "us", captured_us, peers, "<= 600", captured_us <= 600)
        rows.append(mlp_row)

        whole_model, decoder = llama(), dtorch.parallelize(llama(), mesh)
        given = (decoder, ids.to("dtorch"), mask.to("dtorch"))
        captured_ms = latency(dtorch.capture(logits), *given) * 1e3
        eager_ms = latency(logits, *given) * 1e3
        plain_ms = plain_latency(logits, whole_model, ids, mask) * 1e3
        peers = {"plain torch": plain_ms}
        rows.append(Row("tiny Llama, 1 token, eager", "ms", eager_ms, peers, "<= 8", eager_ms <= 8))
        peers = {"not captured": eager_ms, "auto_capture": auto_llama_ms, "plain torch": plain_ms}
        rows.append(Row("tiny Llama, 1 token, captured", "ms", captured_ms, peers, "<= 4", captured_ms <= 4))
    dtorch.shutdown()
    mlp_row.peers["DTensor"] = on_gloo_ranks(dtensor_mlp) * 1e6
    report("captured" if num_nodes == 1 else f"captured-{num_nodes}-node", rows)


if __name__ == "__main__":
    main()
