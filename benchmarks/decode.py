"""Greedy decoding of SmolLM2-135M-Instruct on two devices of one node, beside plain torch with two threads.

Run: ``python -m benchmarks.decode [--tokens 48]``. PyTorch DTensor has no column here: it cannot cut three
key/value heads for two ranks, and unmodified models reject its tensors at the rotary embedding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import dtorch
from benchmarks.harness import Row, report
from examples.language_model import load_model

PROMPT = "Tell me in a few sentences how a steam engine works."


class TokenClock:
    """A streamer for ``generate()`` that notes when each token arrives."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, tokens: Any) -> None:
        """One more token (the first call is the prompt)."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """The last token has come."""

    @property
    def per_token_ms(self) -> float:
        """Median milliseconds between tokens, prefill not counted."""
        gaps = [b - a for a, b in zip(self.times_s[1:], self.times_s[2:], strict=False)]
        return statistics.median(gaps) * 1e3


def decode(model: Any, inputs: Any, num_tokens: int) -> tuple[float, list[int]]:
    """Median milliseconds a token, and the tokens."""
    clock = TokenClock()
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, streamer=clock
        )
    return clock.per_token_ms, output[0].tolist()


def main() -> None:
    """Measure and report: plain and distributed in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    num_tokens = parser.parse_args().tokens
    torch.set_num_threads(2)
    plain_model, tokenizer = load_model()
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    dtorch.init(devices_per_node=2)
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = dtorch.parallelize(load_model()[0], mesh)
    remote = {name: value.to("dtorch") for name, value in inputs.items()}
    plain, ours = [], []
    for _ in range(4):
        plain_ms, plain_tokens = decode(plain_model, inputs, num_tokens)
        ours_ms, our_tokens = decode(model, remote, num_tokens)
        if our_tokens != plain_tokens:
            raise RuntimeError(f"tokens differ: {our_tokens} and {plain_tokens}")
        plain.append(plain_ms)
        ours.append(ours_ms)
    plain_ms, ours_ms = statistics.median(plain[1:]), statistics.median(ours[1:])
    dtorch.shutdown()
    ratio = ours_ms / plain_ms
    report(
        "decode",
        [
            Row("a token, tp=2 on one node", "ms", ours_ms, {"plain torch, 2 threads": plain_ms}),
            Row("ratio to plain torch", "x", ratio, {}, "<= 1.6", ratio <= 1.6),
        ],
    )


if __name__ == "__main__":
    main()
