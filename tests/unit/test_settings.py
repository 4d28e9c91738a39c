"""Variables that nobody reads are told of, once each, with what was meant."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from dtorch_runtime import settings
from dtorch_runtime.errors import SettingError
from dtorch_runtime.passes.rewrite import PASSES
from dtorch_runtime.settings import OTHER_VARIABLES, PASS_NAMES, Settings


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned", set())


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("DTORCH_WAIT_TIMEOUT", r"did you mean DTORCH_WAIT_TIMEOUT_S\?"),
        ("DTORCH_THREADS", r"did you mean DTORCH_NUM_THREADS\?"),
        ("DTORCH_ADRESS", r"did you mean DTORCH_ADDRESS\?"),
        ("DTORCH_ZZZ", r"known are DTORCH_WAIT_TIMEOUT_S, .*DTORCH_SESSION_KEY"),
    ],
)
def test_an_unknown_variable_warns_once(name: str, advice: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}, which DTorch does not read: {advice}") as caught:
        Settings.from_environment({name: "1"})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings.from_environment({name: "1"})


def test_known_variables_and_those_of_others_do_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Settings.from_environment(
            {"DTORCH_NUM_THREADS": "3", "TORCH_LOGS": "x", **dict.fromkeys(OTHER_VARIABLES, "x")}
        )
    assert found.num_threads == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", PASS_NAMES),
        ("none", ()),
        ("redistribute, dead", ("dead", "redistribute")),
        ("common", ("common",)),
    ],
)
def test_passes_by_name(text: str, names: tuple[str, ...]) -> None:
    assert Settings.from_environment({"DTORCH_PASSES": text}).pass_names == names


@pytest.mark.parametrize("text", ["", "dead,,common", "dead;common", "fuse", "all,dead", 3])
def test_passes_that_there_are_not(text: Any) -> None:
    with pytest.raises(
        SettingError, match=r"names of dead, common, redistribute, .* or 'all', or 'none'; got "
    ):
        Settings(passes=text)


def test_every_pass_has_its_name() -> None:
    assert tuple(name for name in PASSES if name != "compile") == PASS_NAMES
    assert Settings(passes="dead", compile=True).pass_names == ("dead", "compile")
