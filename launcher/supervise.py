"""Decides what becomes of the processes of one launch. Does no I/O: events in, actions out.

A launch goes through phases, each left when what it waits for has happened or its deadline has passed::

    CONTROLLER_STARTS -> AGENTS_START -> PROGRAM_RUNS -> AGENTS_STOP -> CONTROLLER_STOPS -> FINISHED

A process is asked to end before it is killed: agents and the controller by the end of their lifeline (their standard
input), the program by a signal. Agents end before the controller, so that none of them has to look for it.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dtorch_launcher.plan import CONTROLLER, EXIT_REFUSED, describe_end, exit_status
from dtorch_runtime.errors import InternalError

PROGRAM = "program"


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The launch begins."""


@dataclass(frozen=True, kw_only=True)
class ChildReady:
    """The controller listens, or an agent has joined it; ``endpoint`` is where, as far as it is known."""

    name: str
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class ChildExited:
    """A process ended; ``returncode`` is minus the signal's number if a signal ended it."""

    name: str
    returncode: int


@dataclass(frozen=True, kw_only=True)
class SignalArrived:
    """The launcher got a signal. ``reached_program``: the terminal has sent it to the program as well."""

    number: int
    reached_program: bool = False


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """``Supervisor.deadline_s`` has come."""


Event: TypeAlias = Launched | ChildReady | ChildExited | SignalArrived | DeadlinePassed


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start the process."""

    name: str


@dataclass(frozen=True, kw_only=True)
class EndLifeline:
    """Close the standard input of an agent or the controller: it ends in order."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send a signal to a process."""

    name: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tell the person at the terminal."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The launch is over."""

    exit_status: int


Action: TypeAlias = Start | EndLifeline | Send | Report | Finish


class Phase(enum.IntEnum):
    """Where a launch stands; only ever rises."""

    NEW = enum.auto()
    CONTROLLER_STARTS = enum.auto()
    AGENTS_START = enum.auto()
    PROGRAM_RUNS = enum.auto()
    AGENTS_STOP = enum.auto()
    CONTROLLER_STOPS = enum.auto()
    FINISHED = enum.auto()


