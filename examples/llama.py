"""A Llama that is written as for one device; the five axes of a mesh say how it runs. See docs/llama.md.

Run: python examples/llama.py --dp 2 --tp 2 --pp 2 --ulysses-cp 1 --ring-cp 1

It generates and trains, and ends with an error unless tokens and losses are those of one device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dtorch
import dtorch.nn as dnn
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.parallel.pipeline import Pipeline

#: Of the mesh, from the outside in: neighbours along the last ones exchange most.
AXES = ("pp", "dp", "ring_cp", "ulysses_cp", "tp")
#: Where tokens [batch, length] are, and where a tensor is whole along the sequence.
TOKENS = {"dp": Shard(0), "ring_cp": Shard(1), "ulysses_cp": Shard(1)}
SEQUENCE_WHOLE = {"ring_cp": Replicate(), "ulysses_cp": Replicate()}


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama."""

    vocab_size: int = 64
    width: int = 32
    hidden: int = 64
    num_layers: int = 4
    num_heads: int = 8
    num_key_heads: int = 4
    head_dim: int = 4
    max_length: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    ties_head: bool = False


# ---- the model ----


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        size = config.num_heads * config.head_dim
        key_size = config.num_key_heads * config.head_dim
        group = size // config.num_key_heads  # features of the query heads that share a key head
        self.q_proj = dnn.ColumnParallelLinear(config.width, size, bias=False, unit=group)
        self.k_proj = dnn.ColumnParallelLinear(config.width, key_size, bias=False, unit=config.head_dim)
        self.v_proj = dnn.ColumnParallelLinear(config.width, key_size, bias=False, unit=config.head_dim)
        self.o_proj = dnn.RowParallelLinearWithReplicateOutput(size, config.width, bias=False, unit=group)
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_length), frequencies).repeat(1, 2)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        start, layers = 0 if cache is None else cache.length, (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        q, k = self.rotated(q, start), self.rotated(k, start)
        if cache is not None:
            k, v = cache.extended(self, k, v)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=start == 0, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def rotated(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Queries or keys [batch, heads, length, features], turned by their positions from ``start`` on."""
        cos, sin = (table[start : start + x.shape[2]] for table in (self.cos, self.sin))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = dnn.ColumnParallelLinear(config.width, config.hidden, bias=False)
        self.up_proj = dnn.ColumnParallelLinear(config.width, config.hidden, bias=False)
        self.down_proj = dnn.RowParallelLinearWithReplicateOutput(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a sum."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class TiedHead(nn.Module):
    """The table of an embedding as the head; it belongs to the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = [embedding]  # in a list, so that its table is not this module's too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, moved(self.embedding[0].weight, getattr(x, "device_mesh", None)))


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]. Parameters have the names of Hugging Face's.

    Args:
        mesh: with the axes ``AXES``; None makes it plain PyTorch.
    """

    def __init__(self, config: Config, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        check(config, mesh)
        self.max_length = config.max_length
        self.meshes: list[Any] = [None] if mesh is None else mesh.unbind("pp")
        self.stage_of = dtorch.assign_layers_to_stages(config.num_layers, len(self.meshes))
        with made_on(self.meshes[0]):
            self.embed_tokens = dnn.EmbeddingWithReplicateOutput(config.vocab_size, config.width)
        self.layers = nn.ModuleList()
        for stage in self.stage_of:
            with made_on(self.meshes[stage]):
                self.layers.append(Layer(config))
        with made_on(self.meshes[-1]):
            self.norm = nn.RMSNorm(config.width, config.norm_eps)
            self.lm_head: nn.Module = (
                TiedHead(self.embed_tokens)
                if config.ties_head
                else dnn.ColumnParallelLinear(config.width, config.vocab_size, bias=False)
            )
        dnn.reduce_gradients(self)

    def forward(self, ids: torch.Tensor, cache: Cache | None = None) -> Any:
        length = ids.shape[1] + (0 if cache is None else cache.length)
        if length > self.max_length:
            raise ValueError(f"{length} tokens are more than the model's max_length, {self.max_length}")
        x = self.embed_tokens(moved(ids, self.meshes[0]))
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            x = layer(moved(x, self.meshes[stage]), cache)
        return self.lm_head(self.norm(x))

    def stages(self) -> nn.ModuleList:
        """The same model as one module for each mesh, as a ``Pipeline`` takes it."""
        last = len(self.meshes) - 1
        parts = [self.embed_tokens, *self.layers, self.norm, self.lm_head]
        pairs = list(zip(parts, [0, *self.stage_of, last, last], strict=True))
        own = [[part for part, stage in pairs if stage == number] for number in range(last + 1)]
        stages = nn.ModuleList(nn.Sequential(*parts) for parts in own)
        dnn.redistribute_input(stages[0], TOKENS)  # a pipeline cuts the batch; this cuts the sequence
        return stages


class Cache:
    """Keys and values of the tokens so far. They are whole along the sequence, as the next token needs all of them."""

    def __init__(self) -> None:
        self.length = 0
        self.kept: dict[nn.Module, list[torch.Tensor]] = {}

    def extended(self, layer: nn.Module, *new: torch.Tensor) -> list[torch.Tensor]:
        """What queries of the new tokens attend to; it is kept for those that follow."""
        if layer not in self.kept:  # the prompt: attention takes it as it is cut
            self.kept[layer] = [redistributed(x, SEQUENCE_WHOLE) for x in new]
            return list(new)
        pairs = zip(self.kept[layer], new, strict=True)
        self.kept[layer] = [torch.cat(pair, 2) for pair in pairs]
        return self.kept[layer]


# ---- meshes ----


def check(config: Config, mesh: DeviceMesh | None) -> None:
    """Raises ValueError where the model does not fit a mesh, before anything is made."""
    if config.num_heads % config.num_key_heads:
        raise ValueError(
            f"{config.num_heads} heads do not share {config.num_key_heads} key heads evenly; write a divisor"
        )
    if mesh is None:
        return
    if set(mesh.mesh_dim_names or ()) != set(AXES):
        raise ValueError(f"the mesh has the axes {AXES}, each at least of size 1; got {mesh!r}")
    parts = math.prod(mesh.shape[mesh.axis(name)] for name in ("tp", "ulysses_cp"))
    if config.num_heads < parts:
        raise ValueError(
            f"{config.num_heads} heads cannot be cut over {parts} devices, tp times ulysses_cp; make one of them "
            f"smaller, or use ring_cp, which cuts no heads"
        )


@contextlib.contextmanager
def made_on(mesh: DeviceMesh | None) -> Iterator[None]:
    """Modules are made on the mesh."""
    if mesh is None:
        yield
        return
    with torch.device("dtorch"), dtorch.Graph.default_graph().device_mesh_guard(mesh):
        yield


def moved(x: torch.Tensor, mesh: DeviceMesh | None) -> Any:
    """The tensor on another mesh, placed as it was."""
    return x.redistribute(device_mesh=mesh) if isinstance(x, dtorch.Tensor) else x


def redistributed(x: torch.Tensor, placements: dict[str, Any]) -> Any:
    """The tensor with other placements."""
    return x.redistribute_by_dict(placements) if isinstance(x, dtorch.Tensor) else x


def sent(ids: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Token ids on a mesh, cut by rows and along the sequence."""
    return ids if mesh is None else redistributed(dtorch.from_torch(ids, device_mesh=mesh), TOKENS)


# ---- what it does ----


@torch.no_grad()
def generate(model: Llama, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The prompts [batch, length] and the likeliest tokens behind them."""
    model.eval()
    cache = Cache()
    token, tokens = sent(ids, model.meshes[0]), [ids]
    for _ in range(num_tokens):
        logits = model(token, cache)
        cache.length += token.shape[1]
        last = redistributed(logits, {**SEQUENCE_WHOLE, "tp": Replicate()})[:, -1:]
        token = last.argmax(-1)
        tokens.append(token.cpu())
    return torch.cat(tokens, 1)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of logits that may be cut by vocabulary."""
    return dnn.vocab_parallel_cross_entropy(logits, redistributed(target, TOKENS))


def train(model: Llama, batches: list[torch.Tensor], lr: float, num_micro_batches: int = 1) -> list[float]:
    """The loss of each step. Several micro-batches go through the stages at the same time."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    pipeline = None
    if num_micro_batches > 1:
        pipeline = Pipeline(model.stages(), model.meshes, num_micro_batches=num_micro_batches, loss=loss_of)
    losses: list[torch.Tensor] = []
    for ids in batches:
        inputs, target = ids[:, :-1], ids[:, 1:]
        optimizer.zero_grad()
        if pipeline is not None:
            loss: torch.Tensor = pipeline.step(inputs, target=target)
        else:
            loss = loss_of(model(sent(inputs, model.meshes[0])), sent(target, model.meshes[-1]))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def load(model: nn.Module, file: Path) -> None:
    """Weights of a Llama of Hugging Face's, from a safetensors file; each device is sent its part."""
    from safetensors.torch import load_file  # the example runs without

    model.load_state_dict({name.removeprefix("model."): x.float() for name, x in load_file(file).items()})


def config_of(fields: Mapping[str, Any]) -> Config:
    """From the ``config.json`` of a Llama of Hugging Face's."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"this Llama has no {rope['rope_type']!r} rotary positions, only plain ones")
    return Config(
        vocab_size=fields["vocab_size"],
        width=fields["hidden_size"],
        hidden=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_key_heads=fields["num_key_value_heads"],
        head_dim=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        max_length=fields["max_position_embeddings"],
        rope_theta=rope.get("rope_theta") or fields.get("rope_theta", 10000.0),
        norm_eps=fields["rms_norm_eps"],
        ties_head=fields.get("tie_word_embeddings", False),
    )


def made(config: Config, mesh: DeviceMesh | None, args: argparse.Namespace) -> Llama:
    """The model, with the same weights on every mesh: a checkpoint's, or random ones from the seed."""
    dtorch.manual_seed(args.seed)
    model = Llama(config, mesh)
    if args.checkpoint is not None:
        load(model, args.checkpoint / "model.safetensors")
    return model


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in AXES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1, help="size of the axis")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate behind each prompt")
    parser.add_argument("--steps", type=int, default=10, help="of training")
    parser.add_argument("--batch", type=int, default=4, help="sequences at once")
    parser.add_argument("--length", type=int, default=16, help="tokens of a sequence")
    parser.add_argument("--micro-batches", type=int, default=1, help="runs of the batch in the pipeline")
    parser.add_argument("--dropout", type=float, default=0.1, help="in training")
    parser.add_argument("--ties-head", action="store_true", help="the head is the embedding's table")
    parser.add_argument("--seed", type=int, default=0, help="of weights and dropouts")
    parser.add_argument("--checkpoint", type=Path, help="folder with config.json and model.safetensors")
    return parser.parse_args()


def main() -> None:
    """Generates and trains on the mesh and on one device."""
    args = arguments()
    config = Config(ties_head=args.ties_head)
    if args.checkpoint is not None:
        config = config_of(json.loads((args.checkpoint / "config.json").read_text()))
    config = replace(config, dropout=args.dropout)
    shape = tuple(getattr(args, name) for name in AXES)
    dtorch.init(devices_per_node=math.prod(shape))
    mesh = dtorch.init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    one = dtorch.init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES)

    model, plain = made(config, mesh, args), Llama(config)
    plain.load_state_dict({name: weight.cpu() for name, weight in model.state_dict().items()})
    size = (args.batch, args.length + 1)
    batch = torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(args.seed))
    tokens = generate(model, batch[:, : args.length], args.tokens)
    print(f"{mesh}\ngenerated {tokens[0, args.length :].tolist()}")
    if not torch.equal(tokens, generate(plain, batch[:, : args.length], args.tokens)):
        raise SystemExit("these are not the tokens of plain PyTorch")
    print("The same tokens as plain PyTorch.")

    # Dropouts are DTorch's own random numbers, so that the one device to compare with is one of DTorch's.
    curves = []
    for each in (model, made(config, one, args)):
        dtorch.manual_seed(args.seed + 1)
        curves.append(train(each, [batch] * args.steps, 1e-2, args.micro_batches))
    print("losses", *(f"{loss:.4f}" for loss in curves[0]))
    difference = max(abs(ours - theirs) for ours, theirs in zip(*curves, strict=True))
    if not difference < 1e-4:
        raise SystemExit(f"the losses differ from those of one device by {difference:.1e}")
    print(f"The same losses as on one device, to {difference:.0e}.")
    dtorch.shutdown()


if __name__ == "__main__":
    main()
