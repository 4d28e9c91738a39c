"""Whom the controller lets in, and what it tells those that it does not. Decisions only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dtorch_runtime.passes.rewrite import PASSES
from dtorch_runtime.wire.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    NodeHello,
    StatusRequest,
    StopCluster,
)


class Violation(Exception):
    """A peer sent what the protocol does not allow; the text is what it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What does not change. ``is_session_key`` compares in constant time."""

    is_session_key: Callable[[bytes], bool]
    heartbeat_endpoint: str
    started_s: float
    check: bool = False
    #: As in ``Settings``.
    relay_min_nodes: int = 17
    relay_fanout: int = 8
    shared_window_ops: int = 2_048


def check_hello(
    config: ControllerConfig,
    message: ClientHello | NodeHello | StatusRequest | StopCluster,
    stop_reason: str | None,
) -> None:
    """Whether a stranger may say this.

    Raises:
        Violation: it speaks another version, has not the key, asks for what is not there, or the cluster closes.
    """
    if message.version != PROTOCOL_VERSION:
        raise Violation(
            f"the controller speaks version {PROTOCOL_VERSION} of the protocol, you speak {message.version}; "
            f"install the same version of dtorch on both sides"
        )
    if not config.is_session_key(message.session_key):
        raise Violation("the session key is not this cluster's; use the key files made for it")
    if stop_reason is not None:
        raise Violation(f"the cluster is closing: {stop_reason}")
    if isinstance(message, ClientHello) and not set(message.passes) <= set(PASSES):
        raise Violation(
            f"the passes of this controller are {', '.join(PASSES)}, you asked for {message.passes}"
        )
