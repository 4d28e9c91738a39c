"""What the events of a connection attempt mean."""

from __future__ import annotations

import pytest
import zmq

from dtorch_runtime.errors import DTorchError, HandshakeError, SecurityError
from dtorch_runtime.transport.connection import ConnectionProgress

ADDRESS = "tcp://head:5555"
MISMATCH = 0x11000002
HANGUP = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32)
RETRY = (zmq.EVENT_CONNECT_RETRIED, 20)
CONNECTED = (zmq.EVENT_CONNECTED, 9)
DONE = (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)


@pytest.mark.parametrize(
    "events",
    [[CONNECTED, DONE], [RETRY, RETRY, CONNECTED, DONE], [CONNECTED, HANGUP, RETRY, HANGUP, CONNECTED, DONE]],
)
def test_a_handshake_may_succeed_after_some_tries(events: list[tuple[int, int]]) -> None:
    progress = ConnectionProgress(ADDRESS, has_keys=True)
    for event in events[:-1]:
        progress.handle(*event)
        assert not progress.is_connected
    progress.handle(*events[-1])
    assert progress.is_connected


@pytest.mark.parametrize(
    "has_keys, events, error, message",
    [
        (True, [(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)], SecurityError, "refused this client's key"),
        (
            True,
            [(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, MISMATCH)],
            SecurityError,
            "with keys, the server runs without",
        ),
        (
            False,
            [(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, MISMATCH)],
            SecurityError,
            "without keys, the server runs with",
        ),
        (True, [(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000001)], SecurityError, "keys do not match"),
        (
            False,
            [(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x10000000)],
            HandshakeError,
            "does not speak DTorch's",
        ),
        (True, [CONNECTED, HANGUP] * 3, SecurityError, "Its key is probably not the one"),
        (False, [CONNECTED, HANGUP] * 3, HandshakeError, "probably not a DTorch process"),
    ],
)
def test_failures_name_their_cause_and_the_address(
    has_keys: bool, events: list[tuple[int, int]], error: type[DTorchError], message: str
) -> None:
    progress = ConnectionProgress(ADDRESS, has_keys=has_keys)
    for event in events[:-1]:
        progress.handle(*event)
    with pytest.raises(error, match=message) as caught:
        progress.handle(*events[-1])
    assert ADDRESS in str(caught.value)


@pytest.mark.parametrize(
    "events, hint",
    [
        ([], "Nothing answers"),
        ([RETRY], "Nothing answers"),
        ([CONNECTED], "does not complete"),
        ([HANGUP], "does not"),
    ],
)
def test_a_deadline_tells_how_far_it_came(events: list[tuple[int, int]], hint: str) -> None:
    progress = ConnectionProgress(ADDRESS, has_keys=False)
    for event in events:
        progress.handle(*event)
    assert hint in str(progress.timed_out(3.0))
    assert f"waited 3 s for a connection to {ADDRESS}" in str(progress.timed_out(3.0))
