"""Two models on two meshes of one cluster, answering at the same time. Run: python examples/two_models.py

Each thread has a graph of its own: a stream of ops that waits for no other.
"""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from language_model import load_model

import dtorch

QUESTIONS = {
    "tp": "What is the capital of Italy? Answer in one word.",
    "dp": "What is the capital of Japan? Answer in one word.",
}
MESHES = {
    "tp": dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)),
    "dp": dtorch.DeviceMesh("cpu", [2], mesh_dim_names=("dp",)),
}


def answer(name: str, model: Any, tokenizer: Any, both: threading.Barrier) -> tuple[str, float, float]:
    """The answer to one question, and when its tokens began and ended to come."""
    mesh = MESHES[name]
    model = dtorch.parallelize(model, mesh)
    chat = [{"role": "user", "content": QUESTIONS[name]}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    graph = dtorch.Graph.default_graph()
    graph.sync()  # the weights are there
    both.wait(timeout=120)
    start = time.perf_counter()
    with graph.device_mesh_guard(mesh):
        tokens = model.generate(**inputs.to("dtorch"), max_new_tokens=16, do_sample=False).cpu()
    text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text, start, time.perf_counter()


def main() -> None:
    """Both questions at once."""
    dtorch.init(devices_per_node=3)
    model, tokenizer = load_model()
    models = {"tp": copy.deepcopy(model), "dp": model}
    both = threading.Barrier(len(models))
    with ThreadPoolExecutor(len(models)) as pool:
        running = {name: pool.submit(answer, name, models[name], tokenizer, both) for name in models}
        results = {name: future.result() for name, future in running.items()}
    for name, (text, start, end) in results.items():
        print(f"{QUESTIONS[name]}\n  {text.strip()}  ({end - start:.1f} s on {MESHES[name]})")
    overlap = min(r[2] for r in results.values()) - max(r[1] for r in results.values())
    print(f"Both answered at the same time for {overlap:.1f} s.")
    dtorch.shutdown()


if __name__ == "__main__":
    main()
