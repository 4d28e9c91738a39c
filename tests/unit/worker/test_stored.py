"""A box of a stored tensor is read from its files, and hardly more than that."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dtorch.parallel.weights import Checkpoint
from dtorch_runtime.errors import SettingError
from dtorch_runtime.worker.failures import InternalFailure
from dtorch_runtime.worker.file_kernels import NO_TENSORS, check_files, look_for_files, read, read_box
from dtorch_runtime.worker.stored import (
    CHECKED_BYTES,
    FileFacts,
    OpenFile,
    StoredError,
    StoredFile,
    facts_of,
)

CPU = torch.device("cpu")


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has read."""
    sizes: list[int] = []
    given = os.preadv

    def counted(number: int, buffers: Any, offset: int) -> int:
        sizes.append(given(number, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


@pytest.mark.parametrize(
    ("shape", "box", "most_bytes"),
    [
        ((64, 32), ((16, 32), (0, 32)), 16 * 32 * 4),  # rows
        ((64, 4096), ((0, 64), (1024, 3072)), 64 * 2048 * 4),  # long parts of rows: nothing else
        ((64, 32), ((8, 16), (8, 24)), 8 * 32 * 4),  # short parts of rows: the rows
        ((4, 8, 2048), ((1, 3), (2, 6), (0, 2048)), 2 * 4 * 2048 * 4),
        ((4, 8, 2, 3), ((0, 4), (4, 8), (0, 2), (0, 3)), 4 * 4 * 6 * 4),
        ((5, 3, 7), ((1, 5), (1, 2), (2, 5)), 4 * 7 * 4),
        ((7,), ((2, 3),), 4),
        ((), (), 4),
        ((3, 4), ((1, 1), (0, 4)), 0),
    ],
)
def test_a_box_is_read_and_little_else(
    tmp_path: Path, num_read: list[int], shape: Any, box: Any, most_bytes: int
) -> None:
    whole = torch.randn(shape)
    save_file({"before": torch.ones(5), "x": whole}, tmp_path / "model.safetensors")
    stored = Checkpoint(tmp_path).tensors["x"]
    expected = whole[tuple(slice(start, stop) for start, stop in box)]
    out = torch.full(expected.shape, torch.nan)
    read_box(out, box, stored.pieces)
    assert torch.equal(out, expected)
    assert sum(num_read) <= most_bytes


def test_boxes_of_random_pieces(tmp_path: Path, rng: random.Random) -> None:
    shape = (9, 6, 5)
    whole = torch.arange(270.0).view(shape)
    for number in range(20):
        cut = rng.randrange(1, 9)
        save_file({"x": whole[:cut].clone()}, tmp_path / f"{number}-a.safetensors")
        save_file({"x": whole[cut:].clone()}, tmp_path / f"{number}-b.safetensors")
        [low] = Checkpoint(tmp_path / f"{number}-a.safetensors").tensors["x"].pieces
        [high] = Checkpoint(tmp_path / f"{number}-b.safetensors").tensors["x"].pieces
        files = [
            [piece.file.path, piece.file.facts.num_bytes, piece.file.facts.header_crc32, None]
            for piece in (low, high)
        ]
        pieces = [[0, low.start, [0, cut, 0, 6, 0, 5]], [1, high.start, [cut, 9, 0, 6, 0, 5]]]
        starts = [rng.randrange(size) for size in shape]
        sizes = [rng.randrange(size - start + 1) for size, start in zip(shape, starts, strict=True)]
        found = read(starts, sizes, files, pieces, dtype=torch.float32, device=CPU)
        index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        assert torch.equal(found, whole[index])


def test_a_file_that_is_another_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(4)}, path)
    facts = facts_of(str(path))
    for known, says in (
        (FileFacts(facts.num_bytes + 1, facts.header_crc32), f"it has {facts.num_bytes} bytes, and had"),
        (FileFacts(facts.num_bytes, 5), "its header differs"),
    ):
        with pytest.raises(StoredError, match=f"{path} is damaged.*{says}"):
            OpenFile(StoredFile(str(path), known))
    with pytest.raises(StoredError, match="nowhere cannot be read: No such file"):
        OpenFile(StoredFile(str(tmp_path / "nowhere"), facts))
    with pytest.raises(InternalFailure, match="nothing is known"):
        read([0], [1], [[str(path), facts.num_bytes, None, None]], [], dtype=torch.float32, device=CPU)


def test_parts_are_compared_with_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "part"
    data = bytearray(random.Random(1).randbytes(2 * CHECKED_BYTES + 5))
    save_file({"x": torch.frombuffer(data, dtype=torch.uint8)}, path)
    written = bytearray(path.read_bytes())
    starts = range(0, len(written), CHECKED_BYTES)
    crcs = [[n, zlib.crc32(written[start : start + CHECKED_BYTES])] for n, start in enumerate(starts)]

    def check(*numbers: int) -> int:
        parts = [value for number in numbers for value in crcs[number]]
        return int(check_files([[str(path), len(written), None, parts]], CPU))

    assert check(0, 1, 2) == len(written)
    assert check(2) == len(written) - 2 * CHECKED_BYTES
    written[CHECKED_BYTES + 9] ^= 1
    path.write_bytes(written)
    assert check(0, 2) == len(written) - CHECKED_BYTES
    with pytest.raises(StoredError, match=f"{path} is damaged: bytes {CHECKED_BYTES} to {2 * CHECKED_BYTES}"):
        check(0, 1)
    with pytest.raises(InternalFailure, match="nothing is known"):
        check_files([[str(path), len(written), None, None]], CPU)


def test_what_a_node_finds(tmp_path: Path) -> None:
    good, other = tmp_path / "good.safetensors", tmp_path / "other"
    save_file({"x": torch.ones(4)}, good)
    other.write_text("no tensors here, and a header of many bytes is announced")
    found = look_for_files([str(good), str(other), str(tmp_path / "nowhere"), str(tmp_path)], CPU)
    facts = facts_of(str(good))
    assert found[0].tolist() == [facts.num_bytes, facts.header_crc32]
    assert found[1:, 0].tolist()[:2] == [NO_TENSORS, -2]
    assert found[3, 0] < 0


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "x has 4 bytes"),
        (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "not in the file"),
        (b'{"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}', "F33"),
        (b'{"x":{"dtype":"F32","shape":[2]}}', "data_offsets"),
        (b"[1,2]", "AttributeError|TypeError"),
        (b'{"x":3}', "TypeError"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: bytes, says: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(SettingError, match=f"{path} is not a safetensors file that can be read.*({says})"):
        Checkpoint(path)
