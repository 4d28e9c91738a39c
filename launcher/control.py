"""Questions to a running cluster: who are you, and please end. One connection, one request, one answer."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dtorch_launcher.plan import ENV_KEYS, ENV_SESSION_KEY, parse_session_key
from dtorch_runtime.errors import ClusterTimeout, HandshakeError, SecurityError
from dtorch_runtime.transport.security import CurveKeys, load_keys
from dtorch_runtime.transport.zeromq import ZmqThreadLink
from dtorch_runtime.wire.codec import decode_to_client, encode
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClusterClosing,
    Refused,
    Status,
    StatusRequest,
    StopCluster,
)

_Answer = TypeVar("_Answer", Status, ClusterClosing)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What proves that a process belongs to a cluster. ``keys`` are needed where strangers can reach it."""

    session_key: bytes = field(repr=False)
    keys: CurveKeys | None = field(default=None, repr=False)


def find_credentials(
    keys_folder: str | None, role: str, environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """The credentials of a key folder (option, then environment), or the session key of the environment.

    Returns:
        None when there is neither.

    Raises:
        SecurityError: the folder has no usable file for ``role``.
        SettingError: the session key in the environment is malformed.
    """
    folder = keys_folder or environ.get(ENV_KEYS)
    if folder:
        keys = load_keys(folder, role)
        return Credentials(session_key=keys.session_key, keys=keys)
    if text := environ.get(ENV_SESSION_KEY):
        return Credentials(session_key=parse_session_key(text))
    return None


def require_credentials(
    keys_folder: str | None, role: str, environ: Mapping[str, str] = os.environ
) -> Credentials:
    """As ``find_credentials``, for a process that joins a cluster and cannot do without.

    Raises:
        SecurityError: there are none, or the folder has no usable file for ``role``.
        SettingError: the session key in the environment is malformed.
    """
    credentials = find_credentials(keys_folder, role, environ)
    if credentials is None:
        raise SecurityError(
            f"no keys were given, and the controller lets in only those who have them. Pass the folder that "
            f"`dtorch-launch keys` made with --keys FOLDER (or {ENV_KEYS}), or, on the controller's own machine, set "
            f"{ENV_SESSION_KEY} to what the controller printed when it started"
        )
    return credentials


def request_status(address: str, credentials: Credentials, timeout_s: float) -> Status:
    """Ask a controller what its cluster consists of.

    Raises:
        ClusterTimeout: nothing answers at ``address`` in time.
        HandshakeError: it refuses the session key or speaks another version.
        SecurityError, TransportError: as ``ZmqThreadLink.connect``.
    """
    request = StatusRequest(version=PROTOCOL_VERSION, session_key=credentials.session_key)
    return _ask(address, credentials, request, Status, timeout_s)


def stop_cluster(address: str, credentials: Credentials, timeout_s: float) -> str:
    """Ask a controller to end its cluster, and return the reason that it gives to everybody.

    Raises:
        As ``request_status``.
    """
    request = StopCluster(version=PROTOCOL_VERSION, session_key=credentials.session_key)
    return _ask(address, credentials, request, ClusterClosing, timeout_s).reason


def _ask(
    address: str,
    credentials: Credentials,
    request: StatusRequest | StopCluster,
    answer_type: type[_Answer],
    timeout_s: float,
) -> _Answer:
    deadline_s = time.monotonic() + timeout_s
    link = ZmqThreadLink.connect(address, keys=credentials.keys, timeout_s=timeout_s)
    try:
        link.send([encode(request)])
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            for frames in link.receive(remaining_s):
                message = decode_to_client(frames[0])
                if isinstance(message, Refused):
                    raise HandshakeError(f"the controller at {address} refused: {message.reason}")
                if isinstance(message, answer_type):
                    return message
        raise ClusterTimeout(
            f"the controller at {address} to answer", timeout_s, "It is connected; is it overloaded?"
        )
    finally:
        link.close()
