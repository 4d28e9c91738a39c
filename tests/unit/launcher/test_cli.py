"""The command line: its frozen surface, how it is parsed, and what it says to wrong input. Nothing is started."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from dtorch_launcher import cli, commands
from dtorch_launcher.plan import SUBCOMMANDS, Program

#: Every command with its options and arguments. Scripts rely on them: a change here is a decision.
SURFACE = {
    "run": {"target", "args", "--nodes", "--devices-per-node", "--device-type", "-m/--module"},
    "controller": {"--bind", "--keys"},
    "agent": {"--connect", "--name", "--devices", "--device-type", "--data-address", "--keys"},
    "status": {"--connect", "--keys", "--timeout-s", "--json"},
    "stop": {"--connect", "--keys", "--timeout-s"},
    "keys": {"folder"},
}
ENVIRONMENT = {"DTORCH_ADDRESS", "DTORCH_KEYS"}


@pytest.fixture(autouse=True)
def no_cluster_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DTORCH_ADDRESS", "DTORCH_SESSION_KEY", "DTORCH_KEYS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


class Run:
    """Runs the command line in this process, and keeps what it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["dtorch-launch", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def parameters(command: Any) -> set[str]:
    return {
        "/".join(p.opts) if p.param_type_name == "option" else p.name
        for p in command.params
        if p.name != "help"
    }


def test_the_surface_is_frozen() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert {name: parameters(command) for name, command in group.commands.items()} == SURFACE
    assert tuple(group.commands) == SUBCOMMANDS
    assert parameters(group) == {"--version", "--install-completion", "--show-completion"}
    variables = {p.envvar for c in group.commands.values() for p in c.params if getattr(p, "envvar", None)}
    assert variables == ENVIRONMENT


def test_every_command_teaches_with_an_example(run: Run) -> None:
    for argv in [("--help",), (), *((name, "--help") for name in SUBCOMMANDS)]:
        code, out, _ = run(*argv)
        assert (code, "dtorch-launch " in out.split("Usage:", 1)[1].split("\n", 1)[1]) == (0, True), argv


def test_the_overview_names_every_command_and_the_exit_status(run: Run) -> None:
    _, out, _ = run("--help")
    assert [name for name in SUBCOMMANDS if name not in out] == []
    assert "Exit status" in out
    assert "devices-per-node" in out


def test_the_version_is_the_package_s(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "dtorch-launch")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a.py"], (Program(target="a.py"), 1, None, "cpu")),
        (
            ["--nodes", "2", "--devices-per-node", "3", "a.py", "--nodes", "7", "-m", "x"],
            (Program(target="a.py", args=("--nodes", "7", "-m", "x")), 2, 3, "cpu"),
        ),
        (
            ["-m", "--device-type", "cuda", "pkg.mod", "--help"],
            (Program(target="pkg.mod", args=("--help",), is_module=True), 1, None, "cuda"),
        ),
        (
            ["--nodes", "2", "--", "status", "--", "-x"],
            (Program(target="status", args=("--", "-x")), 2, None, "cpu"),
        ),
        (["run", "a.py", "x y", ""], (Program(target="a.py", args=("x y", "")), 1, None, "cpu")),
    ],
)
def test_options_before_the_script_are_ours_and_those_after_it_the_script_s(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: tuple[Any, ...]
) -> None:
    seen: list[tuple[Any, ...]] = []

    def run_program(*arguments: Any) -> int:
        seen.append(arguments)
        return 41

    monkeypatch.setattr(commands, "run_program", run_program)
    assert run(*argv)[0] == 41
    assert seen == [expected]


def test_settings_are_read_from_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "a.py"
    script.touch()
    monkeypatch.setenv("DTORCH_STOP_TIMEOUT_S", "soon")
    code, _, err = run(str(script))
    assert code == 2
    assert "DTORCH_STOP_TIMEOUT_S takes a value of type float, got 'soon'" in err


