"""Joins a cluster: connect, say hello, watch the controller's heartbeat. Torch is not needed here."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import msgspec

from dtorch_runtime.errors import ClusterTimeout, HandshakeError
from dtorch_runtime.settings import Settings
from dtorch_runtime.transport.advertised import as_seen_from
from dtorch_runtime.transport.base import LinkLimits
from dtorch_runtime.transport.heartbeat import HeartbeatClient
from dtorch_runtime.transport.security import CurveKeys
from dtorch_runtime.transport.zeromq import ZmqThreadLink
from dtorch_runtime.wire.codec import decode_to_client, encode
from dtorch_runtime.wire.messages import PROTOCOL_VERSION, ClientHello, Refused, Welcome


def join(
    address: str, session_key: bytes, keys: CurveKeys | None, settings: Settings
) -> tuple[ZmqThreadLink, Welcome]:
    """A connected link, and what the controller answered.

    Raises:
        ClusterTimeout: nothing answers at ``address`` within ``start_timeout_s``.
        HandshakeError: the controller refuses this client, or what answers is no controller.
        SecurityError: keys are missing or do not match.
        TransportError: the address is malformed.
    """
    deadline_s = time.monotonic() + settings.start_timeout_s
    # Uploads are bounded by credits; the link must not block on top of that.
    limits = LinkLimits(max_unsent_bytes=4 * settings.max_outstanding_bytes)
    link = ZmqThreadLink.connect(address, keys=keys, limits=limits, timeout_s=settings.start_timeout_s)
    try:
        hello = ClientHello(
            version=PROTOCOL_VERSION,
            session_key=session_key,
            host=socket.gethostname(),
            pid=os.getpid(),
            passes=list(settings.pass_names),
        )
        link.send([encode(hello)])
        while True:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise ClusterTimeout(f"the controller at {address} to answer", settings.start_timeout_s)
            for message in link.receive(remaining_s):
                answer = decode_to_client(message[0])
                if isinstance(answer, Welcome):
                    heartbeats = as_seen_from(answer.heartbeat_endpoint, address)
                    return link, msgspec.structs.replace(answer, heartbeat_endpoint=heartbeats)
                if isinstance(answer, Refused):
                    raise HandshakeError(f"the controller at {address} refused this client: {answer.reason}")
    except BaseException:
        link.close()
        raise


def watch(
    welcome: Welcome,
    session_key: bytes,
    keys: CurveKeys | None,
    settings: Settings,
    on_lost: Callable[[], None],
) -> HeartbeatClient:
    """Beats for the session, and calls ``on_lost`` when the controller is silent for too long."""
    return HeartbeatClient(
        welcome.heartbeat_endpoint,
        f"session:{welcome.session}",
        session_key=session_key,
        interval_s=settings.heartbeat_interval_s,
        timeout_s=settings.heartbeat_timeout_s,
        on_lost=on_lost,
        keys=keys,
    )
