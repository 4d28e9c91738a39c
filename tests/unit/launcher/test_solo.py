"""What becomes of a controller or an agent that runs on its own, on a clock of the test's own."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from dtorch_launcher.solo import SoloSupervisor
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

NODE = "node7"
READY = ChildReady(name=NODE, endpoint="tcp://c:1")
TERM = SignalArrived(number=SIGTERM)
INTERRUPT = SignalArrived(number=SIGINT, reached_program=True)
END = EndLifeline(name=NODE)
KILL = Send(name=NODE, number=SIGKILL)
WELCOME = Report(text="node7 is up at tcp://c:1")


def new_solo() -> SoloSupervisor:
    return SoloSupervisor(
        name=NODE,
        start_timeout_s=60.0,
        stop_timeout_s=5.0,
        ready_means="node7 to join",
        announcement="node7 is up at {endpoint}",
    )


def exited(returncode: int) -> ChildExited:
    return ChildExited(name=NODE, returncode=returncode)


def say(text: str) -> Report:
    return Report(text=f"node7 {text}")


#: Name, then pairs of what happens (a number: seconds that pass) and what is done about it, after the start.
HISTORIES: dict[str, list[tuple[Event | float, list[Action]]]] = {
    "is stopped": [(READY, [WELCOME]), (TERM, [END]), (exited(0), [Finish(exit_status=0)])],
    "is stopped by its cluster": [(READY, [WELCOME]), (exited(0), [Finish(exit_status=0)])],
    "dies": [
        (READY, [WELCOME]),
        (exited(-9), [say("was ended by SIGKILL"), Finish(exit_status=137)]),
        (TERM, []),
        (exited(-9), []),
    ],
    "cannot start": [
        (
            exited(1),
            [say("ended with status 1 before it was ready; its log above says why"), Finish(exit_status=2)],
        )
    ],
    "starts too slowly": [
        (59.0, []),
        (1.0, [Report(text="waited 60 s for node7 to join"), END]),
        (READY, []),
        (exited(0), [Finish(exit_status=2)]),
    ],
    "is interrupted while it starts": [(INTERRUPT, [END]), (exited(0), [Finish(exit_status=130)])],
    "does not stop": [
        (READY, [WELCOME]),
        (1000.0, []),
        (TERM, [END]),
        (TERM, []),
        (5.0, [say("did not end within 5 s: killed"), KILL]),
        (exited(-9), [Finish(exit_status=137)]),
    ],
    "is interrupted twice": [
        (READY, [WELCOME]),
        (INTERRUPT, [END]),
        (INTERRUPT, [say("was interrupted while it ended: killed"), KILL]),
        (INTERRUPT, []),
        (exited(-9), [Finish(exit_status=137)]),
    ],
    "cannot even be killed": [
        (READY, [WELCOME]),
        (TERM, [END]),
        (5.0, [say("did not end within 5 s: killed"), KILL]),
        (5.0, [Report(text="node7: still there 5 s after SIGKILL; left behind"), Finish(exit_status=137)]),
    ],
}


@pytest.mark.parametrize("history", HISTORIES)
def test_one_process(history: str) -> None:
    solo = new_solo()
    now = 10.0
    assert solo.handle(Launched(), now) == [Start(name=NODE)]
    for step, expected in HISTORIES[history]:
        if isinstance(step, float):
            now += step
            assert solo.handle(DeadlinePassed(), now) == expected
        else:
            assert solo.handle(step, now) == expected
        solo.validate()


def test_a_wait_without_a_deadline_is_found() -> None:
    solo = new_solo()
    solo.handle(Launched(), 0.0)
    solo.deadline_s = None
    with pytest.raises(InternalError, match="a wait without a deadline"):
        solo.validate()
