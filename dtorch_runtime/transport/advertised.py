"""Where a peer reaches an address that was bound to every interface of its machine."""

from __future__ import annotations

from dtorch_runtime.transport.endpoint import parse_endpoint

_EVERY_INTERFACE = ("*", "0.0.0.0", "::")


def as_seen_from(advertised: str, controller: str) -> str:
    """An address of the controller's machine, its host taken from the address that reaches the controller.

    Args:
        advertised: what the controller says, e.g. ``tcp://0.0.0.0:5556``; it cannot know under which name others
            reach it. Any other address is returned as it is.
        controller: the address that this process connected to, e.g. ``tcp://10.0.0.1:5555``.

    Raises:
        TransportError: one of them is no address.
    """
    endpoint = parse_endpoint(advertised)
    if endpoint.scheme != "tcp" or endpoint.host not in _EVERY_INTERFACE:
        return advertised
    host = parse_endpoint(controller).host
    return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.port}"
