"""Keys: CURVE key files for sockets that strangers can reach, and the session key of the handshake.

``write_keys`` makes a folder with one file a role: ``server.json`` for the controller's machine, ``client.json`` for
agents and clients. A machine needs only its own file. The server lets in exactly the clients that its file lists.
CURVE is ZeroMQ's encryption and authentication, https://rfc.zeromq.org/spec/26/; keys are in its Z85 text form.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from dtorch_runtime.errors import SecurityError
from dtorch_runtime.transport.zap import grant_access

_FORMAT = 1
_SERVER = "server"
_KEY_CHARACTERS = 40  # 32 bytes in Z85
_SESSION_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """One side's keys. ``allowed_clients`` is set for servers, ``server_public_key`` for clients."""

    public_key: bytes
    secret_key: bytes = field(repr=False)
    session_key: bytes = field(repr=False)
    allowed_clients: frozenset[bytes] = frozenset()
    server_public_key: bytes | None = None

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is about to be bound accept only the allowed clients."""
        if not self.allowed_clients:
            raise SecurityError(
                f"these keys allow no client: bind with those of {_SERVER}.json, not a client's"
            )
        grant_access(socket, self.allowed_clients)
        socket.curve_secretkey = self.secret_key
        socket.curve_publickey = self.public_key
        socket.curve_server = True

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is about to connect prove its key, and accept only the server of these keys."""
        if self.server_public_key is None:
            raise SecurityError(
                f"these keys name no server: connect with a client's, not those of {_SERVER}.json"
            )
        socket.curve_secretkey = self.secret_key
        socket.curve_publickey = self.public_key
        socket.curve_serverkey = self.server_public_key

    def among_clients(self) -> CurveKeys:
        """Keys to bind and connect with between holders of this same client file: agents' data connections."""
        return CurveKeys(
            public_key=self.public_key,
            secret_key=self.secret_key,
            session_key=self.session_key,
            allowed_clients=frozenset({self.public_key}),
            server_public_key=self.public_key,
        )


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key file holds, as JSON."""

    format: int
    public_key: str
    secret_key: str
    session_key: str
    allowed_clients: dict[str, str] = {}
    server_public_key: str | None = None


def write_keys(folder: str | os.PathLike[str], client_names: Sequence[str] = ("client",)) -> list[Path]:
    """Make new keys: ``server.json``, and one file for each name that the server lets in.

    Args:
        folder: made with mode 0700 if it is missing. The files get mode 0600.

    Returns:
        The files written.

    Raises:
        SecurityError: a file is there already (keys are never overwritten), or a name cannot be a file's.
    """
    for name in client_names:
        if name == _SERVER or not _NAME.fullmatch(name):
            raise SecurityError(
                f"{name!r} cannot name a client's keys: use letters, digits, - and _, but not {_SERVER!r}"
            )
    if not client_names:
        raise SecurityError("no client was named: a server that lets nobody in is of no use")
    folder = Path(folder)
    paths = [folder / f"{name}.json" for name in (_SERVER, *client_names)]
    for path in paths:
        if path.exists():
            raise SecurityError(
                f"{path} exists and keys are never overwritten. Remove it, or give a new folder"
            )
    session_key = new_session_key().hex()
    server_public, server_secret = _new_pair()
    pairs = {name: _new_pair() for name in client_names}
    server = _KeyFile(
        _FORMAT,
        server_public,
        server_secret,
        session_key,
        {name: public for name, (public, _) in pairs.items()},
    )
    clients = [
        _KeyFile(_FORMAT, public, secret, session_key, server_public_key=server_public)
        for public, secret in pairs.values()
    ]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content in zip(paths, (server, *clients), strict=True):
            _write_private(path, msgspec.json.format(msgspec.json.encode(content)))
    except OSError as error:
        raise SecurityError(f"cannot write keys to {folder}: {error}") from error
    return paths


def load_keys(folder: str | os.PathLike[str], role: str) -> CurveKeys:
    """Read the keys of ``role``: ``"server"``, ``"client"``, or another name given to ``write_keys``.

    Raises:
        SecurityError: the file is missing, malformed, of another version, or readable by other users.
    """
    path = Path(folder) / f"{role}.json"
    content = _read_private(path)
    try:
        file = msgspec.json.decode(content, type=_KeyFile)
        if file.format != _FORMAT:
            raise SecurityError(
                f"{path} has format {file.format}, this version reads {_FORMAT}: make new keys"
            )
        return CurveKeys(
            public_key=_key(file.public_key),
            secret_key=_key(file.secret_key),
            session_key=_session_key(file.session_key),
            allowed_clients=frozenset(_key(key) for key in file.allowed_clients.values()),
            server_public_key=None if file.server_public_key is None else _key(file.server_public_key),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise SecurityError(
            f"{path} is not a key file: {error}. Make one with `dtorch-launch keys`"
        ) from error


def new_session_key() -> bytes:
    """A random key (32 bytes) that proves in the handshake that both sides belong to one cluster."""
    return secrets.token_bytes(_SESSION_KEY_BYTES)


def same_session_key(given: bytes, expected: bytes) -> bool:
    """Compare two session keys in a time that does not tell where they differ. An empty key equals none."""
    return bool(expected) and hmac.compare_digest(given, expected)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def _key(text: str) -> bytes:
    if len(text) != _KEY_CHARACTERS or not text.isascii():
        raise ValueError(f"a key has {_KEY_CHARACTERS} characters, one of {len(text)} was found")
    return text.encode("ascii")


def _session_key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != _SESSION_KEY_BYTES:
        raise ValueError(f"a session key has {_SESSION_KEY_BYTES} bytes, one of {len(key)} was found")
    return key


def _write_private(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(content)


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & 0o077:
                raise SecurityError(
                    f"{path} has mode {mode:04o}: other users could read the secret key. Run `chmod 600 {path}`"
                )
            return stream.read()
    except FileNotFoundError:
        found: list[Any] = sorted(file.stem for file in path.parent.glob("*.json"))
        raise SecurityError(
            f"there is no key file {path}; the folder holds keys for: {', '.join(found) or 'nobody'}. "
            f"Make keys with `dtorch-launch keys {path.parent}`"
        ) from None
    except OSError as error:
        raise SecurityError(f"cannot read {path}: {error}") from error
