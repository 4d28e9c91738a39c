"""What saving and loading hold and read at once; no cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dtorch.checkpoint as checkpoint
from dtorch.checkpoint.files import Entry
from dtorch.checkpoint.loading import read_index
from dtorch.checkpoint.pieces import Piece, arriving
from dtorch_runtime.worker.stored import CHECKED_BYTES, OpenFile


def test_few_pieces_are_on_their_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.checkpoint.pieces._WINDOW_BYTES", 100)
    on_the_way: list[int] = []
    most = []

    def piece(number: int, size: int) -> Piece:
        def ask() -> Callable[[], torch.Tensor]:
            on_the_way.append(size)
            most.append(sum(on_the_way))

            def wait() -> torch.Tensor:
                on_the_way.remove(size)
                return torch.tensor(number)

            return wait

        return Piece(Entry(str(number), "U8", 1, ((0, size),)), ask)

    sizes = [30, 40, 20, 50, 250, 10, 10]
    arrived = [tensor.item() for tensor in arriving([piece(i, size) for i, size in enumerate(sizes)])]
    assert arrived == list(range(len(sizes))), "in the order of the file"
    assert most == [30, 70, 90, 70, 250, 10, 20], "or one piece alone"


def test_only_the_rows_of_a_device_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 4096, 1024
    whole = torch.arange(float(rows * columns)).view(rows, columns)
    checkpoint.save(tmp_path, whole)
    read: list[int] = []
    part = OpenFile._part

    def counted(self: OpenFile, number: int) -> bytes:
        read.append(number)
        return part(self, number)

    monkeypatch.setattr(OpenFile, "_part", counted)
    [stored] = read_index(tmp_path).tensors.values()
    box = ((1024, 2048), (256, 512))
    found = torch.cat(list(stored.blocks(box)))
    assert torch.equal(found, whole[1024:2048, 256:512])
    assert len(set(read)) * CHECKED_BYTES <= whole.nbytes // 4 + CHECKED_BYTES


def test_one_value_with_two_names_is_written_once(tmp_path: Path) -> None:
    tied = torch.ones(1000)
    checkpoint.save(tmp_path, {"a": tied, "b": tied.detach(), "c": tied[:10]})
    [file] = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 4000 + 40 + 300
    assert torch.equal(checkpoint.load(tmp_path)["b"], tied)
