"""Training steps a second by the plan that ``plan="search"`` finds, beside plans that are written by hand.

Run: ``python -m benchmarks.search [--devices 2 4] [--models train_lm llama experts] [--rounds 5] [--seconds 0.5]``.
The models are those of ``examples/train_lm.py`` and ``examples/llama.py``, with layers of ``torch.nn``, and a small
Mixtral of transformers, on devices of one node. Plans take turns, in each round every one of them; a figure is the
median of its rounds. A plan that was found and is also one that was written by hand is one plan here: it is measured
once.

The last rows of a model take the mesh too from a search: of all meshes of so many devices, the one for which a step was
said to take the least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import dtorch
import dtorch.nn as dnn
from benchmarks.harness import Row, report
from examples import llama, train_lm

#: The plan that was found is as good as the best when it is no slower than by what medians of a busy machine differ.
AS_GOOD = 0.95
WHOLE = "whole"
Plan = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model with the plans that somebody would write by hand, beside none and ``"auto"``, by name."""

    make: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    length: int
    by_hand: Mapping[str, Plan] = field(default_factory=dict)
    #: Whether a step can be recorded: experts of transformers look at values on the way.
    is_captured: bool = True


def of_one_device(model: nn.Module) -> nn.Module:
    """The same with layers of ``torch.nn`` where there are those of ``dtorch.nn``, which cut themselves."""
    for name, child in list(model.named_children()):
        if isinstance(child, dnn.ColumnParallelLinear | dnn.RowParallelLinear):
            plain: nn.Module = nn.Linear(child.in_features, child.out_features, child.bias is not None)
        elif isinstance(child, dnn.VocabParallelEmbedding):
            plain = nn.Embedding(child.num_embeddings, child.embedding_dim)
        else:
            of_one_device(child)
            continue
        plain.load_state_dict(child.state_dict())
        setattr(model, name, plain)
    return model


