"""Who is lost: the decision behind the heartbeats, without clock, thread or socket."""

from __future__ import annotations

from dataclasses import dataclass

from dtorch_runtime.errors import SettingError

_STALL_IN_INTERVALS = 2.0


@dataclass
class _Peer:
    """``beat_s``: its last beat. ``seen_s``: the last sign of life of any kind. Invariant: beat_s <= seen_s."""

    beat_s: float
    seen_s: float


class BeatBook:
    """Keeps when each watched peer was last heard, and tells which of them are lost.

    Two signs of life count. A *beat* is sent by the peer's own heartbeat thread. A peer whose interpreter is busy in
    one long call sends none, but ZeroMQ's threads still keep its connection alive: then it is *reachable*, which
    counts for up to ``silence_limit_s`` after its last beat. A killed, stopped or unplugged peer gives neither.

    ``expired`` is to be called about every ``interval_s``. When it was not (this process was stopped, or its machine
    slept), nobody could have been heard meanwhile, and that time does not count against anyone.

    Args:
        interval_s: between two beats.
        timeout_s: without any sign of life for longer, a peer is lost.
        silence_limit_s: without a beat for longer, a peer is lost although it is reachable.

    Raises:
        SettingError: the times do not fit together.
    """

    def __init__(self, *, interval_s: float, timeout_s: float, silence_limit_s: float) -> None:
        if not 0 < interval_s < timeout_s <= silence_limit_s:
            raise SettingError(
                f"heartbeat interval_s={interval_s:g}, timeout_s={timeout_s:g}, silence_limit_s={silence_limit_s:g}: "
                f"allowed is 0 < interval_s < timeout_s <= silence_limit_s"
            )
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._silence_limit_s = silence_limit_s
        self._peers: dict[str, _Peer] = {}
        self._checked_s: float | None = None

    def __contains__(self, peer: object) -> bool:
        """Whether ``peer`` is watched."""
        return peer in self._peers

    def watch(self, peer: str, now_s: float) -> None:
        """Expect beats of ``peer`` from now on."""
        self._peers[peer] = _Peer(beat_s=now_s, seen_s=now_s)

    def forget(self, peer: str) -> None:
        """Expect nothing of ``peer`` any more. It need not be watched."""
        self._peers.pop(peer, None)

    def beat(self, peer: str, now_s: float) -> None:
        """A beat of ``peer`` arrived. Ignored for one that is not watched: it left, or was lost already."""
        known = self._peers.get(peer)
        if known is not None:
            known.beat_s = known.seen_s = now_s

    def reachable(self, peer: str, now_s: float) -> None:
        """The connection that ``peer`` beat on last is alive."""
        known = self._peers.get(peer)
        if known is not None:
            known.seen_s = now_s

    def silent(self, now_s: float) -> list[str]:
        """Peers whose beat is overdue, so that it is worth looking whether they are reachable."""
        return [peer for peer, known in self._peers.items() if now_s - known.beat_s > 1.5 * self._interval_s]

    def expired(self, now_s: float) -> list[str]:
        """The peers lost since the last call; they are forgotten, so each is told of once."""
        self._forgive_stall(now_s)
        lost = [
            peer
            for peer, known in self._peers.items()
            if now_s - known.seen_s > self._timeout_s or now_s - known.beat_s > self._silence_limit_s
        ]
        for peer in lost:
            del self._peers[peer]
        return lost

    def _forgive_stall(self, now_s: float) -> None:
        last_s, self._checked_s = self._checked_s, now_s
        if last_s is None or now_s - last_s <= _STALL_IN_INTERVALS * self._interval_s:
            return
        stalled_s = now_s - last_s - self._interval_s
        for known in self._peers.values():
            known.beat_s = min(now_s, known.beat_s + stalled_s)
            known.seen_s = min(now_s, known.seen_s + stalled_s)

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            AssertionError: one does not hold; a bug.
        """
        for peer, known in self._peers.items():
            assert known.beat_s <= known.seen_s, (
                f"{peer!r} beat at {known.beat_s} but was seen at {known.seen_s}"
            )
