"""A model of SmolLM2-135M's shape goes from a safetensors file to the devices; the client stays small meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

MAX_RATIO = 1.3

LOAD = """
import sys, threading
import psutil, torch
from transformers import AutoConfig, LlamaForCausalLM
import dtorch

folder, largest_bytes = sys.argv[1], int(sys.argv[2])
process = psutil.Process()
peak_bytes, done = 0, threading.Event()

def watch():
    global peak_bytes
    while not done.wait(0.002):
        peak_bytes = max(peak_bytes, process.memory_info().rss)

dtorch.init(devices_per_node=2)
mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
dtorch.zeros((1,), device_mesh=mesh).to_torch()
config = AutoConfig.from_pretrained(folder)
idle_bytes = process.memory_info().rss
watcher = threading.Thread(target=watch)
watcher.start()
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model = dtorch.parallelize(model, mesh, checkpoint=folder)
dtorch.Graph.default_graph().sync()
done.set()
watcher.join()
print((peak_bytes - idle_bytes) / largest_bytes, set(model.model.norm.weight.tolist()))
dtorch.shutdown()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    save_file(
        {name: torch.full(shape, 0.5) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.timeout(120)
def test_the_client_never_holds_much_more_than_the_largest_tensor(folder: Path) -> None:
    largest_bytes = 49152 * 576 * 4
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(largest_bytes)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ratio, values = result.stdout.split(maxsplit=1)
    assert values.strip() == "{0.5}"
    assert 0 < float(ratio) < MAX_RATIO
