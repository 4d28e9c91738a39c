"""Reading safetensors a few rows at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dtorch.parallel.weights import Checkpoint
from dtorch_runtime.errors import SettingError

WEIGHTS = {
    "model.matrix": torch.arange(70.0).reshape(10, 7),
    "model.half": torch.arange(12).reshape(3, 4).to(torch.bfloat16),
    "model.cube": torch.arange(24).reshape(4, 3, 2),
    "model.scalar": torch.tensor(3.5),
    "model.empty": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "box", "block_bytes", "num_blocks"),
    [
        ("model.matrix", ((0, 10), (0, 7)), 1 << 20, 1),
        ("model.matrix", ((2, 9), (0, 7)), 60, 4),  # two rows of 28 bytes a block
        ("model.matrix", ((2, 9), (3, 5)), 1, 7),  # a block is at least one row
        ("model.half", ((1, 3), (0, 4)), 1 << 20, 1),
        ("model.cube", ((1, 4), (0, 3), (1, 2)), 24, 3),
        ("model.scalar", (), 1 << 20, 1),
        ("model.empty", ((0, 0), (0, 3)), 1 << 20, 0),
    ],
)
def test_blocks_are_the_rows_of_a_box_in_order(
    folder: Path, name: str, box: tuple[tuple[int, int], ...], block_bytes: int, num_blocks: int
) -> None:
    stored = Checkpoint(folder).tensors[name]
    blocks = list(stored.blocks(box, block_bytes))
    assert len(blocks) == num_blocks
    expected = WEIGHTS[name][tuple(slice(start, stop) for start, stop in box)]
    assert stored.dtype == expected.dtype
    assert all(block.is_contiguous() for block in blocks)
    elements = [block.reshape(-1) for block in blocks] or [expected.reshape(-1)[:0]]
    assert torch.equal(torch.cat(elements), expected.reshape(-1))


def test_a_folder_a_file_and_an_index_are_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    names = sorted(WEIGHTS)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: WEIGHTS[name] for name in part}, sharded / f"part-{number}.safetensors")
    index = {name: f"part-{int(name not in names[:2])}.safetensors" for name in names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    for path in (folder, folder / "model.safetensors", sharded, sharded / "model.safetensors.index.json"):
        assert {name: stored.shape for name, stored in Checkpoint(path).tensors.items()} == shapes


@pytest.mark.parametrize(
    ("names", "prefix", "found"),
    [
        (["model.matrix"], "model", "model.matrix"),
        (["matrix"], "model", "model.matrix"),
        (["lm_head", "model.half"], "model", "model.half"),
        (["base.model.matrix"], "base", "model.matrix"),
        (["lm_head"], "model", None),
    ],
)
def test_a_tensor_is_found_under_any_of_its_names(
    folder: Path, names: list[str], prefix: str, found: str | None
) -> None:
    stored = Checkpoint(folder).find(names, prefix)
    assert (stored and stored.name) == found


def test_a_path_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\xff" * 64)
    index = tmp_path / "other.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    two = tmp_path / "two"
    two.mkdir()
    for name in "ab":
        save_file({name: torch.zeros(1)}, two / f"{name}.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        (tmp_path / "nowhere", "does not exist"),
        (broken, "not a safetensors file"),
        (index, "gone.safetensors"),
        (two, "name the file"),
        (empty, "holds no safetensors files"),
    ]
    for path, message in cases:
        with pytest.raises(SettingError, match=message):
            Checkpoint(path)