def make_mixtral() -> nn.Module:
    """Four experts, of which a token goes through two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))


_CUT = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}
_LAYERS = 4
SUBJECTS = {
    "train_lm": Subject(
        lambda: of_one_device(train_lm.language_model(_LAYERS, 256, 4, 128)),
        vocabulary=256,
        batch=8,
        length=128,
        by_hand={
            "attention": {f"*.{name}": style for name, style in _CUT.items()},
            "feed-forward": {"*.up": "colwise", "*.down": "rowwise"},
            # As the example is written: logits stay cut, and so does the table.
            "by hand": {
                **{f"*.{name}": style for name, style in _CUT.items()},
                "*.up": "colwise",
                "*.down": "rowwise",
                "0.bytes": "embedding_rowwise",
                str(_LAYERS + 2): "colwise",
            },
        },
    ),
    "llama": Subject(
        lambda: of_one_device(llama.Llama(llama.Config())),
        vocabulary=64,
        batch=8,
        length=32,
        by_hand={
            "attention": {
                **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
                "layers.*.self_attn.o_proj": "rowwise",
            },
            "feed-forward": {
                **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
                "layers.*.mlp.down_proj": "rowwise",
            },
        },
    ),
    "experts": Subject(
        make_mixtral,
        vocabulary=256,
        batch=8,
        length=64,
        by_hand={
            "attention": {
                **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
                "model.layers.*.self_attn.o_proj": "rowwise",
            },
        },
        is_captured=False,
    ),
}


def meshes_of(num_devices: int) -> Iterator[tuple[str, dtorch.DeviceMesh]]:
    """All with axes dp and tp."""
    for tp in (size for size in range(1, num_devices + 1) if num_devices % size == 0):
        sizes = {"dp": num_devices // tp, "tp": tp}
        name = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        yield name, dtorch.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


# ---- one plan ----


class Runner:
    """A model on a mesh by a plan, and its steps."""

    def __init__(self, subject: Subject, mesh: dtorch.DeviceMesh, plan: Any, zero_stage: int = 0) -> None:
        torch.manual_seed(0)
        model: Any = dtorch.parallelize(subject.make(), mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if zero_stage:
            dtorch.parallel.zero(model, optimizer, stage=zero_stage)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(subject.vocabulary, (subject.batch, subject.length + 1), generator=generator)
        [self.batch] = dtorch.prefetch([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())], mesh)

        def step(x: Any, y: Any) -> Any:
            output = model(x)
            logits = getattr(output, "logits", output)
            loss = dnn.vocab_parallel_cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = dtorch.capture(step) if subject.is_captured else step
        self.rates: list[float] = []
        for _ in range(4):
            self.step(*self.batch).item()

    def run(self, seconds: float) -> None:
        """Steps for about so long, of which only the last is waited for; their rate is one of ``rates``."""
        start = time.perf_counter()
        self.step(*self.batch).item()
        num_steps = max(2, round(seconds / (time.perf_counter() - start)))
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = self.step(*self.batch)
        loss.item()
        self.rates.append(num_steps / (time.perf_counter() - start))


def measured(runners: Mapping[Any, Runner], rounds: int, seconds: float) -> dict[Any, float]:
    """Steps a second of each, medians; they take turns."""
    for _ in range(rounds):
        for runner in runners.values():
            runner.run(seconds)
    return {key: statistics.median(runner.rates) for key, runner in runners.items()}


# ---- the plans of a mesh ----


def styles_of(plan: dtorch.parallel.ModelPlan) -> tuple[Any, ...]:
    """Equal for plans that do the same."""
    return tuple((row.name, row.style, row.layout.placements) for row in plan.rows)


@dataclass
class Contest:
    """The plans for a model on one mesh. ``found`` is the name of the one that a search found."""

    mesh_name: str
    mesh: dtorch.DeviceMesh
    plans: dict[str, Any]
    found: str
    seconds: float


def contest(subject: Subject, mesh_name: str, mesh: dtorch.DeviceMesh) -> Contest:
    """What there is to compare."""
    sizes = {"batch_size": subject.batch, "sequence_length": subject.length}
    searched = dtorch.plan(subject.make(), mesh, "search", **sizes)
    assert searched.found is not None
    plans: dict[str, Any] = {WHOLE: {}}
    if mesh.size("tp") > 1:
        plans |= {"auto": "auto", **subject.by_hand}
    styles = {
        styles_of(dtorch.plan(subject.make(), mesh, plan, **sizes)): name for name, plan in plans.items()
    }
    name = styles.get(styles_of(searched), "searched")
    plans.setdefault(name, searched.plan)
    return Contest(mesh_name, mesh, plans, name, searched.found.chosen.seconds)


def rows_of(name: str, subject: Subject, num_devices: int, rounds: int, seconds: float) -> list[Row]:
    """One for each mesh on which a search has a choice, and one for all meshes."""
    contests = [contest(subject, *named) for named in meshes_of(num_devices)]
    runners = {
        (c.mesh_name, plan): Runner(subject, c.mesh, c.plans[plan]) for c in contests for plan in c.plans
    }
    rates = measured(runners, rounds, seconds)
    rows = []
    for c in contests:
        if len(c.plans) > 1:
            peers = {plan: rates[c.mesh_name, plan] for plan in c.plans if plan != "searched"}
            rows.append(row(f"{name}, {c.mesh_name} ({c.found})", rates[c.mesh_name, c.found], peers))
    first = min(contests, key=lambda c: c.seconds)
    best = {c.mesh_name: max(rates[c.mesh_name, plan] for plan in c.plans) for c in contests}
    title = f"{name}, {num_devices} devices ({first.mesh_name}, {first.found})"
    return [*rows, row(title, rates[first.mesh_name, first.found], best)]


def zero_row(name: str, subject: Subject, rounds: int, seconds: float) -> Row:
    """Under a limit that whole weights exceed, on an axis over which nothing else is cut."""
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sizes = {"batch_size": subject.batch, "sequence_length": subject.length}
    whole = dtorch.plan(subject.make(), mesh, "search", **sizes).found
    assert whole is not None
    limit = whole.chosen.memory_bytes - 1
    found = dtorch.plan(subject.make(), mesh, "search", memory_limit_bytes=limit, **sizes).found
    assert found is not None
    stages = {f"ZeRO {stage}": Runner(subject, mesh, {}, stage) for stage in (1, 2, 3)}
    rates = measured(stages, rounds, seconds)
    chosen = f"ZeRO {found.zero_stage}"
    return row(f"{name}, dp=2, {limit} bytes at most ({chosen})", rates[chosen], rates)


def row(figure: str, rate: float, peers: dict[str, float]) -> Row:
    """As good as the best of the others."""
    goal = f">= {AS_GOOD} x the best"
    return Row(figure, "steps/s", rate, peers, goal, rate >= AS_GOOD * max(peers.values()))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Plans that are searched for, beside those written by hand.")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4], help="of a mesh")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a plan in a round, about")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for num_devices in args.devices:
            dtorch.init(devices_per_node=num_devices)
            rows += rows_of(name, SUBJECTS[name], num_devices, args.rounds, args.seconds)
            dtorch.shutdown()
    dtorch.init(devices_per_node=2)
    rows.append(zero_row("train_lm", SUBJECTS["train_lm"], args.rounds, args.seconds))
    dtorch.shutdown()
    report("search", rows)


if __name__ == "__main__":
    main()
