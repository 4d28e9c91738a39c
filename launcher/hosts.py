"""What this machine has: its GPUs, its terminal, and the programs that can be run on it. No torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtorch_launcher.plan import Program, missing_program
from dtorch_runtime.errors import TransportError
from dtorch_runtime.transport.endpoint import Endpoint

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_NVIDIA_DEVICE = re.compile(r"nvidia\d+")


def visible_gpus(
    environ: Mapping[str, str], *, driver: Path = _NVIDIA_GPUS, devices: Path = _DEVICES
) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; empty where there is none.

    Args:
        driver: where the driver lists the machine's GPUs; a container may hide it, and then ``devices`` counts.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for part in chosen.split(",") if (name := part.strip()) and name != "-1"]
    found = list(driver.iterdir()) if driver.is_dir() else []
    if not found and devices.is_dir():
        found = [path for path in devices.iterdir() if _NVIDIA_DEVICE.fullmatch(path.name)]
    return [str(index) for index in range(len(found))]


def check_program(program: Program, folder: Path) -> None:
    """Look whether a program is there, without running or importing any part of it.

    Raises:
        SettingError: it is not; the message says what to write.
    """
    if program.is_module:
        is_there = _has_module(program.target, [str(folder), *sys.path])
    else:
        path = folder / program.target
        is_there = path.is_file() or (path / "__main__.py").is_file()
    if not is_there:
        raise missing_program(program)


def _has_module(name: str, search_path: Sequence[str]) -> bool:
    """Whether ``python -m name`` would find it. ``find_spec`` of a dotted name would import its parents."""
    path: Sequence[str] | None = search_path
    spec: importlib.machinery.ModuleSpec | None = None
    for depth, part in enumerate(name.split(".")):
        if not part or path is None:
            return False
        full_name = part if spec is None else f"{spec.name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(full_name, path)
        if spec is None and depth == 0:
            # Builtin modules, and packages of finders that an editable installation adds.
            spec = importlib.util.find_spec(part)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    is_package = path is not None
    return not is_package or _has_module(f"{name}.__main__", search_path)


def is_terminal_foreground() -> bool:
    """Whether a Ctrl-C at the terminal reaches this process, and the program that shares its process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # no controlling terminal
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def own_address(controller: Endpoint) -> str:
    """A free tcp address of this machine that whoever reaches the controller reaches too; empty for ipc.

    Raises:
        TransportError: the controller's host has no address that this machine knows of.
    """
    if controller.scheme == "ipc":
        return ""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            controller.host, controller.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as route:
            route.connect(target)  # of a datagram socket: asks the routing table, sends nothing
            host = route.getsockname()[0]
        with socket.create_server((host, 0), family=family) as server:
            port = server.getsockname()[1]
    except OSError as error:
        raise TransportError(
            f"cannot find a way to {controller.text}: {error}. Is the host's name right? If this machine has several "
            f"addresses, give the one that the other nodes reach with --data-address tcp://HOST:PORT"
        ) from error
    return f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"
