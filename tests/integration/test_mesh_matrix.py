"""The Llama of examples/ on every kind of mesh: logits, tokens and loss curves of one device.

Logits and tokens are compared with plain PyTorch. So is the curve of one device without dropout; with dropout the
curves of all meshes are compared with that of one device of DTorch, whose random numbers are not those of torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, MeshError, SettingError, Settings
from dtorch_runtime.local import LocalCluster, start_local_cluster
from tests.support.leaks import LeakWatch
from tests.support.tiny_llama import prompt, tiny_llama

FILE = Path(__file__).parents[2] / "examples" / "llama.py"
NUM_NODES, DEVICES_PER_NODE = 2, 16
NUM_STEPS, FEW_STEPS, NUM_TOKENS, LR = 20, 4, 4, 1e-2
#: Sizes that few axes divide.
BATCH, LENGTH, VOCABULARY = 5, 11, 61


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("llama_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks there
    spec.loader.exec_module(module)
    return module


llama = _load()
AXES: tuple[str, ...] = llama.AXES


@pytest.fixture(scope="module")
def processes(leak_watch: LeakWatch) -> Iterator[LocalCluster]:
    before = leak_watch.snapshot()
    local = start_local_cluster(NUM_NODES, DEVICES_PER_NODE, Settings(num_threads=1))
    local.wait_ready()
    leak_watch.declare_baseline(before)
    yield local
    local.stop()


@pytest.fixture(autouse=True)
def session(processes: LocalCluster) -> Iterator[dtorch.Cluster]:
    with dtorch.connect(processes.address, session_key=processes.session_key) as cluster:
        yield cluster


# ---- meshes ----


def meshes() -> list[dict[str, int]]:
    """Sizes of the axes that are longer than one."""
    alone = [{name: size} for name in AXES for size in (2, 3, 4)]
    pairs = [
        dict(zip(names, sizes, strict=True))
        for names in itertools.combinations(AXES, 2)
        for sizes in ((2, 2), (4, 2), (2, 4))
    ]
    more = [dict.fromkeys(names, 2) for n in (3, 4, 5) for names in itertools.combinations(AXES, n)]
    mixed = [
        {"dp": 3, "tp": 2},
        {"pp": 3, "ring_cp": 2},
        {"ring_cp": 3, "ulysses_cp": 2},
        {"dp": 4, "ring_cp": 2, "tp": 2},
        {"pp": 4, "dp": 2, "tp": 2},
        {"ring_cp": 4, "ulysses_cp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "ring_cp": 3},
    ]
    return alone + pairs + more + mixed


def name_of(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


#: Those of the default run; tests below add some more.
FEW = [
    {"dp": 2, "tp": 2},
    {"pp": 2, "ring_cp": 3},
    {"ring_cp": 2, "ulysses_cp": 2},
    {"dp": 3, "ring_cp": 2},
    {"ulysses_cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "ulysses_cp": 2, "tp": 2},
]


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    """Half of its devices on each node."""
    shape = [sizes.get(name, 1) for name in AXES]
    num = math.prod(shape)
    first = -(-num // NUM_NODES)
    devices = [i if i < first else DEVICES_PER_NODE + i - first for i in range(num)]
    return DeviceMesh("cpu", torch.tensor(devices).reshape(shape), mesh_dim_names=AXES)


# ---- the model and what it is to give ----


def config_of(sizes: dict[str, int], dropout: float = 0.1, **others: Any) -> Any:
    return llama.Config(
        vocab_size=VOCABULARY,
        width=16,
        hidden=20,
        num_layers=max(2, sizes.get("pp", 1)),
        num_heads=8,
        num_key_heads=4,
        dropout=dropout,
        **others,
    )


def made(config: Any, mesh: DeviceMesh) -> Any:
    dtorch.manual_seed(5)
    return llama.Llama(config, mesh)


def plain_of(model: Any, config: Any) -> Any:
    plain = llama.Llama(config)
    plain.load_state_dict({name: weight.cpu() for name, weight in model.state_dict().items()})
    return plain.eval()


def batch() -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(6))


def curve(model: Any, num_steps: int, **options: Any) -> list[float]:
    dtorch.manual_seed(7)
    losses: list[float] = llama.train(model, [batch()] * num_steps, LR, **options)
    return losses


@cache
def expected(config: Any, num_steps: int) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Logits and tokens of plain PyTorch, and the curve of one device."""
    model = made(config, mesh_of({}))
    plain = plain_of(model, config)
    with torch.no_grad():
        logits = plain(batch())
    return logits, llama.generate(plain, batch(), NUM_TOKENS), curve(model, num_steps)


