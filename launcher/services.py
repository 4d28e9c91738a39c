"""How the processes of a cluster are started: ``python -m dtorch_runtime.process``, configured through its input.

Secrets go through the input as well: command lines are visible to every user of the machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import msgspec

from dtorch_launcher.control import Credentials
from dtorch_launcher.plan import CONTROLLER, NodePlan
from dtorch_launcher.processes import Service, own_python
from dtorch_runtime.process import ProcessConfig
from dtorch_runtime.settings import Settings
from dtorch_runtime.worker.memory import keeping_environment


class _ReadyLine(msgspec.Struct, frozen=True):
    """What a process writes to its standard output once it listens, or has joined."""

    ready: bool
    endpoint: str


def controller_service(
    address: str,
    credentials: Credentials,
    keys_folder: str | None,
    settings: Settings,
    folder: str | None = None,
) -> Service:
    """The controller of a cluster, bound to ``address``.

    Args:
        folder: removed by the process at its end, should the launcher be gone by then.
    """
    config = _config("controller", address, credentials, keys_folder, settings, folder=folder)
    return _service(config, CONTROLLER, {})


def agent_service(
    node: NodePlan,
    address: str,
    credentials: Credentials,
    keys_folder: str | None,
    settings: Settings,
    *,
    data_address: str,
    folder: str | None = None,
) -> Service:
    """The agent of ``node``, which joins the controller at ``address``.

    Args:
        data_address: where other nodes reach this one.
        folder: as for the controller.
    """
    config = _config(
        "agent",
        address,
        credentials,
        keys_folder,
        settings,
        node_name=node.name,
        num_devices=node.num_devices,
        device_type=node.device_type,
        data_endpoint=data_address,
        folder=folder,
    )
    return _service(config, node.name, node.environment)


def ready_endpoint(line: bytes) -> str | None:
    """The address in a ready line; None for any other line."""
    try:
        ready = msgspec.json.decode(line, type=_ReadyLine)
    except msgspec.DecodeError:
        return None
    return ready.endpoint if ready.ready else None


def _config(
    role: Any,
    address: str,
    credentials: Credentials,
    keys_folder: str | None,
    settings: Settings,
    **more: Any,
) -> ProcessConfig:
    has_keys = credentials.keys is not None
    return ProcessConfig(
        role=role,
        endpoint=address,
        session_key="" if has_keys else credentials.session_key.hex(),
        key_folder=keys_folder if has_keys else None,
        settings=asdict(settings),
        **more,
    )


def _service(config: ProcessConfig, name: str, environment: dict[str, str]) -> Service:
    inherited = keeping_environment(os.environ) if config.settings["keep_memory"] else os.environ
    return Service(
        # -P: modules in the user's folder must not stand in for those that the process imports. The name is for ps.
        command=[own_python(), "-P", "-m", "dtorch_runtime.process", name],
        environment={**inherited, **environment},
        config_line=msgspec.json.encode(config) + b"\n",
        ready_endpoint=ready_endpoint,
    )
