"""What a command line means, without starting anything."""

from __future__ import annotations

import pytest

from dtorch_launcher.plan import (
    NodePlan,
    Program,
    check_count,
    check_device_type,
    check_node_name,
    describe_end,
    exit_status,
    log_prefix,
    missing_program,
    parse_session_key,
    plan_nodes,
    program_environment,
    with_default_command,
)
from dtorch_runtime.errors import SettingError


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["--help"]),
        (["--help"], ["--help"]),
        (["-h"], ["-h"]),
        (["--version"], ["--version"]),
        (["--show-completion=zsh"], ["--show-completion=zsh"]),
        (["train.py"], ["run", "train.py"]),
        (["--nodes", "2", "train.py"], ["run", "--nodes", "2", "train.py"]),
        (["--nodes", "2", "--help"], ["run", "--nodes", "2", "--help"]),
        (["-m", "json.tool"], ["run", "-m", "json.tool"]),
        (["--", "status"], ["run", "--", "status"]),
        (["./status"], ["run", "./status"]),
        (["status", "--connect", "x"], ["status", "--connect", "x"]),
        (["run", "status"], ["run", "status"]),
    ],
)
def test_what_names_no_subcommand_is_a_script_to_run(argv: list[str], expected: list[str]) -> None:
    assert with_default_command(argv) == expected


def test_nodes_are_numbered_and_cpu_devices_need_no_hardware() -> None:
    assert plan_nodes(2, 3, "cpu", gpus=[]) == (
        NodePlan(name="node0", num_devices=3, device_type="cpu"),
        NodePlan(name="node1", num_devices=3, device_type="cpu"),
    )


def test_gpus_are_dealt_out_in_the_order_in_which_they_are_visible() -> None:
    nodes = plan_nodes(2, 2, "cuda", gpus=["4", "5", "GPU-a", "GPU-b", "9"])
    assert [node.environment for node in nodes] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
    ]


def test_gpus_that_nobody_counted_are_not_dealt_out() -> None:
    (node,) = plan_nodes(1, 8, "cuda", gpus=None)
    assert node.environment == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, "cpu"), r"--nodes takes a whole number from 1 to 1024, got 0"),
        ((1, -2, "cpu"), r"--devices-per-node takes a whole number from 1 to 1024, got -2"),
        ((1025, 1, "cpu"), r"--nodes .* got 1025"),
        ((1, 1, "tpu"), r"--device-type takes cpu or cuda, got 'tpu'"),
        ((2, 2, "cuda", ["0", "1"]), r"needs 4 GPUs, this machine shows 2\..*--device-type cpu"),
    ],
)
def test_clusters_that_cannot_be_are_refused_with_what_to_write(
    arguments: tuple[int, int, str], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        plan_nodes(*arguments)


@pytest.mark.parametrize("value", [0, -1, 1025])
def test_counts_are_refused_with_the_name_of_their_option(value: int) -> None:
    with pytest.raises(SettingError, match=rf"--devices takes .* got {value}"):
        check_count("--devices", value)


@pytest.mark.parametrize("name", ["node1", "gpu-17.rack_3", "a" * 64])
def test_plain_names_are_accepted(name: str) -> None:
    check_node_name(name)


@pytest.mark.parametrize("name", ["", "a b", "controller", "a" * 65, "nöde", "x\n", "[red]"])
def test_names_that_would_confuse_a_log_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match="--name node1"):
        check_node_name(name)


def test_device_types_are_refused_by_name() -> None:
    check_device_type("cuda")
    with pytest.raises(SettingError, match="got 'CUDA'"):
        check_device_type("CUDA")


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (Program(target="a.py"), ["py", "a.py"]),
        (Program(target="a.py", args=("-m", "--", "x y")), ["py", "a.py", "-m", "--", "x y"]),
        (Program(target="pkg.mod", args=("--lr", "1"), is_module=True), ["py", "-m", "pkg.mod", "--lr", "1"]),
    ],
)
def test_arguments_of_a_program_are_its_own(program: Program, command: list[str]) -> None:
    assert program.command("py") == command


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program(target="contoller"), "Did you mean the subcommand 'controller'"),
        (Program(target="train.py"), "there is no script 'train.py'. Write dtorch-launch"),
        (Program(target="train", is_module=True), "no module named 'train'"),
    ],
)
def test_a_missing_program_says_what_to_write(program: Program, message: str) -> None:
    assert message in str(missing_program(program))


def test_a_program_finds_its_cluster_and_no_other() -> None:
    base = {"PATH": "/bin", "DTORCH_ADDRESS": "tcp://old:1", "DTORCH_KEYS": "/old", "DTORCH_CHECK": "1"}
    environment = program_environment(base, address="ipc:///x", session_key=b"\x01\xff")
    assert environment == {
        "PATH": "/bin",
        "DTORCH_CHECK": "1",
        "DTORCH_ADDRESS": "ipc:///x",
        "DTORCH_SESSION_KEY": "01ff",
    }
    assert program_environment(base, address="a", session_key=b"k", keys="/new")["DTORCH_KEYS"] == "/new"
    assert base["DTORCH_ADDRESS"] == "tcp://old:1"


def test_a_session_key_is_hexadecimal_and_never_shown() -> None:
    assert parse_session_key("01ff") == b"\x01\xff"
    for bad in ("", "0", "secret!"):
        with pytest.raises(SettingError, match="DTORCH_SESSION_KEY takes hexadecimal") as caught:
            parse_session_key(bad)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("returncode", "status", "words"),
    [
        (0, 0, "ended with status 0"),
        (3, 3, "ended with status 3"),
        (-2, 130, "was ended by SIGINT"),
        (-9, 137, "was ended by SIGKILL"),
        (-62, 190, "was ended by signal 62"),
    ],
)
def test_statuses_are_those_of_a_shell(returncode: int, status: int, words: str) -> None:
    assert exit_status(returncode) == status
    assert describe_end(returncode) == words


def test_prefixes_line_up_whatever_the_name() -> None:
    assert log_prefix("node0", 10) == "[node0]      "
    assert len(log_prefix("controller", 10)) == len(log_prefix("node0", 10))
    assert log_prefix("node0", 5, color=36) == "\x1b[36m[node0]\x1b[0m "
