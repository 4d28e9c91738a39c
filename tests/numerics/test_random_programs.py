"""Random programs of 5 to 30 lines, with views and writes, on random meshes and placements: as on plain torch.

Many more: ``python -m tests.numerics.programs``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import dtorch
from tests.numerics.programs import sides
from tests.numerics.programs.execute import Difference, Mode, Program, Run, run, shrink
from tests.numerics.programs.generate import MAX_DEVICES, write_and_run
from tests.support.leaks import LeakWatch

NUM_PROGRAMS = 40

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch, for what the programs do


@pytest.fixture(scope="module", autouse=True)
def cluster(leak_watch: LeakWatch) -> Iterator[None]:
    before = leak_watch.snapshot()
    dtorch.init(devices_per_node=MAX_DEVICES)
    dtorch.ones(1).to_torch()  # every connection is there
    leak_watch.declare_baseline(before)
    yield
    dtorch.shutdown()


@pytest.mark.timeout(240)  # a busy machine takes half a second for a program
@pytest.mark.parametrize("mode", ["strict", "auto"])
@settings(max_examples=NUM_PROGRAMS, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=True))
def test_they_do_what_plain_torch_does(mode: Mode, rng: random.Random) -> None:
    program, difference = write_and_run(rng, mode)
    if difference is not None:
        shortest, found = shrink(program, difference.kind)
        pytest.fail(f"{found}\n{shortest}")


# ---- the harness itself ----


def test_a_wrong_value_is_found_and_the_program_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "v0 = make(1, (4,), torch.float64, [Shard(0)], False)",
        "v1 = v0 + 1",
        "v2 = v0 * 2 if isinstance(v0, dtorch_tensor) else v0 * 3",
        "v3 = v1.sum()",
    )
    monkeypatch.setattr(sides, "_COMMON", {**sides._COMMON, "dtorch_tensor": dtorch.Tensor})
    program = Program((2,), "strict", lines)
    with pytest.raises(Difference, match="another value: v2"):
        run(program)
    shortest, _ = shrink(program, "another value")
    assert shortest.lines == ("v0 = make(1, (4,), torch.float64, [Replicate()], False)", lines[2])
    assert "'strict'" in str(shortest)


def test_what_strict_mode_refuses_is_left_out_on_both_sides() -> None:
    started = Run((2,), "strict")
    assert started.step("v0 = make(1, (4,), torch.float64, [Partial('sum')], False)")
    assert not started.step("v0.exp_()")
    assert not started.step("v0 + v1")
    started.compare()
    assert Run((2,), "auto").step("v0 = make(1, (4,), torch.float64, [Partial('sum')], False).exp_()")


def test_a_line_that_is_refused_halfway_leaves_both_sides_the_same() -> None:
    lines = (
        "v0 = make(64, (6, 1), torch.float64, [Shard(0)], False)",
        "v1 = make(161, (6,), torch.float64, [Replicate()], True)",
        "v2 = v0.flatten(0)",
        "v3 = v2.squeeze()",
        "v2.copy_(v1)",
        "v4 = v3.diff(dim=0)",  # refused by an op inside, after others have seen v3
        "v3.add_(2)",
    )
    assert run(Program((2,), "strict", lines)) == (*lines[:5], lines[6])


#: Programs that were found, and were once different.
FOUND = [
    Program(
        (3,),
        "strict",
        (
            "v0 = make(154, (6, 4, 3), torch.complex128, [Shard(dim=1, unit=3)], False)",
            "v3 = v0.diff(dim=2)",
            "v3.transpose_(0, 1)",
            "v9 = v3.view_as(v3)",  # of other strides on the device with one row
            "v3.addcmul_(v9, v9)",
        ),
    ),
    Program(
        (2, 3),
        "auto",
        (
            "v1 = make(769, (7, 7, 5), torch.float64, [Shard(dim=0), Shard(dim=0, unit=2)], True)",
            "v4, v5 = v1.split([5, 2], 1)",
            "v8 = v4.slice_scatter(v4, 0)",  # has gaps between rows, as v4
            "v11 = v8.reshape([35, 5, 1])",  # so this is a copy
            "v11.masked_fill_((torch.arange(175, device=v11.device).view((35, 5, 1)) % 2 == 0), 2)",
        ),
    ),
    Program(
        (2,),
        "auto",
        (
            "v1 = make(130, (4, 4), torch.float64, [Replicate()], True)",
            "v2 = make(307, (6, 4), torch.float64, [Replicate()], False)",
            "v3 = v1.cumsum(1)",
            "v5 = F.linear(v2, v3)",  # whose derivative does not need v3
            "v3.mul_(2)",
            "backward(v3, v5)",
        ),
    ),
]


@pytest.mark.parametrize("program", FOUND, ids=range(len(FOUND)))
def test_what_was_found_is_no_difference_any_more(program: Program) -> None:
    assert run(program) == program.lines


def test_a_failure_that_no_value_shows_is_found() -> None:
    started = Run((2,), "strict")
    assert started.step("v0 = make(1, (4,), torch.float64, [Replicate()], False)")
    exec("wrong = v0.index_select(0, v0.new_full((1,), 4, dtype=torch.int64))", started.remote)
    with pytest.raises(Difference) as difference:
        started.compare()
    assert difference.value.kind == "a failure that no value shows"
    Run((2,), "strict").compare()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("v1 = v0.cpu() if isinstance(v0, dtorch_tensor) else v0.undefined", "does not raise"),
        ("v1 = v0.undefined if isinstance(v0, dtorch_tensor) else v0", "raises AttributeError"),
    ],
)
def test_what_only_one_side_refuses_is_a_difference(
    line: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "_COMMON", {**sides._COMMON, "dtorch_tensor": dtorch.Tensor})
    started = Run((2,), "strict")
    started.step("v0 = make(1, (4,), torch.float64, [Replicate()], False)")
    with pytest.raises(Difference) as difference:
        started.step(line)
    assert difference.value.kind == kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("v0 = make(1, (4,) if is_plain else (3,), torch.int64, [Replicate()], False)", "another shape"),
        (
            "v0 = make(1, (4,), torch.int64 if is_plain else torch.int32, [Replicate()], False)",
            "another dtype",
        ),
        ("v0 = make(1, (4,), torch.float64, [Replicate()], is_plain)", "another requires_grad"),
        ("v0 = make(1, (4,), torch.float64, [Replicate()], False) + is_plain", "another value"),
    ],
)
def test_every_property_is_compared(line: str, kind: str) -> None:
    started = Run((2,), "strict")
    started.plain["is_plain"], started.remote["is_plain"] = True, False
    started.step(line)
    with pytest.raises(Difference) as difference:
        started.compare()
    assert difference.value.kind == kind
