"""What the launcher finds out about the machine, on folders made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtorch_launcher.hosts import check_program, visible_gpus
from dtorch_launcher.plan import Program
from dtorch_runtime.errors import SettingError


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("", []), ("-1", []), ("3", ["3"]), ("0, 2,GPU-7f", ["0", "2", "GPU-7f"])],
)
def test_the_variable_of_cuda_decides_over_what_is_there(
    tmp_path: Path, chosen: str, expected: list[str]
) -> None:
    (tmp_path / "nvidia0").touch()
    environ = {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environ, driver=tmp_path / "none", devices=tmp_path) == expected


def test_gpus_are_counted_where_the_driver_lists_them(tmp_path: Path) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert visible_gpus({}, driver=tmp_path, devices=tmp_path / "none") == ["0", "1"]


def test_device_files_count_where_the_driver_is_hidden(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, driver=tmp_path / "none", devices=tmp_path) == ["0", "1"]


def test_a_machine_without_gpus_shows_none(tmp_path: Path) -> None:
    assert visible_gpus({}, driver=tmp_path / "none", devices=tmp_path / "none") == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    for package in ("plain", "runnable"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('was imported')")
        (tmp_path / package / "tool.py").touch()
    (tmp_path / "runnable" / "__main__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        Program(target="train.py"),
        Program(target="runnable"),
        Program(target="train", is_module=True),
        Program(target="runnable", is_module=True),
        Program(target="plain.tool", is_module=True),
        Program(target="json.tool", is_module=True),
    ],
)
def test_programs_are_found_without_importing_them(folder: Path, program: Program) -> None:
    check_program(program, folder)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program(target="trian.py"), "there is no script 'trian.py'"),
        (Program(target="plain"), "there is no script 'plain'"),
        (Program(target="train.py", is_module=True), "no module named 'train.py' can be run"),
        (Program(target="plain", is_module=True), "no module named 'plain' can be run"),
        (Program(target="plain.nothing", is_module=True), "no module named 'plain.nothing'"),
        (Program(target="nowhere.tool", is_module=True), "no module named 'nowhere.tool'"),
        (Program(target=".tool", is_module=True), "no module named '.tool'"),
    ],
)
def test_programs_that_are_not_there_are_refused(folder: Path, program: Program, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_program(program, folder)