WRONG = {
    "no nodes": (["--nodes", "0", "{script}"], "--nodes takes a whole number from 1 to 1024, got 0"),
    "negative devices": (["--devices-per-node", "-1", "{script}"], "--devices-per-node takes a whole number"),
    "not a number": (["--nodes", "two", "{script}"], "--nodes"),
    "no script": (["--nodes", "2"], "SCRIPT"),
    "a script that is not there": (["--nodes", "2", "train.py"], "there is no script 'train.py'"),
    "a module that is not there": (["-m", "no.such"], "no module named 'no.such'"),
    "an unknown subcommand": (["controler", "--bind", "x"], "Did you mean the subcommand 'controller'?"),
    "an unknown option": (["--node", "2", "{script}"], "--node"),
    "an unknown device type": (
        ["--device-type", "tpu", "{script}"],
        "--device-type takes cpu or cuda, got 'tpu'",
    ),
    "a public address without keys": (
        ["controller", "--bind", "tcp://0.0.0.0:5555"],
        "Run `dtorch-launch keys FOLDER` and pass the folder with `--keys FOLDER`",
    ),
    "an address that is none": (["controller", "--bind", "localhost:5555"], "tcp://host:port"),
    "a key folder without keys": (
        ["controller", "--bind", "tcp://0.0.0.0:5555", "--keys", "{folder}"],
        "Make keys with `dtorch-launch keys {folder}`",
    ),
    "an agent without devices": (
        ["agent", "--connect", "tcp://127.0.0.1:1", "--devices", "0"],
        "--devices takes a whole number from 1 to 1024, got 0",
    ),
    "an agent with a strange name": (
        ["agent", "--connect", "tcp://127.0.0.1:1", "--name", "a b"],
        "For example: --name node1",
    ),
    "an agent without a controller": (["agent", "--devices", "1"], "--connect"),
    "an agent without keys": (["agent", "--connect", "tcp://127.0.0.1:1"], "--keys FOLDER (or DTORCH_KEYS)"),
    "an agent with a strange data address": (
        ["agent", "--connect", "tcp://127.0.0.1:1", "--data-address", "here"],
        "address 'here' is not one that DTorch uses",
    ),
    "the status of nothing": (["status"], "--connect"),
    "the status without keys": (["status", "--connect", "tcp://127.0.0.1:1"], "--keys FOLDER"),
    "no folder for keys": (["keys"], "FOLDER"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_what_to_write(run: Run, tmp_path: Path, case: str) -> None:
    argv, message = WRONG[case]
    places = {"script": str(tmp_path / "a.py"), "folder": str(tmp_path)}
    Path(places["script"]).touch()
    code, out, err = run(*(word.format(**places) for word in argv))
    assert (code, out) == (2, "")
    assert message.format(**places) in err


def test_more_gpus_than_there_are_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.py").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    wanted = ["--nodes", "2", "--devices-per-node", "2", "--device-type", "cuda"]
    code, _, err = run(*wanted, str(tmp_path / "a.py"))
    assert (code, "needs 4 GPUs, this machine shows 2" in err) == (2, True)
    code, _, err = run("agent", "--connect", "tcp://127.0.0.1:1", "--devices", "3", "--device-type", "cuda")
    assert (code, "this machine shows 2 GPUs" in err) == (2, True)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_controller_that_does_not_answer_has_a_deadline_with_a_name(
    run: Run, monkeypatch: pytest.MonkeyPatch, unused_endpoint: Any, command: str
) -> None:
    address = unused_endpoint("tcp")
    monkeypatch.setenv("DTORCH_SESSION_KEY", "00ff")
    code, _, err = run(command, "--connect", address, "--timeout-s", "0.1")
    assert code == 2
    assert err == (
        f"dtorch-launch: waited 0.1 s for a connection to {address}. Nothing answers there: is the other process "
        f"running, and is the address right?\n"
    )


def test_a_malformed_session_key_is_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_SESSION_KEY", "hunter2")
    code, _, err = run("status", "--connect", "tcp://127.0.0.1:1")
    assert (code, "hexadecimal" in err, "hunter2" in err) == (2, True, False)


def test_keys_are_made_once_and_only_for_their_owner(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    code, out, _ = run("keys", str(folder))
    assert code == 0
    assert out.splitlines()[:2] == [str(folder / "server.json"), str(folder / "client.json")]
    assert [os.stat(folder / name).st_mode & 0o777 for name in ("server.json", "client.json")] == [0o600] * 2
    code, _, err = run("keys", str(folder))
    assert (code, "keys are never overwritten" in err) == (2, True)


def test_the_commands_in_the_documents_are_ones_that_there_are(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    for name in ("run_program", "run_controller", "run_agent", "show_status", "stop", "make_keys"):
        monkeypatch.setattr(commands, name, lambda *_, _name=name, **__: reached.append(_name))
    monkeypatch.setenv("DTORCH_ADDRESS", "tcp://head:5555")
    root = Path(__file__).parents[3]
    text = "".join(path.read_text() for path in (root / "README.md", root / "docs" / "launching.md"))
    lines = re.findall(r"^dtorch-launch (.+)$", text, re.MULTILINE)
    for line in lines:
        assert run(*shlex.split(line)) == (0, "", ""), line
    assert len(reached) == len(lines) >= 8
