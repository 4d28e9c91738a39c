"""Key files and session keys."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from dtorch_runtime.errors import SecurityError
from dtorch_runtime.transport.security import load_keys, new_session_key, same_session_key, write_keys
from dtorch_runtime.transport.zap import _AccessControl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys", ["client", "agent"])
    return tmp_path / "keys"


def test_files_are_private_from_the_moment_they_exist(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        paths = write_keys(tmp_path / "deep" / "keys")
    finally:
        os.umask(old_mask)
    assert [path.name for path in paths] == ["server.json", "client.json"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700


def test_the_files_of_one_call_belong_together(folder: Path) -> None:
    server, client, agent = (load_keys(folder, role) for role in ("server", "client", "agent"))
    assert server.allowed_clients == {client.public_key, agent.public_key}
    assert client.server_public_key == agent.server_public_key == server.public_key
    assert server.session_key == client.session_key == agent.session_key
    assert len({server.secret_key, client.secret_key, agent.secret_key}) == 3
    for keys in (server, client, agent):
        assert zmq.curve_public(keys.secret_key) == keys.public_key


def test_secrets_do_not_show_in_a_repr(folder: Path) -> None:
    keys = load_keys(folder, "client")
    assert keys.secret_key.decode() not in repr(keys)
    assert repr(keys.session_key) not in repr(keys)


def test_holders_of_one_client_file_can_speak_to_each_other(folder: Path) -> None:
    keys = load_keys(folder, "client").among_clients()
    assert keys.allowed_clients == {keys.public_key}
    assert keys.server_public_key == keys.public_key


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = (folder / "server.json").read_bytes()
    with pytest.raises(SecurityError, match="never overwritten"):
        write_keys(folder)
    assert (folder / "server.json").read_bytes() == before


@pytest.mark.parametrize("names", [[], ["server"], [""], ["../escape"], ["a/b"], [".."]])
def test_bad_names_write_nothing(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(SecurityError):
        write_keys(tmp_path / "keys", names)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "client.json").chmod(mode)
    with pytest.raises(SecurityError, match="chmod 600"):
        load_keys(folder, "client")


def test_a_missing_file_names_those_that_are_there(folder: Path) -> None:
    with pytest.raises(SecurityError, match="agent, client, server"):
        load_keys(folder, "clinet")
    with pytest.raises(SecurityError, match=r"nobody.*dtorch-launch keys"):
        load_keys(folder / "elsewhere", "client")


def change(**fields: object):
    return lambda content: {**content, **fields}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda _: [], id="a list"),
        pytest.param(lambda _: {}, id="nothing"),
        pytest.param(change(format=2), id="a later format"),
        pytest.param(change(public_key="short"), id="a short key"),
        pytest.param(change(secret_key="é" * 40), id="not ascii"),
        pytest.param(change(session_key="not hex"), id="session key not hex"),
        pytest.param(change(session_key=""), id="no session key"),
        pytest.param(change(extra=1), id="an unknown field"),
        pytest.param(change(server_public_key=None, public_key=None), id="no key"),
    ],
)
def test_a_malformed_file_is_refused_by_name(folder: Path, changed) -> None:
    path = folder / "client.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()))))
    with pytest.raises(SecurityError, match=r"client\.json"):
        load_keys(folder, "client")


def test_a_file_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "client.json").write_bytes(b"\xff\x00")
    with pytest.raises(SecurityError, match="not a key file"):
        load_keys(folder, "client")


def test_session_keys_are_random_and_compared_whole() -> None:
    key = new_session_key()
    assert len(key) == 32
    assert key != new_session_key()
    assert same_session_key(key, bytes(key))
    for other in (b"", key[:-1], key + b"x", new_session_key()):
        assert not same_session_key(other, key)
    assert not same_session_key(b"", b"")


# ------------------------------------------------------------------------------------------------ access control


def request(domain: bytes, key: bytes, *, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"7", domain, b"127.0.0.1", b"", mechanism, key]


@pytest.mark.parametrize(
    "question, status",
    [
        pytest.param(request(b"d", bytes(32)), b"200", id="allowed"),
        pytest.param(request(b"d", b"\1" * 32), b"400", id="another key"),
        pytest.param(request(b"e", bytes(32)), b"400", id="another domain"),
        pytest.param(request(b"", bytes(32)), b"400", id="no domain"),
        pytest.param(request(b"d", bytes(31)), b"400", id="a short key"),
        pytest.param(request(b"d", bytes(32), mechanism=b"NULL"), b"400", id="no mechanism"),
        pytest.param(request(b"d", bytes(32))[:6], b"400", id="no key"),
        pytest.param([*request(b"d", bytes(32)), b""], b"400", id="too much"),
    ],
)
def test_only_a_listed_key_of_this_server_is_let_in(question: list[bytes], status: bytes) -> None:
    access = _AccessControl()
    access._allowed[b"d"] = frozenset({z85.encode(bytes(32))})
    answer = access.answer(question)
    assert len(answer) == 6
    assert answer[:3] == [b"1.0", b"7", status]
