"""What each command of ``dtorch-launch`` does, from checked arguments to an exit status."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from rich.console import Console

from dtorch_launcher.control import (
    Credentials,
    find_credentials,
    request_status,
    require_credentials,
    stop_cluster,
)
from dtorch_launcher.hosts import check_program, own_address, visible_gpus
from dtorch_launcher.plan import (
    CONTROLLER,
    ENV_SESSION_KEY,
    NodePlan,
    Program,
    check_count,
    check_device_type,
    check_node_name,
    plan_nodes,
    program_environment,
)
from dtorch_launcher.processes import Foreground, Launch, Logs, Service, Spec, own_python
from dtorch_launcher.report import status_json, status_summary, status_table
from dtorch_launcher.services import agent_service, controller_service
from dtorch_launcher.solo import SoloSupervisor
from dtorch_launcher.supervise import PROGRAM, Supervisor
from dtorch_runtime.errors import SettingError
from dtorch_runtime.local import default_devices
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.endpoint import make_ipc_folder, parse_endpoint, require_keys
from dtorch_runtime.transport.security import new_session_key, write_keys

_SERVER, _CLIENT = "server", "client"
#: An agent that joins by itself is taken to be one of several.
_ONE_OF_SEVERAL = 2


def run_program(program: Program, num_nodes: int, devices_per_node: int | None, device_type: str) -> int:
    """Run a program on a new cluster of this machine, and return its exit status.

    Raises:
        SettingError: the cluster cannot be, or the program is not there. Nothing was started.
    """
    settings = Settings.from_environment()
    check_device_type(device_type)
    gpus = visible_gpus(os.environ) if device_type == "cuda" else None
    check_count("--nodes", num_nodes)
    if devices_per_node is None:
        devices_per_node = default_devices(num_nodes) if gpus is None else max(1, len(gpus) // num_nodes)
    nodes = {node.name: node for node in plan_nodes(num_nodes, devices_per_node, device_type, gpus)}
    check_program(program, Path.cwd())

    # One for each process: each removes its own, and only its own, if the launcher is killed.
    folders = {name: str(make_ipc_folder()) for name in (CONTROLLER, *nodes)}
    address = f"ipc://{folders[CONTROLLER]}/controller"
    credentials = Credentials(session_key=new_session_key())
    environment = program_environment(os.environ, address=address, session_key=credentials.session_key)

    def spec_of(name: str) -> Spec:
        if name == PROGRAM:
            return Foreground(command=program.command(own_python()), environment=environment)
        folder = folders[name]
        if name == CONTROLLER:
            return controller_service(address, credentials, None, settings, folder)
        return agent_service(
            nodes[name],
            address,
            credentials,
            None,
            settings,
            data_address=f"ipc://{folder}/data",
            folder=folder,
        )

    supervisor = Supervisor(
        agents=tuple(nodes), start_timeout_s=settings.start_timeout_s, stop_timeout_s=settings.stop_timeout_s
    )
    logs = Logs([CONTROLLER, *nodes], sys.stderr)
    try:
        return Launch(supervisor, spec_of, logs, check=settings.check).run()
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def run_controller(address: str, keys_folder: Path | None) -> int:
    """Run a controller until it ends or a signal asks for its end, and return its exit status.

    Raises:
        SecurityError: strangers could reach the address and there are no keys, or the folder has none.
        SettingError, TransportError: the session key or the address is malformed. Nothing was started.
    """
    settings = Settings.from_environment()
    endpoint = parse_endpoint(address)
    folder = _absolute(keys_folder)
    credentials = find_credentials(folder, _SERVER)
    require_keys(endpoint, has_keys=credentials is not None and credentials.keys is not None, action="bind")
    announcement = "the controller listens at {endpoint}; Ctrl-C ends the cluster"
    if credentials is None:
        credentials = Credentials(session_key=new_session_key())
        # Only this machine can reach the address, and only who has the key is let in: somebody has to be told.
        announcement += f". For agents and programs: export {ENV_SESSION_KEY}={credentials.session_key.hex()}"
    service = controller_service(address, credentials, folder, settings)
    return _run_alone(CONTROLLER, service, settings, f"the controller to listen at {address}", announcement)


def run_agent(
    address: str,
    name: str | None,
    num_devices: int | None,
    device_type: str,
    data_address: str | None,
    keys_folder: Path | None,
) -> int:
    """Run a node agent until its cluster ends or a signal asks for its end, and return its exit status.

    Raises:
        SecurityError: there are no credentials, or no usable ones.
        SettingError, TransportError: an argument cannot be. Nothing was started.
    """
    settings = Settings.from_environment()
    check_device_type(device_type)
    num_gpus = len(visible_gpus(os.environ)) if device_type == "cuda" else None
    if num_devices is None:
        num_devices = default_devices(_ONE_OF_SEVERAL) if num_gpus is None else max(1, num_gpus)
    check_count("--devices", num_devices)
    if num_gpus is not None and num_devices > num_gpus:
        raise SettingError(
            f"--devices {num_devices} --device-type cuda: this machine shows {num_gpus} GPUs. Ask for fewer, or use "
            f"--device-type cpu, whose devices are virtual"
        )
    name = socket.gethostname() if name is None else name
    check_node_name(name)
    endpoint = parse_endpoint(address)
    if data_address is not None:
        parse_endpoint(data_address)
    folder = _absolute(keys_folder)
    credentials = require_credentials(folder, _CLIENT)
    node = NodePlan(name=name, num_devices=num_devices, device_type=device_type)
    service = agent_service(
        node,
        address,
        credentials,
        folder,
        settings,
        data_address=data_address or own_address(endpoint),
    )
    announcement = f"{name} has joined {{endpoint}} with {num_devices} {device_type} device(s); Ctrl-C leaves"
    return _run_alone(name, service, settings, f"{name} to join {address}", announcement)


def show_status(address: str, keys_folder: Path | None, timeout_s: float, *, as_json: bool) -> None:
    """Print what a cluster consists of.

    Raises:
        ClusterTimeout: nothing answers in time.
        SecurityError, HandshakeError, TransportError: it cannot be asked, or refuses to say.
    """
    credentials = require_credentials(_absolute(keys_folder), _CLIENT)
    status = request_status(address, credentials, timeout_s)
    if as_json:
        print(status_json(address, status))
    else:
        console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        console.print(status_summary(address, status), markup=False)
        if status.nodes:
            console.print(status_table(status))


def stop(address: str, keys_folder: Path | None, timeout_s: float) -> None:
    """End a cluster. Raises as ``show_status``."""
    credentials = require_credentials(_absolute(keys_folder), _CLIENT)
    stop_cluster(address, credentials, timeout_s)
    print(f"the cluster at {address} ends")


def make_keys(folder: Path) -> None:
    """Make the keys of a cluster.

    Raises:
        SecurityError: there are keys already, or the folder cannot be written.
    """
    for path in write_keys(folder):
        print(path)
    print(
        f"server.json stays with the controller; copy client.json to a folder of every other machine (scp -r {folder})"
    )


def _run_alone(name: str, service: Service, settings: Settings, ready_means: str, announcement: str) -> int:
    solo = SoloSupervisor(
        name=name,
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
        ready_means=ready_means,
        announcement=announcement,
    )
    return Launch(solo, lambda _: service, Logs([name], sys.stderr), check=settings.check).run()


def _absolute(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.absolute())
