"""Settings: one frozen dataclass, each field also an environment variable ``DTORCH_<FIELD>``."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dtorch_runtime.errors import SettingError

#: Variables that are no settings: they say which cluster a program joins.
OTHER_VARIABLES = frozenset(("DTORCH_ADDRESS", "DTORCH_KEYS", "DTORCH_SESSION_KEY"))
#: Passes over captured calls, in the order in which they run.
#: ``compile`` has a setting of its own.
PASS_NAMES = ("dead", "common", "redistribute", "bucket", "reorder", "reuse")
#: Unknown variables that were warned of; each is once.
_warned: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a cluster and its clients behave. Every number must be positive.

    Raises:
        SettingError: a value is not positive or not of its type.
    """

    #: Longest wait for a value, for ``sync()`` or for room in the op stream without any progress, in seconds.
    wait_timeout_s: float = 600.0
    #: Longest wait for a cluster to start or for a handshake, in seconds.
    start_timeout_s: float = 60.0
    #: Longest orderly shutdown before processes are killed, in seconds.
    stop_timeout_s: float = 5.0
    #: Time between two heartbeats, in seconds.
    heartbeat_interval_s: float = 0.5
    #: Silence after which a peer is lost, in seconds.
    heartbeat_timeout_s: float = 3.0
    #: Longest wait of a worker for its peers in one collective, in seconds.
    collective_timeout_s: float = 600.0
    #: Ops that may be issued ahead of the slowest device.
    max_outstanding_ops: int = 100_000
    #: The same, of a session or of a graph, while another one shares the cluster with it.
    shared_window_ops: int = 2_048
    #: Bytes of uploads that may be on the way.
    max_outstanding_bytes: int = 64 * 1024 * 1024
    #: Ops in a batch at most; a smaller one leaves when somebody waits or the program pauses.
    batch_ops: int = 256
    #: Age at which a batch leaves although nobody waits, in seconds.
    batch_age_s: float = 0.002
    #: From so many nodes on, what goes to all of them is passed on from node to node.
    relay_min_nodes: int = 17
    #: Nodes that the controller, and each node, passes it on to.
    relay_fanout: int = 8
    #: Bytes of one frame of tensor data.
    chunk_bytes: int = 1024 * 1024
    #: Intra-op threads of each worker; 0 divides the machine's cores among the workers.
    num_threads: int = 0
    #: Agents keep the memory that tensors have freed for later ones: quicker, and their resident size stays high.
    keep_memory: bool = True
    #: Bytes from other agents, to one device, from which on a redistribution runs beside ops that do not need it; 0:
    #: never. Within an agent, 32 times as many.
    beside_bytes: int = 128 * 1024
    #: Passes over a client's captured calls: names with commas between them, ``all`` or ``none``.
    passes: str = "all"
    #: Compile neighbouring elementwise ops of this client's captured calls, on the nodes, while they already run.
    compile: bool = False
    #: Graphs find runs of ops that repeat by themselves, and send each as one record.
    auto_capture: bool = False
    #: Bytes that the values on one device may hold, of all sessions; 0 sets no limit.
    device_memory_bytes: int = 0
    #: Check the invariants of every state machine and plan while running, and look for races on devices (slow).
    check: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            zero_allowed = field.name in ("num_threads", "device_memory_bytes", "beside_bytes")
            if field.name == "passes":
                _read_passes(value)
                continue
            if field.type == "bool":
                ok = isinstance(value, bool)
            elif field.type == "int":
                ok = (
                    isinstance(value, int)
                    and not isinstance(value, bool)
                    and (value > 0 or (zero_allowed and value == 0))
                )
            else:
                ok = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if not ok:
                raise SettingError(f"{field.name} takes a positive {field.type}, got {value!r}")

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The passes that ``passes`` names, and ``compile`` where that is set."""
        return (*_read_passes(self.passes), *(("compile",) if self.compile else ()))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from ``DTORCH_*`` variables; keyword arguments win. Warns of those that nobody reads.

        Raises:
            SettingError: a variable cannot be read as its field's type, or has a value it cannot have.
        """
        source = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"DTORCH_{field.name.upper()}"
            if name in source:
                values[field.name] = _parse(name, str(field.type), source[name])
        _warn_of_unknown(source, [f"DTORCH_{field.name.upper()}" for field in fields(cls)])
        return cls(**(values | overrides))


def _read_passes(text: Any) -> tuple[str, ...]:
    names = {"all": PASS_NAMES, "none": ()}.get(text) if isinstance(text, str) else None
    if names is None:
        asked = [name.strip() for name in text.split(",")] if isinstance(text, str) else []
        if not asked or not set(asked) <= set(PASS_NAMES):
            raise SettingError(
                f"passes takes names of {', '.join(PASS_NAMES)} with commas between them, or 'all', or 'none'; got "
                f"{text!r}"
            )
        names = tuple(name for name in PASS_NAMES if name in asked)
    return names


_BOOLS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _warn_of_unknown(source: Mapping[str, str], settings: list[str]) -> None:
    known = [*settings, *sorted(OTHER_VARIABLES)]
    for name in sorted(source):
        if name.startswith("DTORCH_") and name not in known and name not in _warned:
            _warned.add(name)
            rests = [other.removeprefix("DTORCH_") for other in known]
            near = difflib.get_close_matches(name.removeprefix("DTORCH_").upper(), rests, n=1)
            advice = f"did you mean DTORCH_{near[0]}?" if near else f"known are {', '.join(known)}"
            warnings.warn(f"the environment has {name}, which DTorch does not read: {advice}", stacklevel=3)


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        if kind == "bool":
            return _BOOLS[text.strip().lower()]
        if kind == "str":
            return text.strip()
        return int(text) if kind == "int" else float(text)
    except (KeyError, ValueError):
        raise SettingError(f"{name} takes a value of type {kind}, got {text!r}") from None
