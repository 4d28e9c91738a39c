"""Client memory while a model of SmolLM2-135M's shape is loaded from safetensors onto a cluster.

Run: ``python -m benchmarks.load_memory``. The weights are random and written to a temporary folder first. The figure
is the peak resident set of the client above its size before loading, beside ``from_pretrained`` of plain transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, report

CONFIG: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
LARGEST_BYTES = 49152 * 576 * 4

_WRITE = """
import json, sys, torch, transformers
config = transformers.LlamaConfig(**json.loads(sys.argv[2]))
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
_PREAMBLE = """
import sys, threading, torch, transformers
from pathlib import Path
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True); self.value = 0; self.done = threading.Event()
    def run(self):
        while not self.done.wait(0.005):
            self.value = max(self.value, resident_bytes())
"""
_OURS = (
    _PREAMBLE
    + """
import dtorch
mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
dtorch.zeros((1,), device_mesh=mesh).to_torch()
idle = resident_bytes(); peak = Peak(); peak.start()
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
model = dtorch.parallelize(model, mesh, checkpoint=sys.argv[1])
next(model.parameters()).graph.sync()
peak.done.set(); peak.join(); print(peak.value - idle)
dtorch.shutdown()
"""
)
_PLAIN = (
    _PREAMBLE
    + """
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
transformers.LlamaForCausalLM
idle = resident_bytes(); peak = Peak(); peak.start()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
total = sum(float(p.sum()) for p in model.parameters())
peak.done.set(); peak.join(); print(peak.value - idle)
"""
)


def run(script: str, *arguments: str) -> str:
    """The last line that a script prints."""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    return (result.stdout.strip().splitlines() or [""])[-1]


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        run(_WRITE, folder, json.dumps(CONFIG))
        if not list(Path(folder).glob("*.safetensors")):
            raise RuntimeError("transformers wrote no safetensors file")
        ours = int(run(_OURS, folder)) / LARGEST_BYTES
        plain = int(run(_PLAIN, folder)) / LARGEST_BYTES
    report(
        "load_memory",
        [
            Row(
                "peak above idle, in largest tensors (113 MB)", "x", ours, {"plain from_pretrained": plain},
                "< 1.3", ours < 1.3,
            )
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