def check(sizes: dict[str, int], num_steps: int, **others: Any) -> None:
    config = config_of(sizes, **others)
    logits, tokens, losses = expected(config, num_steps)
    mesh = mesh_of(sizes)
    model = made(config, mesh).eval()
    with torch.no_grad():
        found = model(llama.sent(batch(), model.meshes[0]))
    torch.testing.assert_close(found.to_torch(), logits, rtol=0, atol=1e-4)
    assert torch.equal(llama.generate(model, batch(), NUM_TOKENS), tokens)
    assert curve(model, num_steps) == pytest.approx(losses, rel=0, abs=1e-4)


def test_how_many_meshes_there_are() -> None:
    every = {name_of(sizes) for sizes in meshes()}
    assert len(every) == len(meshes()) >= 60
    assert {frozenset(sizes) for sizes in meshes()} == {
        frozenset(names) for n in range(1, 6) for names in itertools.combinations(AXES, n)
    }


@pytest.mark.parametrize("ties_head", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.timeout(240)
def test_one_device_without_dropout_trains_as_plain_pytorch(ties_head: bool) -> None:
    config = config_of({}, dropout=0.0, ties_head=ties_head)
    model = made(config, mesh_of({}))
    plain = plain_of(model, config)
    losses = curve(model, NUM_STEPS)
    assert losses == pytest.approx(curve(plain, NUM_STEPS), rel=0, abs=1e-4)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("sizes", FEW, ids=name_of)
def test_on_some_meshes(sizes: dict[str, int]) -> None:
    check(sizes, FEW_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", meshes(), ids=name_of)
def test_on_every_mesh(sizes: dict[str, int]) -> None:
    check(sizes, NUM_STEPS)


def test_a_tied_head() -> None:
    """On a mesh of its own the table has the gradients of both."""
    check({"pp": 2, "tp": 2}, FEW_STEPS, ties_head=True)


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2, "dp": 2},
        *(
            pytest.param(sizes, marks=pytest.mark.slow)
            for sizes in ({"pp": 2}, {"pp": 3, "ring_cp": 2}, {"pp": 2, "ulysses_cp": 2, "tp": 2})
        ),
    ],
    ids=name_of,
)
def test_micro_batches(sizes: dict[str, int]) -> None:
    """Dropouts in a pipeline are those of one device with as many micro-batches."""
    config = config_of(sizes, ties_head=True)
    want = curve(made(config, mesh_of({})), FEW_STEPS, num_micro_batches=3)
    found = curve(made(config, mesh_of(sizes)), FEW_STEPS, num_micro_batches=3)
    assert found == pytest.approx(want, rel=0, abs=1e-4)


def test_a_checkpoint_of_hugging_face(tmp_path: Path) -> None:
    theirs = tiny_llama()
    theirs.save_pretrained(tmp_path)
    config = llama.config_of(theirs.config.to_dict())
    assert config.ties_head
    assert (config.num_heads, config.num_key_heads) == (9, 3)
    ids = prompt(2, 10)
    with torch.no_grad():
        want = theirs(ids).logits
    for mesh in (None, mesh_of({"pp": 2, "ring_cp": 2, "tp": 2})):
        model = llama.Llama(config, mesh)
        llama.load(model, tmp_path / "model.safetensors")
        with torch.no_grad():
            found = model.eval()(llama.sent(ids, model.meshes[0]))
        torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-4)


def test_fewer_tokens_than_devices() -> None:
    config = config_of({})
    model = made(config, mesh_of({"ring_cp": 4, "dp": 3})).eval()
    ids = batch()[:2, :3]
    assert torch.equal(llama.generate(model, ids, 2), llama.generate(plain_of(model, config), ids, 2))


def test_mistakes_are_told_before_anything_runs() -> None:
    config, fits = config_of({}), mesh_of({"tp": 2})
    unknown = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("pp", "ep"))
    many = DeviceMesh("cpu", torch.arange(64).reshape(1, 64, 1, 1, 1), mesh_dim_names=AXES)
    model = made(config, fits)
    for error, text, call in (
        (
            ValueError,
            "8 heads cannot be cut over 16",
            lambda: made(config, mesh_of({"tp": 4, "ulysses_cp": 4})),
        ),
        (ValueError, "do not share 3 key heads", lambda: made(llama.Config(num_key_heads=3), fits)),
        (SettingError, "2 layers are too few for 4 stages", lambda: made(config, mesh_of({"pp": 4}))),
        (ValueError, "the mesh has the axes", lambda: made(config, unknown)),
        (MeshError, "names device 32; the cluster", lambda: made(config, many)),
        (ValueError, "140 tokens are more than", lambda: model(torch.zeros(1, 140, dtype=torch.int64))),
        (
            RuntimeError,
            "size mismatch for layers.1.mlp.up_proj.weight",
            lambda: model.load_state_dict(
                {**model.state_dict(), "layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}
            ),
        ),
    ):
        with pytest.raises(error, match=text):
            call()
