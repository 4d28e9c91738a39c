"""Addresses: which kind they are, whether strangers can reach them, and the folder an ipc socket lives in."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dtorch_runtime.errors import SecurityError, TransportError

_MAX_IPC_PATH_BYTES = 107  # sun_path of a Unix socket, less its closing zero
_ALLOWED = "ipc:///folder/name.sock, tcp://host:port or tcp://[ipv6]:port (port * to bind any free one)"


@dataclass(frozen=True)
class Endpoint:
    """A parsed address. ``path`` is set for ipc, ``host`` (without brackets) and ``port`` for tcp."""

    text: str
    scheme: str
    path: str = ""
    host: str = ""
    port: str = ""

    @property
    def is_private(self) -> bool:
        """True when only processes of this machine can reach it: ipc and loopback addresses."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False  # `*`, an interface or a name: it may be anything
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host


def parse_endpoint(text: str) -> Endpoint:
    """Parse an address.

    Raises:
        TransportError: it is none that DTorch uses.
    """
    scheme, separator, rest = text.partition("://")
    if scheme == "ipc" and separator:
        if not os.path.isabs(rest):
            raise TransportError(
                f"address {text!r}: the path of an ipc address must be absolute. Allowed: {_ALLOWED}"
            )
        if len(os.fsencode(rest)) > _MAX_IPC_PATH_BYTES:
            raise TransportError(
                f"address {text!r}: a Unix socket's path has at most {_MAX_IPC_PATH_BYTES} bytes, this one has "
                f"{len(os.fsencode(rest))}. Use a shorter folder, for example by setting TMPDIR"
            )
        return Endpoint(text, "ipc", path=rest)
    if scheme == "tcp" and separator and ";" not in rest:
        host, colon, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        plain_host = host[1:-1] if bracketed else host
        is_port = port == "*" or (port.isascii() and port.isdigit() and int(port) <= 65535)
        if colon and plain_host and is_port and (bracketed or ":" not in plain_host):
            return Endpoint(text, "tcp", host=plain_host, port=port)
    raise TransportError(f"address {text!r} is not one that DTorch uses. Allowed: {_ALLOWED}")


def require_keys(endpoint: Endpoint, *, has_keys: bool, action: str) -> None:
    """Refuse an address that strangers can reach when there are no keys.

    Raises:
        SecurityError: with the way to get keys.
    """
    if not has_keys and not endpoint.is_private:
        raise SecurityError(
            f"refused to {action} {endpoint.text} without keys: machines other than this one can reach it. "
            f"Run `dtorch-launch keys FOLDER` and pass the folder with `--keys FOLDER`, or use an ipc:// or "
            f"tcp://127.0.0.1 address"
        )


def make_ipc_folder() -> Path:
    """Make a new folder that only this user can enter, for ipc sockets. Whoever asked for it removes it."""
    return Path(tempfile.mkdtemp(prefix="dtorch-"))  # mkdtemp makes it with mode 0700


def prepare_ipc_bind(endpoint: Endpoint) -> None:
    """Make the socket's folder if it is missing, and check that nobody else can enter it or listens there.

    Raises:
        SecurityError: the folder is open to other users.
        TransportError: it cannot be made, or a live process has bound this address.
    """
    folder = os.path.dirname(endpoint.path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        raise TransportError(f"cannot make the folder of {endpoint.text}: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise SecurityError(
            f"refused to bind {endpoint.text}: {folder} has mode {mode:04o} and owner {status.st_uid}, so that other "
            f"users could reach the socket. Use a folder of your own with mode 0700 (`chmod 700 {folder}`)"
        )
    # ZeroMQ would silently take the address away from a process that still listens there.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(endpoint.path) == 0:
            raise TransportError(
                f"cannot bind {endpoint.text}: another process listens there. Choose another path"
            )
