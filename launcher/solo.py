"""Decides what becomes of one long-lived process, a controller or an agent. Does no I/O: events in, actions out."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from dtorch_launcher.plan import EXIT_REFUSED, describe_end, exit_status
from dtorch_launcher.supervise import (
    Action,
    ChildExited,
    ChildReady,
    DeadlinePassed,
    EndLifeline,
    Event,
    Finish,
    Launched,
    Report,
    Send,
    SignalArrived,
    Start,
)
from dtorch_runtime.errors import InternalError


class SoloPhase(enum.IntEnum):
    """Where the process stands; only ever rises."""

    NEW = enum.auto()
    STARTS = enum.auto()
    RUNS = enum.auto()
    STOPS = enum.auto()
    FINISHED = enum.auto()


@dataclass(kw_only=True)
class SoloSupervisor:
    """The state of one process that runs until it ends, or until a signal asks for its end.

    Args:
        start_timeout_s: for the process to be ready.
        stop_timeout_s: from the end of its lifeline to SIGKILL, and again for it to be gone.
        ready_means: what "ready" is, to follow "waited 60 s for ": ``node1 to join tcp://head:5555``.
        announcement: what to tell the person at the terminal then; ``{endpoint}`` stands for its address.
    """

    name: str
    start_timeout_s: float
    stop_timeout_s: float
    ready_means: str
    announcement: str

    phase: SoloPhase = SoloPhase.NEW
    #: When ``DeadlinePassed`` is due; None while the process runs.
    deadline_s: float | None = None
    #: What to return if it is not the process's own status: it had to be ended, or never was ready.
    exit_status: int | None = None
    is_killed: bool = False

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` (seconds, monotonic) and say what to do, in order."""
        match event:
            case Launched():
                self.phase = SoloPhase.STARTS
                self.deadline_s = now + self.start_timeout_s
                return [Start(name=self.name)]
            case ChildReady() if self.phase is SoloPhase.STARTS:
                self.phase = SoloPhase.RUNS
                self.deadline_s = None
                return [Report(text=self.announcement.replace("{endpoint}", event.endpoint))]
            case ChildExited() if self.phase is not SoloPhase.FINISHED:
                return self._exited(event.returncode)
            case SignalArrived() if self.phase in (SoloPhase.STARTS, SoloPhase.RUNS):
                if self.phase is SoloPhase.STARTS:
                    self.exit_status = exit_status(-event.number)
                return self._stop(now)
            case SignalArrived() if self.phase is SoloPhase.STOPS and event.number == signal.SIGINT:
                return self._kill("was interrupted while it ended", now)
            case DeadlinePassed() if self.deadline_s is not None and now >= self.deadline_s:
                return self._late(now)
        return []

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InternalError: one does not hold.
        """
        waits = self.phase in (SoloPhase.STARTS, SoloPhase.STOPS)
        if waits != (self.deadline_s is not None):
            raise InternalError(
                f"supervision of {self.name}: a wait without a deadline, or none with one: {self}"
            )

    def _exited(self, returncode: int) -> list[Action]:
        said: list[Action] = []
        status = exit_status(returncode) if self.exit_status is None else self.exit_status
        if self.phase is SoloPhase.STARTS:
            status = EXIT_REFUSED
            said = [
                Report(
                    text=f"{self.name} {describe_end(returncode)} before it was ready; its log above says why"
                )
            ]
        elif self.phase is SoloPhase.RUNS and returncode != 0:
            said = [Report(text=f"{self.name} {describe_end(returncode)}")]
        return [*said, *self._finish(status)]

    def _finish(self, status: int) -> list[Action]:
        self.phase = SoloPhase.FINISHED
        self.deadline_s = None
        return [Finish(exit_status=status)]

    def _stop(self, now: float) -> list[Action]:
        self.phase = SoloPhase.STOPS
        self.deadline_s = now + self.stop_timeout_s
        return [EndLifeline(name=self.name)]

    def _late(self, now: float) -> list[Action]:
        if self.phase is SoloPhase.STARTS:
            self.exit_status = EXIT_REFUSED
            return [
                Report(text=f"waited {self.start_timeout_s:.3g} s for {self.ready_means}"),
                *self._stop(now),
            ]
        if not self.is_killed:
            return self._kill(f"did not end within {self.stop_timeout_s:.3g} s", now)
        left = f"{self.name}: still there {self.stop_timeout_s:.3g} s after SIGKILL; left behind"
        return [Report(text=left), *self._finish(exit_status(-signal.SIGKILL))]

    def _kill(self, reason: str, now: float) -> list[Action]:
        if self.is_killed:
            return []
        self.is_killed = True
        self.deadline_s = now + self.stop_timeout_s
        return [Report(text=f"{self.name} {reason}: killed"), Send(name=self.name, number=signal.SIGKILL)]
