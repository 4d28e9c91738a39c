"""Greedy decoding of SmolLM2-135M-Instruct on two devices, beside plain torch with two threads.

Run: ``python -m benchmarks.decode [--tokens 48] [--nodes 2]``. PyTorch DTensor has no column here: it cannot cut three
key/value heads for two ranks, and unmodified models reject its tensors at the rotary embedding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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


def decode_captured(
    model: Any, inputs: Any, num_tokens: int, cache: Any, step: Callable[..., Any]
) -> tuple[float, float, list[int]]:
    """Median milliseconds a token, CPU milliseconds of this process a token, and the tokens.

    The tokens are read as they come, one behind: while the devices work on the next, this process looks at the last.
    """
    ids = inputs["input_ids"]
    tokens = ids[0].tolist()
    gaps, before = [], time.perf_counter()
    with torch.no_grad():
        token = model(input_ids=ids, cache=cache).logits[:, -1:].argmax(-1)
        cpu_s = time.process_time()
        for _ in range(num_tokens - 1):
            following = step(model, token, cache)
            tokens.append(int(token.item()))
            token, now = following, time.perf_counter()
            gaps.append(now - before)
            before = now
        cpu_s = (time.process_time() - cpu_s) / (num_tokens - 1)
        tokens.append(int(token.item()))
    return statistics.median(gaps[1:]) * 1e3, cpu_s * 1e3, tokens


def captured_rows(
    plain_model: Any, model: Any, inputs: Any, remote: Any, num_tokens: int, expected: list[int]
) -> list[Row]:
    """The same tokens by a captured step with a cache of fixed size, beside plain torch with such a cache."""
    from transformers import StaticCache

    def step(model: Any, token: Any, cache: Any) -> Any:
        return model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)

    captured = dtorch.capture(step)
    length = inputs["input_ids"].shape[1] + num_tokens
    plain, ours = [], []
    for _ in range(4):
        cache = StaticCache(config=plain_model.config, max_cache_len=length)
        plain.append(decode_captured(plain_model, inputs, num_tokens, cache, step))
        cache = dtorch.parallel.static_cache(model, length)
        ours.append(decode_captured(model, remote, num_tokens, cache, captured))
        if ours[-1][2] != expected:
            raise RuntimeError(f"tokens differ: {ours[-1][2]} and {expected}")
    plain_ms, ours_ms = (statistics.median(row[0] for row in rows[1:]) for rows in (plain, ours))
    plain_cpu_ms, ours_cpu_ms = (statistics.median(row[1] for row in rows[1:]) for rows in (plain, ours))
    ratio, cpu_ratio = ours_ms / plain_ms, ours_cpu_ms / plain_cpu_ms
    return [
        Row("a token, captured step, fixed cache", "ms", ours_ms, {"plain torch, 2 threads": plain_ms}),
        Row("ratio to plain torch, captured", "x", ratio, {}, "<= 1.1", ratio <= 1.1),
        Row("client CPU time, captured", "ms", ours_cpu_ms, {"plain torch, 2 threads": plain_cpu_ms}),
        Row("ratio of CPU times of the process", "x", cpu_ratio, {}),
    ]


def main() -> None:
    """Measure and report: plain and distributed in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2), help="agents that hold the devices")
    args = parser.parse_args()
    num_tokens = args.tokens
    torch.set_num_threads(2)
    plain_model, tokenizer = load_model()
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    dtorch.init(num_nodes=args.nodes, devices_per_node=2 // args.nodes)
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
    captured = captured_rows(plain_model, model, inputs, remote, num_tokens, plain_tokens)
    dtorch.shutdown()
    ratio = ours_ms / plain_ms
    report(
        "decode" if args.nodes == 1 else f"decode-{args.nodes}-node",
        [
            Row(f"a token, tp=2, {args.nodes} node", "ms", ours_ms, {"plain torch, 2 threads": plain_ms}),
            Row("ratio to plain torch", "x", ratio, {}, "<= 1.6", ratio <= 1.6),
            *captured,
        ],
    )


if __name__ == "__main__":
    main()
