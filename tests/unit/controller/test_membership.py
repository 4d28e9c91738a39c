"""Device numbers: contiguous, in order, kept for the name, never given to another."""

from __future__ import annotations

import random

import pytest

from dtorch_runtime.controller.membership import JoinRefused, Membership
from tests.support.control import node_hello


def test_numbers_never_overlap_however_nodes_come_and_go(rng: random.Random) -> None:
    membership = Membership()
    owner: dict[int, str] = {}
    live: dict[str, int] = {}
    for step in range(300):
        name = f"node{rng.randrange(6)}"
        if name in live and rng.random() < 0.6:
            membership.leave(live.pop(name))
        elif name in live:
            with pytest.raises(JoinRefused, match="already there"):
                membership.join(step, node_hello(name))
        else:
            node = membership.join(step, node_hello(name, rng.randrange(1, 4)))
            devices = node.record.devices
            assert devices == list(range(devices[0], devices[0] + len(devices)))
            assert all(owner.setdefault(device, name) == name for device in devices)
            live[name] = node.number
        membership.validate()
    assert {node.name for node in membership} == set(live)


def test_records_may_leave_one_out() -> None:
    membership = Membership()
    first = membership.join(1, node_hello("a"))
    membership.join(2, node_hello("b"))
    assert [record.name for record in membership.records(without=first.number)] == ["b"]
    assert membership.get(first.number) is first
    assert membership.named("b") is not None
    assert len(membership) == 2
