"""Lazy conjugates and negatives are what they are in PyTorch: in value, memory, bits, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard
from tests.integration.aliasing_programs import Send
from tests.integration.conjugate_programs import NOT_CONVERTED, PROGRAMS, X
from tests.integration.test_client_aliasing import compare, outcome, plain, sender


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(mesh: DeviceMesh, program: Callable[[Send], Any]) -> None:
    """Whole, cut on either dim (unevenly, too), and converted; sharded, or refused by placement in strict mode."""
    expected = outcome(program, plain)
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        for placement in (Replicate(), Shard(0), Shard(1, 4)):
            for scope in (nullcontext, dtorch.auto_redistribute):
                with scope():
                    actual = outcome(program, sender(mesh, placement))
                may_refuse = scope is nullcontext or program.__name__.startswith(NOT_CONVERTED)
                if placement != Replicate() and may_refuse and isinstance(actual, PlacementError):
                    continue
                where = f"{placement}, {scope.__name__}"
                if scope is nullcontext:
                    compare(actual, expected, where)
                else:
                    compare(without_offsets(actual), without_offsets(expected), where)


def without_offsets(facts: Any) -> Any:
    """A view of a converted copy counts from the start of the copy."""
    if isinstance(facts, list):
        return [without_offsets(item) for item in facts]
    if isinstance(facts, dict):
        return {name: fact for name, fact in facts.items() if name != "offset"}
    return facts


LOOKS: dict[str, Callable[[Any], Any]] = {
    "conj": lambda x: x.conj(),
    "conj twice": lambda x: x.conj().conj(),
    "mH": lambda x: x.mH,
    "conj real": lambda x: x.conj().real,
    "conj imag": lambda x: x.conj().imag,
    "negative": lambda x: x._neg_view(),
}
PLACEMENTS = [Replicate(), Shard(0), Shard(1, 4), Partial()]


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
@pytest.mark.parametrize("target", PLACEMENTS, ids=str)
def test_redistribute(mesh: DeviceMesh, look: Callable[[Any], Any], source: Any, target: Any) -> None:
    """What moves is a value of its own, resolved; the same placement gives the same memory, and its bits."""
    x = dtorch.from_torch(X, device_mesh=mesh, placements=[source], requires_grad=True)
    want = X.clone().requires_grad_()
    seen = look(x * 1).redistribute(placements=[target])
    assert (seen.is_conj(), seen.is_neg()) == (False, False) or source == target
    resolved = seen.resolve_conj().resolve_neg()
    torch.testing.assert_close(resolved.to_torch(), look(want).detach().resolve_conj().resolve_neg())
    parts = torch.view_as_real(resolved) if resolved.is_complex() else resolved
    parts.redistribute(placements=[Replicate()]).square().sum().backward()
    wanted = look(want).resolve_conj().resolve_neg()
    (torch.view_as_real(wanted) if wanted.is_complex() else wanted).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.to_torch(), want.grad)


def test_redistribute_to_another_mesh(cluster: dtorch.Cluster) -> None:
    here, there = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    x = dtorch.from_torch(X, device_mesh=here, placements=[Shard(0)])
    moved = x.conj().redistribute(there, [Shard(1)])
    moved.real.zero_()
    moved.imag.add_(1)
    torch.testing.assert_close(moved.to_torch(), torch.complex(torch.zeros(4, 6), 1 - X.imag))
    torch.testing.assert_close(x.to_torch(), X)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_terms_of_a_sum(mesh: DeviceMesh, look: Callable[[Any], Any]) -> None:
    """Partial tensors have lazy views, too, which writes that are linear go through."""
    x = dtorch.from_torch(X, device_mesh=mesh, placements=[Partial()])
    want = X.clone()
    for tensor in (x, want):
        look(tensor).mul_(3)
        look(tensor).resolve_conj().resolve_neg().zero_()
        look(tensor).clone().zero_()
    assert x.placements == (Partial(),)
    torch.testing.assert_close(x.to_torch(), want)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_sending_a_lazy_tensor(mesh: DeviceMesh, look: Callable[[Any], Any], placement: Any) -> None:
    sent = dtorch.from_torch(look(X), device_mesh=mesh, placements=[placement])
    assert (sent.is_conj(), sent.is_neg()) == (False, False)
    torch.testing.assert_close(sent.to_torch(), look(X).resolve_conj().resolve_neg())
    if sent.is_complex():
        torch.testing.assert_close(torch.view_as_real(sent).to_torch(), torch.view_as_real(look(X).clone()))
