"""What the launcher decides when processes end, signals arrive and deadlines pass, on a clock of the test's own."""

from __future__ import annotations

import random
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals

import pytest

from dtorch_launcher.plan import CONTROLLER
from dtorch_launcher.supervise import (
    PROGRAM,
    Action,
    ChildExited,
    ChildReady,
    DeadlinePassed,
    EndLifeline,
    Event,
    Finish,
    Launched,
    Phase,
    Report,
    Send,
    SignalArrived,
    Start,
    Supervisor,
)
from dtorch_runtime.errors import InternalError

START_S, STOP_S = 60.0, 5.0


def words(actions: list[Action]) -> list[str]:
    """Actions as short words, so that a table can be read: ``start node0``, ``SIGKILL program``."""
    described = []
    for action in actions:
        match action:
            case Start(name=name):
                described.append(f"start {name}")
            case EndLifeline(name=name):
                described.append(f"end {name}")
            case Send(name=name, number=number):
                described.append(f"{Signals(number).name} {name}")
            case Finish(exit_status=status):
                described.append(f"finish {status}")
            case Report(text=text):
                described.append(f"say {text}")
    return described


class Launch:
    """A supervisor of two agents, driven by hand."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(
            agents=("node0", "node1"), start_timeout_s=START_S, stop_timeout_s=STOP_S
        )
        self.now = 100.0

    def feed(self, *events: Event, after_s: float = 0.0) -> list[str]:
        self.now += after_s
        done: list[str] = []
        for event in events:
            done += words(self.supervisor.handle(event, self.now))
            self.supervisor.validate()
        return done

    def miss_deadline(self) -> list[str]:
        deadline_s = self.supervisor.deadline_s
        assert deadline_s is not None
        assert self.feed(DeadlinePassed(), after_s=deadline_s - self.now - 0.001) == [], (
            "acted before its time"
        )
        return self.feed(DeadlinePassed(), after_s=0.001)

    def bring_up(self) -> None:
        up: list[Event] = [Launched(), *(ChildReady(name=name) for name in (CONTROLLER, "node0", "node1"))]
        assert self.feed(*up) == ["start controller", "start node0", "start node1", "start program"]


def exited(name: str, returncode: int = 0) -> ChildExited:
    return ChildExited(name=name, returncode=returncode)


CLUSTER_ENDS = (exited("node0"), exited("node1"), exited(CONTROLLER))


@pytest.fixture
def launch() -> Launch:
    return Launch()


@pytest.fixture
def running(launch: Launch) -> Launch:
    launch.bring_up()
    return launch


def test_each_part_starts_when_the_one_before_is_ready(launch: Launch) -> None:
    assert launch.feed(Launched()) == ["start controller"]
    assert launch.feed(ChildReady(name=CONTROLLER)) == ["start node0"]
    assert launch.feed(ChildReady(name="node0")) == ["start node1"], "so that node0 has the first devices"
    assert launch.feed(ChildReady(name="node0")) == [], "said twice"
    assert launch.feed(ChildReady(name="node1")) == ["start program"]
    assert launch.supervisor.deadline_s is None, "the program runs as long as it likes"


@pytest.mark.parametrize(("returncode", "status"), [(0, 0), (3, 3), (-11, 139)])
def test_the_cluster_ends_in_order_and_the_program_s_status_is_returned(
    running: Launch, returncode: int, status: int
) -> None:
    assert running.feed(exited(PROGRAM, returncode)) == ["end node0", "end node1"]
    assert running.feed(exited("node1")) == []
    assert running.feed(exited("node0")) == ["end controller"]
    assert running.feed(exited(CONTROLLER)) == [f"finish {status}"]
    assert running.supervisor.deadline_s is None


@pytest.mark.parametrize("lost", ["node1", CONTROLLER])
def test_a_lost_part_is_reported_and_left_to_the_program(running: Launch, lost: str) -> None:
    assert running.feed(exited(lost, -9)) == [f"say {lost} was ended by SIGKILL while the program runs"]
    others = [e for e in CLUSTER_ENDS if e.name != lost]
    assert running.feed(exited(PROGRAM, 1), *others)[-1] == "finish 1"


def test_the_status_of_the_program_counts_even_when_no_cluster_is_left(running: Launch) -> None:
    running.feed(*CLUSTER_ENDS)
    assert running.feed(exited(PROGRAM, 7)) == ["finish 7"]


def test_a_controller_that_cannot_start_ends_the_launch(launch: Launch) -> None:
    launch.feed(Launched())
    said = "controller ended with status 2 before the cluster was up; its log above says why"
    assert launch.feed(exited(CONTROLLER, 2)) == [f"say {said}. The program was not started", "finish 2"]


def test_an_agent_that_cannot_start_ends_the_launch_and_the_others(launch: Launch) -> None:
    launch.feed(Launched(), ChildReady(name=CONTROLLER), ChildReady(name="node0"))
    said, *ends = launch.feed(exited("node1", 1))
    assert "node1 ended with status 1 before the cluster was up" in said
    assert ends == ["end node0"]
    assert launch.feed(exited("node0")) == ["end controller"]
    assert launch.feed(exited(CONTROLLER)) == ["finish 2"]


def test_a_start_that_takes_too_long_says_what_it_waited_for(launch: Launch) -> None:
    launch.feed(Launched())
    said, end = launch.miss_deadline()
    assert (said, end) == (
        "say waited 60 s for the controller to listen. The program was not started",
        "end controller",
    )
    late = Launch()
    late.feed(Launched(), ChildReady(name=CONTROLLER), ChildReady(name="node0"))
    assert (
        late.miss_deadline()[0]
        == "say waited 60 s for node1 to join the cluster. The program was not started"
    )


def test_agents_that_do_not_end_are_killed_and_then_the_controller_goes(running: Launch) -> None:
    running.feed(exited(PROGRAM), exited("node1"))
    assert running.miss_deadline() == ["say node0 did not end within 5 s: killed", "SIGKILL node0"]
    assert running.feed(exited("node0", -9)) == ["end controller"]
    assert running.miss_deadline() == ["say controller did not end within 5 s: killed", "SIGKILL controller"]
    assert running.feed(exited(CONTROLLER, -9)) == ["finish 0"]


def test_what_even_sigkill_does_not_end_is_named_and_left(running: Launch) -> None:
    running.feed(exited(PROGRAM))
    running.miss_deadline()
    left = "say node0, node1: still there 5 s after SIGKILL; left behind"
    assert running.miss_deadline() == [left, "end controller"]
    assert running.miss_deadline()[-1] == "SIGKILL controller"
    assert running.miss_deadline()[-1] == "finish 0"


def test_a_program_that_even_sigkill_does_not_end_does_not_keep_the_cluster(running: Launch) -> None:
    running.feed(SignalArrived(number=SIGTERM))
    running.miss_deadline()
    said, *ends = running.miss_deadline()
    assert said.startswith("say program: still there")
    assert ends == ["end node0", "end node1"]
    assert running.feed(*CLUSTER_ENDS)[-1] == "finish 137"


IN_5_S = "if it does not end it is killed in 5 s"


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([SignalArrived(number=SIGINT)], ["SIGINT program"]),
        ([SignalArrived(number=SIGINT, reached_program=True)], []),
        ([SignalArrived(number=SIGTERM)], [f"say the program gets SIGTERM; {IN_5_S}", "SIGTERM program"]),
        (
            [SignalArrived(number=SIGHUP, reached_program=True)],
            [f"say the program gets SIGHUP; {IN_5_S}"],
        ),
        (
            [SignalArrived(number=SIGINT, reached_program=True)] * 2,
            [f"say the program gets SIGTERM; {IN_5_S}", "SIGTERM program"],
        ),
        (
            [SignalArrived(number=SIGINT)] * 3,
            [
                "SIGINT program",
                f"say the program gets SIGTERM; {IN_5_S}",
                "SIGTERM program",
                "say program was interrupted three times: killed",
                "SIGKILL program",
            ],
        ),
    ],
)
def test_signals_go_to_the_program_and_the_cluster_outlives_it(
    running: Launch, signals: list[SignalArrived], expected: list[str]
) -> None:
    assert running.feed(*signals) == expected
    assert running.feed(exited(PROGRAM, -2), *CLUSTER_ENDS) == [
        "end node0",
        "end node1",
        "end controller",
        "finish 130",
    ]


def test_ctrl_c_gives_the_program_all_the_time_it_wants(running: Launch) -> None:
    running.feed(SignalArrived(number=SIGINT))
    assert running.supervisor.deadline_s is None


def test_a_program_that_ignores_sigterm_is_killed_once_however_often_it_is_asked(running: Launch) -> None:
    running.feed(SignalArrived(number=SIGTERM))
    assert running.feed(SignalArrived(number=SIGTERM), after_s=4.0)[-1] == "SIGTERM program"
    assert running.supervisor.deadline_s == 105.0, "asking again does not put the end off"
    assert running.miss_deadline() == ["say program did not end within 5 s: killed", "SIGKILL program"]
    assert running.feed(exited(PROGRAM, -9), *CLUSTER_ENDS)[-1] == "finish 137"


@pytest.mark.parametrize(("number", "status"), [(SIGINT, 130), (SIGTERM, 143)])
def test_a_signal_before_the_program_ends_the_launch(launch: Launch, number: int, status: int) -> None:
    launch.feed(Launched(), ChildReady(name=CONTROLLER), ChildReady(name="node0"))
    assert launch.feed(SignalArrived(number=number)) == ["end node0", "end node1"]
    assert launch.feed(ChildReady(name="node1")) == [], "too late to start the program"
    assert launch.feed(*CLUSTER_ENDS) == ["end controller", f"finish {status}"]


def test_a_second_ctrl_c_does_not_wait_for_the_cluster(launch: Launch) -> None:
    launch.feed(Launched(), ChildReady(name=CONTROLLER), SignalArrived(number=SIGINT))
    assert launch.feed(SignalArrived(number=SIGINT)) == [
        "say node0, controller was interrupted while it ended: killed",
        "SIGKILL node0",
        "SIGKILL controller",
    ]
    assert launch.feed(exited("node0", -9), exited(CONTROLLER, -9))[-1] == "finish 130"


def test_nothing_happens_after_the_end(running: Launch) -> None:
    assert running.feed(exited(PROGRAM), *CLUSTER_ENDS)[-1] == "finish 0"
    assert running.feed(SignalArrived(number=SIGTERM), DeadlinePassed(), exited("node0")) == []


def test_broken_invariants_are_found(launch: Launch) -> None:
    launch.supervisor.alive.add("stranger")
    with pytest.raises(InternalError, match="only known processes live"):
        launch.supervisor.validate()


@pytest.mark.parametrize("history", range(60))
def test_every_history_ends(launch: Launch, rng: random.Random, history: int) -> None:
    """Whatever happens, in whatever order, processes that obey SIGKILL lead to one Finish and nothing alive."""
    supervisor = launch.supervisor
    rng.seed(history)
    finished = 0
    pending = supervisor.handle(Launched(), launch.now)
    living: set[str] = set()
    doomed: set[str] = set()
    for _ in range(500):
        for action in pending:
            match action:
                case Start(name=name):
                    assert name not in living
                    living.add(name)
                case Send(name=name, number=number):
                    assert name in living
                    if number == SIGKILL or rng.random() < 0.5:
                        doomed.add(name)
                case EndLifeline(name=name):
                    if rng.random() < 0.7:
                        doomed.add(name)
                case Finish():
                    finished += 1
        supervisor.validate()
        if finished:
            break
        event = random_event(rng, living, doomed, supervisor)
        if isinstance(event, ChildExited):
            living.discard(event.name)
        if isinstance(event, DeadlinePassed) and supervisor.deadline_s is not None:
            launch.now = max(launch.now, supervisor.deadline_s)
        pending = supervisor.handle(event, launch.now)
    assert (finished, living, supervisor.phase) == (1, set(), Phase.FINISHED)


def random_event(rng: random.Random, living: set[str], doomed: set[str], supervisor: Supervisor) -> Event:
    dying = sorted(living & doomed)
    if dying and rng.random() < 0.7:
        return ChildExited(name=rng.choice(dying), returncode=-9)
    choice = rng.random()
    if choice < 0.5 and living:
        return ChildReady(name=rng.choice(sorted(living)))
    if choice < 0.6 and living:
        return ChildExited(name=rng.choice(sorted(living)), returncode=rng.randrange(3))
    if choice < 0.7:
        return SignalArrived(number=rng.choice([SIGINT, SIGTERM]), reached_program=rng.random() < 0.5)
    # Processes that have been killed are gone by the next deadline: here nothing hangs in the operating system.
    return ChildReady(name=CONTROLLER) if dying else DeadlinePassed()
