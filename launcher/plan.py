"""What a command line asks for, before anything is started: nodes, the program, its environment. Pure."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.mesh import DEVICE_TYPES

#: Subcommands of dtorch-launch. Whatever else comes first is a script, or an option of ``run``.
SUBCOMMANDS = ("run", "controller", "agent", "status", "stop", "keys")
CONTROLLER = "controller"

#: How a program finds the cluster that it was launched on; ``dtorch.init()`` reads them.
ENV_ADDRESS = "DTORCH_ADDRESS"
ENV_SESSION_KEY = "DTORCH_SESSION_KEY"
ENV_KEYS = "DTORCH_KEYS"

#: Exit status when dtorch-launch could not do what it was asked to; the program was not run.
EXIT_REFUSED = 2

_MAX_NODES = 1024
_MAX_DEVICES_PER_NODE = 1024
_SIGNAL_STATUS_BASE = 128
_OWN_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node agent to start. ``visible_devices`` are the machine's GPUs that it may use, None for all."""

    name: str
    num_devices: int
    device_type: str
    visible_devices: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the agent's environment has beside the launcher's own."""
        if self.visible_devices is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.visible_devices)}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run on the cluster: a script, or with ``is_module`` the name of a module."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def command(self, python: str) -> list[str]:
        """The command line that runs it under the interpreter ``python``."""
        return [python, *(["-m"] if self.is_module else []), self.target, *self.args]


def with_default_command(argv: Sequence[str]) -> list[str]:
    """Put ``run`` before a command line that names no subcommand, so that a script can come first."""
    if not argv:
        return ["--help"]
    is_named = argv[0] in SUBCOMMANDS or argv[0].partition("=")[0] in _OWN_OPTIONS
    return list(argv) if is_named else ["run", *argv]


def plan_nodes(
    num_nodes: int, devices_per_node: int, device_type: str, gpus: Sequence[str] | None = None
) -> tuple[NodePlan, ...]:
    """The nodes of a cluster on one machine: ``node0``, ``node1``, ... with the machine's GPUs dealt out in order.

    Args:
        gpus: this machine's GPUs as CUDA_VISIBLE_DEVICES names them; None if unknown, and then nothing is dealt out.

    Raises:
        SettingError: a number or the device type cannot be, or there are not that many GPUs.
    """
    check_count("--nodes", num_nodes, _MAX_NODES)
    check_count("--devices-per-node", devices_per_node, _MAX_DEVICES_PER_NODE)
    check_device_type(device_type)
    num_wanted = num_nodes * devices_per_node
    if device_type != "cuda":
        gpus = None
    if gpus is not None and num_wanted > len(gpus):
        raise SettingError(
            f"--nodes {num_nodes} --devices-per-node {devices_per_node} needs {num_wanted} GPUs, this machine "
            f"shows {len(gpus)}. Ask for fewer, or use --device-type cpu, whose devices are virtual"
        )
    nodes = []
    for index in range(num_nodes):
        first = index * devices_per_node
        nodes.append(
            NodePlan(
                name=f"node{index}",
                num_devices=devices_per_node,
                device_type=device_type,
                visible_devices=None if gpus is None else tuple(gpus[first : first + devices_per_node]),
            )
        )
    return tuple(nodes)


def check_count(option: str, value: int, maximum: int = _MAX_DEVICES_PER_NODE) -> None:
    """Refuse a count that no cluster can have.

    Raises:
        SettingError: naming the option.
    """
    if not 1 <= value <= maximum:
        raise SettingError(f"{option} takes a whole number from 1 to {maximum}, got {value}")


def check_device_type(device_type: str) -> None:
    """Refuse a kind of device that workers do not have.

    Raises:
        SettingError: naming the kinds there are.
    """
    if device_type not in DEVICE_TYPES:
        raise SettingError(f"--device-type takes {' or '.join(DEVICE_TYPES)}, got {device_type!r}")


def check_node_name(name: str) -> None:
    """Refuse a name that could not be told apart in logs and tables.

    Raises:
        SettingError: it is empty, long, not printable, or the controller's.
    """
    is_plain = name.isascii() and all(c.isalnum() or c in "-_." for c in name)
    if not name or len(name) > 64 or not is_plain or name == CONTROLLER:
        raise SettingError(
            f"--name takes up to 64 letters, digits, '-', '_' and '.', and not {CONTROLLER!r}; got {name!r}. "
            f"For example: --name node1"
        )


def missing_program(program: Program) -> SettingError:
    """The error for a program that is not there, with the subcommand that was perhaps meant."""
    if program.is_module:
        return SettingError(
            f"no module named {program.target!r} can be run here. Write -m with a module, or a package that has "
            f"__main__, as for python -m; the current folder is searched too"
        )
    near = difflib.get_close_matches(program.target, SUBCOMMANDS, n=1)
    meant = f"Did you mean the subcommand {near[0]!r}? " if near else ""
    return SettingError(
        f"there is no script {program.target!r}. {meant}Write dtorch-launch [OPTIONS] SCRIPT [ARGUMENTS] with the path "
        f"of a Python file, -m MODULE, or one of the subcommands: {', '.join(SUBCOMMANDS)}"
    )


def program_environment(
    base: Mapping[str, str], *, address: str, session_key: bytes, keys: str | None = None
) -> dict[str, str]:
    """The environment in which ``dtorch.init()`` joins the cluster at ``address``.

    Variables of another cluster that ``base`` may carry do not stay.
    """
    environment = {name: value for name, value in base.items() if name != ENV_KEYS}
    environment |= {ENV_ADDRESS: address, ENV_SESSION_KEY: session_key.hex()}
    return environment if keys is None else environment | {ENV_KEYS: keys}


def parse_session_key(text: str) -> bytes:
    """The session key in the environment variable's text form, hexadecimal.

    Raises:
        SettingError: it is not hexadecimal, or empty. The value is not shown.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key:
        raise SettingError(
            f"{ENV_SESSION_KEY} takes hexadecimal digits, as the controller printed them; "
            f"got {len(text)} characters that are not"
        )
    return key


def exit_status(returncode: int) -> int:
    """A shell's exit status for a subprocess return code: 128 + n for a process that signal n ended."""
    return _SIGNAL_STATUS_BASE - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """How a process ended, to follow its name: ``ended with status 3``, ``was ended by SIGKILL``."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def log_prefix(name: str, width: int, color: int | None = None) -> str:
    """What stands before each line of a process's log; ``color`` is an ANSI foreground number."""
    text = f"[{name}]".ljust(width + 2)
    return f"{text} " if color is None else f"\x1b[{color}m{text}\x1b[0m "