@dataclass(kw_only=True)
class Supervisor:
    """The state of one launch.

    Args:
        agents: names of the node agents, in the order in which they are started.
        start_timeout_s: for the controller to listen, and again for each agent to join.
        stop_timeout_s: from asking a process to end to killing it, and again for it to be gone.
    """

    agents: Sequence[str]
    start_timeout_s: float
    stop_timeout_s: float

    phase: Phase = Phase.NEW
    #: Processes that were started and have not ended.
    alive: set[str] = field(default_factory=set)
    #: Processes that have said that they are ready. Those that ended since stay in it.
    ready: set[str] = field(default_factory=set)
    #: Processes that were sent SIGKILL. A subset of those started.
    killed: set[str] = field(default_factory=set)
    #: When ``DeadlinePassed`` is due, on the caller's clock; None while only the program's end is awaited.
    deadline_s: float | None = None
    #: What the launch returns; set when the program ends, or when it will not be started.
    exit_status: int | None = None
    #: SIGINT so far; the second asks the program harder, the third no longer asks.
    num_interrupts: int = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at time ``now`` (seconds, monotonic) and say what to do, in order."""
        match event:
            case Launched():
                return self._launch(now)
            case ChildReady():
                return self._child_ready(event.name, now)
            case ChildExited():
                return self._child_exited(event.name, event.returncode, now)
            case SignalArrived():
                return self._signal_arrived(event, now)
            case DeadlinePassed():
                return self._deadline_passed(now)

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InternalError: one does not hold.
        """
        known = {*self.agents, CONTROLLER, PROGRAM}
        rules = {
            "only known processes live": self.alive | self.ready | self.killed <= known,
            "nothing lives before the launch": self.phase > Phase.NEW or not self.alive,
            "agents start after the controller": self.phase >= Phase.AGENTS_START
            or self.alive <= {CONTROLLER},
            "the program starts last": PROGRAM not in self.alive or self.phase >= Phase.PROGRAM_RUNS,
            "the controller ends last": self.phase < Phase.CONTROLLER_STOPS or self.alive <= {CONTROLLER},
            "the end has a status": self.phase < Phase.AGENTS_STOP or self.exit_status is not None,
            "every wait but the program's has a deadline": self.phase
            in (Phase.NEW, Phase.PROGRAM_RUNS, Phase.FINISHED)
            or self.deadline_s is not None,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise InternalError(f"supervision of a launch: broken invariants {broken} in {self}")

    # ---- starting

    def _launch(self, now: float) -> list[Action]:
        self.phase = Phase.CONTROLLER_STARTS
        self.deadline_s = now + self.start_timeout_s
        return [self._start(CONTROLLER)]

    def _start(self, name: str) -> Start:
        self.alive.add(name)
        return Start(name=name)

    def _child_ready(self, name: str, now: float) -> list[Action]:
        self.ready.add(name)
        if self.phase is Phase.CONTROLLER_STARTS and name == CONTROLLER:
            self.phase = Phase.AGENTS_START
        if self.phase is not Phase.AGENTS_START:
            return []
        # One after the other: devices are numbered in the order of joining, and node0 is to have the first.
        waiting = [agent for agent in self.agents if agent not in self.ready]
        if not waiting:
            self.phase = Phase.PROGRAM_RUNS
            self.deadline_s = None
            return [self._start(PROGRAM)]
        if waiting[0] in self.alive:
            return []
        self.deadline_s = now + self.start_timeout_s
        return [self._start(waiting[0])]

    # ---- ends of processes

    def _child_exited(self, name: str, returncode: int, now: float) -> list[Action]:
        self.alive.discard(name)
        if name == PROGRAM and self.phase is Phase.PROGRAM_RUNS:
            self.exit_status = exit_status(returncode)
            return self._stop_agents(now)
        if self.phase in (Phase.CONTROLLER_STARTS, Phase.AGENTS_START):
            end = describe_end(returncode)
            return self._give_up(f"{name} {end} before the cluster was up; its log above says why", now)
        if self.phase is Phase.PROGRAM_RUNS:
            return [Report(text=f"{name} {describe_end(returncode)} while the program runs")]
        return self._continue_stopping(now)

    def _give_up(self, reason: str, now: float) -> list[Action]:
        self.exit_status = EXIT_REFUSED
        return [Report(text=f"{reason}. The program was not started"), *self._stop_agents(now)]

    # ---- stopping

    def _stop_agents(self, now: float) -> list[Action]:
        self.phase = Phase.AGENTS_STOP
        self.deadline_s = now + self.stop_timeout_s
        asked = [EndLifeline(name=agent) for agent in self._living(self.agents)]
        return [*asked, *self._continue_stopping(now)]

    def _continue_stopping(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.phase is Phase.AGENTS_STOP and self.alive.isdisjoint(self.agents):
            self.phase = Phase.CONTROLLER_STOPS
            self.deadline_s = now + self.stop_timeout_s
            actions += [EndLifeline(name=name) for name in self._living([CONTROLLER])]
        if self.phase is Phase.CONTROLLER_STOPS and CONTROLLER not in self.alive:
            actions += self._finish()
        return actions

    def _finish(self) -> list[Action]:
        self.phase = Phase.FINISHED
        self.deadline_s = None
        status = self.exit_status
        if status is None:
            raise InternalError("a launch ended without an exit status")
        return [Finish(exit_status=status)]

    # ---- deadlines

    def _deadline_passed(self, now: float) -> list[Action]:
        if self.deadline_s is None or now < self.deadline_s:
            return []
        if self.phase is Phase.CONTROLLER_STARTS:
            return self._give_up(f"waited {self.start_timeout_s:.3g} s for the controller to listen", now)
        if self.phase is Phase.AGENTS_START:
            late = next(agent for agent in self.agents if agent not in self.ready)
            return self._give_up(f"waited {self.start_timeout_s:.3g} s for {late} to join the cluster", now)
        waited_for = set(self._living(self._awaited_ends()))
        if waited_for <= self.killed:
            return self._abandon(now)
        self.deadline_s = now + self.stop_timeout_s
        return self._kill(
            self._living(waited_for - self.killed), f"did not end within {self.stop_timeout_s:.3g} s"
        )

    def _awaited_ends(self) -> set[str]:
        if self.phase is Phase.PROGRAM_RUNS:
            return {PROGRAM}
        return set(self.agents) if self.phase is Phase.AGENTS_STOP else {CONTROLLER}

    def _abandon(self, now: float) -> list[Action]:
        """Not even SIGKILL ended a process, so it hangs in the operating system: go on without it."""
        hung = self._living(self.killed & self._awaited_ends())
        report = Report(
            text=f"{', '.join(hung)}: still there {self.stop_timeout_s:.3g} s after SIGKILL; left behind"
        )
        self.alive.difference_update(hung)
        if self.phase is Phase.PROGRAM_RUNS:
            self.exit_status = exit_status(-signal.SIGKILL)
            return [report, *self._stop_agents(now)]
        return [report, *self._continue_stopping(now)]

    def _kill(self, names: Sequence[str], reason: str) -> list[Action]:
        self.killed.update(names)
        kills = [Send(name=name, number=signal.SIGKILL) for name in names]
        return [Report(text=f"{', '.join(names)} {reason}: killed"), *kills] if kills else []

    # ---- signals

    def _signal_arrived(self, event: SignalArrived, now: float) -> list[Action]:
        if event.number == signal.SIGINT:
            self.num_interrupts += 1
        if self.phase is Phase.PROGRAM_RUNS:
            return self._pass_on(event, now)
        if self.phase < Phase.PROGRAM_RUNS:
            self.exit_status = exit_status(-event.number)
            return self._stop_agents(now)
        if self.phase is not Phase.FINISHED and self.num_interrupts > 1:
            self.deadline_s = now + self.stop_timeout_s
            return self._kill(self._living(self.alive - self.killed), "was interrupted while it ended")
        return []

    def _pass_on(self, event: SignalArrived, now: float) -> list[Action]:
        if event.number == signal.SIGINT and self.num_interrupts == 1:
            # How long a program takes to clean up after Ctrl-C is its own affair: a second one hurries it.
            return [] if event.reached_program else [Send(name=PROGRAM, number=event.number)]
        if event.number == signal.SIGINT and self.num_interrupts > 2:
            self.deadline_s = now + self.stop_timeout_s
            return self._kill(self._living({PROGRAM} - self.killed), "was interrupted three times")
        number = signal.SIGTERM if event.number == signal.SIGINT else event.number
        if self.deadline_s is None:
            self.deadline_s = now + self.stop_timeout_s
        has_it = event.reached_program and number == event.number
        name = signal.Signals(number).name
        return [
            Report(
                text=f"the program gets {name}; if it does not end it is killed in {self.stop_timeout_s:.3g} s"
            ),
            *([] if has_it else [Send(name=PROGRAM, number=number)]),
        ]

    def _living(self, names: Iterable[str]) -> list[str]:
        order = [PROGRAM, *self.agents, CONTROLLER]
        return [name for name in order if name in set(names) & self.alive]
