"""Results whose shape depends on data: the client waits for the shape only, and values are those of plain PyTorch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, PlacementError, Replicate, Shard

X = torch.arange(72, dtype=torch.float32).reshape(4, 6, 3).mul(0.37).sin()
ROWS = torch.tensor([True, False, True, True])
COLUMNS = torch.tensor([True, False, False, True, True, False])
MATRIX = X[..., 0] > 0
TAIL = X[1] > 0
PICKS = torch.tensor([0, 2, 1])
LABELS = torch.tensor([3, 1, 1, 0, 5, 3, 3])
WEIGHTS = torch.tensor([1.0, 0.5, -1.0, 2.0, 0.25, 3.0, 1.5])

#: What turns a plain tensor into an argument.
Send = Callable[[torch.Tensor], Any]
Case = Callable[[Any, Send], Any]


def _put(x: Any, index: Any, value: Any) -> Any:
    y = x.clone()
    y[index] = value
    return y


def _gradient(function: Callable[[Any], Any], x: Any) -> Any:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x)
    return gradient


#: Each gets x [4, 6, 3], and what sends a mask or an index.
CASES: dict[str, Case] = {
    "x[rows]": lambda x, send: x[send(ROWS)],
    "x[:, columns]": lambda x, send: x[:, send(COLUMNS)],
    "x[matrix]": lambda x, send: x[send(MATRIX)],
    "x[..., tail]": lambda x, send: x[..., send(TAIL)],
    "x[x > 0]": lambda x, send: x[x > 0],
    "x[0, tail]": lambda x, send: x[0, send(TAIL)],
    "x[rows, :, picks]": lambda x, send: x[send(ROWS), :, send(PICKS)],
    "x[rows, picks]": lambda x, send: x[send(ROWS), send(PICKS)],
    "x[None, rows]": lambda x, send: x[None, send(ROWS)],
    "x[1:3, columns, 1:]": lambda x, send: x[1:3, send(COLUMNS), 1:],
    "x[list]": lambda x, send: x[ROWS.tolist()],
    "x[nothing]": lambda x, send: x[send(ROWS & ~ROWS)],
    "x[true]": lambda x, send: x[send(torch.tensor(True))],
    "masked_select": lambda x, send: x.masked_select(send(TAIL)),
    "nonzero": lambda x, send: torch.nonzero(x > 0),
    "nonzero as tuple": lambda x, send: (x > 0).nonzero(as_tuple=True),
    "nonzero_static": lambda x, send: torch.nonzero_static(send(MATRIX), size=5),
    "where": lambda x, send: torch.where(x > 0.5),
    "argwhere": lambda x, send: torch.argwhere(x > 0),
    "unique": lambda x, send: torch.unique(x.round(), return_inverse=True, return_counts=True),
    "unique of rows": lambda x, send: torch.unique(x.round(), dim=0),
    "unique_consecutive": lambda x, send: torch.unique_consecutive(x.round(), return_counts=True),
    "repeat_interleave": lambda x, send: x.repeat_interleave(send(torch.tensor([2, 0, 1, 3])), 0),
    "repeat_interleave of size": lambda x, send: x.repeat_interleave(send(PICKS), 2, output_size=3),
    "bincount": lambda x, send: torch.bincount(send(LABELS)),
    "bincount with weights": lambda x, send: torch.bincount(send(LABELS), send(WEIGHTS), minlength=8),
    "histc": lambda x, send: torch.histc(x, 5, -1, 1),
    "histc of all": lambda x, send: torch.histc(x, 5),
    "histogram": lambda x, send: torch.histogram(x, 4, range=(-1.0, 1.0)),
    "histogram of edges": lambda x, send: torch.histogram(x, send(torch.tensor([-1.0, 0.1, 1.0])), weight=x),
    "histogramdd": lambda x, send: torch.histogramdd(x, [2, 3, 2], range=[-1.0, 1.0] * 3),
    "tensor_split": lambda x, send: x.tensor_split(send(torch.tensor([1, 4])), 1),
    "tensor_split in parts": lambda x, send: x.tensor_split(send(torch.tensor(2)), 1),
    "one_hot": lambda x, send: F.one_hot(send(LABELS)),
    "isin": lambda x, send: torch.isin(send(LABELS), send(torch.tensor([1, 5]))),
    "combinations": lambda x, send: torch.combinations(send(WEIGHTS)),
    "segment_reduce": lambda x, send: torch.segment_reduce(x, "sum", lengths=send(torch.tensor([1, 3]))),
    "masked.mean": lambda x, send: torch.masked.mean(x, 1, mask=send(MATRIX).unsqueeze(-1)),
    "x[matrix] = 1.5": lambda x, send: _put(x, send(MATRIX), 1.5),
    "x[:, columns] = -1": lambda x, send: _put(x, (slice(None), send(COLUMNS)), -1),
    "x[x > 0] = 0": lambda x, send: _put(x, x > 0, 0),
    "x[rows] = rows": lambda x, send: _put(x, send(ROWS), send(X[:3] * 2)),
    "x[rows, picks] = row": lambda x, send: _put(x, (send(ROWS), send(PICKS)), send(X[0, 0])),
    "index_put": lambda x, send: x.index_put((send(ROWS),), send(X[0, 0]), accumulate=True),
    "gradient of x[matrix]": lambda x, send: _gradient(lambda x: (x[send(MATRIX)] ** 2).sum(), x),
    "gradient of x[..., tail]": lambda x, send: _gradient(lambda x: x[..., send(TAIL)].exp().sum(), x),
    "gradient of masked_select": lambda x, send: _gradient(
        lambda x: x.masked_select(send(TAIL)).exp().sum(), x
    ),
    "gradient of repeat_interleave": lambda x, send: _gradient(
        lambda x: x.repeat_interleave(send(PICKS), 2).exp().sum(), x
    ),
    "gradient of tensor_split": lambda x, send: _gradient(
        lambda x: x.tensor_split(send(torch.tensor([1, 4])), 1)[1].exp().sum(), x
    ),
}
#: Of x, and of masks and indices.
PLACEMENTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(2), Replicate()),
    (Partial(), Replicate()),
]


def values_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, dtorch.Tensor):
        return [result.to_torch()]
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [value for item in result for value in values_of(item)]


def given_x(mesh: DeviceMesh, placement: Any) -> Any:
    if isinstance(placement, Partial):
        return dtorch.from_torch(X, device_mesh=mesh).redistribute(placements=[placement])
    return dtorch.from_torch(X, device_mesh=mesh, placements=[placement])


def refusal_of(check: Callable[[], None]) -> PlacementError | None:
    try:
        check()
    except PlacementError as error:
        return error
    return None


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_integers_are_counted_in_bins_as_on_a_gpu(mesh: DeviceMesh, placement: Any) -> None:
    """Torch has no such kernel for a CPU."""
    labels = torch.tensor([0, 3, 3, 1, 5, 6, 2], dtype=torch.int32)
    counts = torch.histc(dtorch.from_torch(labels, device_mesh=mesh, placements=[placement]), 6, 0, 6)
    assert counts.dtype is torch.int32
    assert counts.to_torch().tolist() == torch.histc(labels.float(), 6, 0, 6).tolist()


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(mesh: DeviceMesh, name: str) -> None:
    """Whole inputs work; others are equal or refused with the fix, and then work in the auto scope."""
    expected = values_of(CASES[name](X, lambda t: t))
    for placement, cut in PLACEMENTS:

        def send(tensor: torch.Tensor, cut: Any = cut) -> Any:
            placements = [cut if tensor.ndim else Replicate()]
            return dtorch.from_torch(tensor, device_mesh=mesh, placements=placements)

        def check(placement: Any = placement, send: Send = send) -> None:
            actual = values_of(CASES[name](given_x(mesh, placement), send))
            torch.testing.assert_close(actual, expected)

        refused = refusal_of(check)
        if refused is not None:
            assert placement != Replicate(), refused
            assert "write:" in str(refused), refused
            with dtorch.auto_redistribute():
                check()


# ---- in an event loop ----


@pytest.fixture
def x(mesh: DeviceMesh) -> Any:
    return dtorch.from_torch(X[0], device_mesh=mesh, requires_grad=True)


async def test_calls_that_wait_are_awaited(x: Any) -> None:
    rows, positive = await asyncio.gather(
        dtorch.call_async(torch.nonzero, x > 0), dtorch.call_async(torch.masked_select, x, x > 0)
    )
    assert torch.equal(rows.to_torch(), torch.nonzero(X[0] > 0))
    (gradient,) = torch.autograd.grad((positive**2).sum(), x)
    torch.testing.assert_close(await gradient.value(), torch.where(X[0] > 0, 2 * X[0], 0.0))
    assert await dtorch.call_async(bool, (x < 2).all()) is True


async def test_the_loop_goes_on_while_a_call_waits(mesh: DeviceMesh) -> None:
    a = dtorch.rand(400, 400, device_mesh=mesh)
    for _ in range(20):
        a = (a @ a).clamp(0, 1)
    call = dtorch.call_async(torch.nonzero, a)
    turns = 0
    while not call.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    assert (await call).shape == (400 * 400, 2)


async def test_a_call_runs_as_it_would_have_here(x: Any, mesh: DeviceMesh) -> None:
    def state() -> Any:
        made = torch.zeros(2)
        y = x[x > 0] @ x[x > 0]
        return made.device.type, made.graph, made.device_mesh, y.requires_grad, y.dtype

    graph = dtorch.Graph()
    with (
        graph,
        graph.device_mesh_guard(mesh),
        torch.device("dtorch"),
        torch.no_grad(),
        torch.autocast("dtorch", torch.bfloat16),
    ):
        assert await dtorch.call_async(state) == state()
        assert state() == ("dtorch", graph, mesh, False, torch.bfloat16)
    cut = x.detach().redistribute(placements=[Shard(0)])
    with pytest.raises(PlacementError, match="only the data tells the shape"):
        await dtorch.call_async(torch.unique, cut)
    with dtorch.auto_redistribute():
        found = await dtorch.call_async(torch.unique, cut)
    assert len(found) == len(X[0].unique())


async def test_numbers_are_awaited(x: Any) -> None:
    assert await x.sum().item_async() == pytest.approx(X[0].sum().item())
    assert await (x > 0).tolist_async() == (X[0] > 0).tolist()
    assert x[0, 0].item_async().get() == X[0, 0, 0].item()
    with pytest.raises(RuntimeError, match="18 elements cannot be converted"):
        x.item_async()


async def test_an_op_that_fails_shows_the_line_that_called_it(x: Any, mesh: DeviceMesh) -> None:
    repeats = dtorch.tensor([1, -1], device_mesh=mesh)
    with pytest.raises(dtorch.RemoteOpError, match="repeats can not be negative") as raised:
        await dtorch.call_async(torch.repeat_interleave, repeats)
    assert "await dtorch.call_async(torch.repeat_interleave, repeats)" in str(raised.value)
    with pytest.raises(dtorch.RemoteOpError) as raised:
        torch.repeat_interleave(repeats)
    assert "        torch.repeat_interleave(repeats)" not in str(raised.value.location)
    assert "torch.repeat_interleave(repeats)" in raised.value.location
    assert x.sum().isfinite()


async def test_a_call_may_be_given_up(x: Any) -> None:
    call = dtorch.call_async(torch.nonzero, x > 0)
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    again = await dtorch.call_async(torch.nonzero, x > 0)
    assert torch.equal(again.to_torch(), torch.nonzero(X[0] > 0))


def test_outside_of_a_loop_there_is_nothing_to_await(x: Any) -> None:
    with pytest.raises(dtorch.UnsupportedError, match="call the function itself"):
        dtorch.call_async(torch.nonzero, x)


def test_masks_of_other_shapes_are_refused_at_once(x: Any) -> None:
    for index in (x[:, 0] > 0, torch.tensor([True, False])):
        with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
            x[:, index]
        with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
            x.detach()[:, index] = 1


def test_out_is_resized(x: Any, mesh: DeviceMesh) -> None:
    out = dtorch.zeros(2, 2, dtype=torch.int64, device_mesh=mesh)
    mask = dtorch.tensor([[False, True], [True, False]], device_mesh=mesh)
    assert torch.nonzero(mask, out=out) is out
    assert out.tolist() == [[0, 1], [1, 0]]
    with pytest.warns(UserWarning, match="was resized since it had shape"):
        torch.nonzero(~mask | mask, out=out)
    assert out.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    empty = dtorch.empty(0, device_mesh=mesh)
    torch.masked_select(x.detach(), x > 0.9, out=empty)
    assert torch.equal(empty.to_torch(), X[0][X[0] > 0.9])


# ---- routing to experts ----


class Experts(torch.nn.Module):
    """A mixture of experts as in Mixtral and Qwen-MoE: each token goes to the best two, which only work for theirs."""

    def __init__(self, hidden: int = 6, num_experts: int = 4) -> None:
        super().__init__()
        self.router = torch.nn.Linear(hidden, num_experts, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(hidden, 8), torch.nn.SiLU(), torch.nn.Linear(8, hidden))
            for _ in range(num_experts)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        tokens = states.reshape(-1, states.shape[-1])
        weights, chosen = torch.topk(F.softmax(self.router(tokens), dim=1, dtype=torch.float), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        result = torch.zeros_like(tokens)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            rank, token = torch.where(mask[int(hit)])
            output = self.experts[int(hit)](tokens[None, token].reshape(-1, tokens.shape[-1]))
            result.index_add_(0, token, (output * weights[token, rank, None]).to(states.dtype))
        return result.reshape(states.shape)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "sharded"])
def test_routing_to_experts(mesh: DeviceMesh, cut: bool) -> None:
    torch.manual_seed(3)
    plain = Experts()
    remote = copy.deepcopy(plain)
    for module in remote.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if cut else Replicate()
            value = dtorch.from_torch(parameter.detach(), device_mesh=mesh, placements=[placement])
            setattr(module, name, torch.nn.Parameter(value))
    given = torch.randn(2, 5, 6)
    states = dtorch.from_torch(given, device_mesh=mesh, placements=[Shard(0) if cut else Replicate()])
    with dtorch.auto_redistribute(enabled=cut):
        actual = remote(states)
        actual.pow(2).sum().backward()
    expected = plain(given)
    expected.pow(2).sum().backward()
    torch.testing.assert_close(actual.cpu(), expected)
    for mine, theirs in zip(remote.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)  # type: ignore[union-attr]  # it has one


#: Of uneven rows, with some, one or none of them true; rank 0 to 3; and numbers, real and complex.
SCATTERED = {
    "rows": torch.arange(35).view(7, 5) % 3 == 1,
    "one row": torch.arange(7) == 4,
    "no row": torch.zeros(7, 2),
    "fewer rows than devices": torch.tensor([[0.0, 2.0], [-1.0, 0.0], [0.5, 0.5]]),
    "many dims": (torch.arange(42).view(7, 2, 3) % 4).to(torch.complex64),
    "no elements": torch.zeros(7, 0),
}
BY_ROWS = [
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0, unit=2), Replicate()],
]


@pytest.mark.parametrize("placements", BY_ROWS, ids=str)
@pytest.mark.parametrize("name", SCATTERED)
def test_devices_add_the_places_of_their_rows(grid: DeviceMesh, name: str, placements: list[Any]) -> None:
    plain = SCATTERED[name]
    x = dtorch.from_torch(plain, device_mesh=grid, placements=placements)
    found = torch.nonzero(x)
    terms = [Partial() if isinstance(p, Shard) else p for p in placements]
    assert (found.placements, found.shape) == (tuple(terms), plain.nonzero().shape)
    assert torch.equal(found.to_torch(), plain.nonzero())
    for size in (0, 2, 50):
        first = torch.nonzero_static(x, size=size, fill_value=-7)
        assert torch.equal(first.to_torch(), torch.nonzero_static(plain, size=size, fill_value=-7))


@pytest.mark.parametrize(
    "placements", [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(2)]], ids=str
)
@pytest.mark.parametrize(
    "mask", [ROWS, MATRIX, TAIL, X > 0, torch.tensor(True)], ids=lambda m: str(tuple(m.shape))
)
def test_a_whole_mask_selects_of_a_cut_tensor(
    grid: DeviceMesh, mask: torch.Tensor, placements: list[Any]
) -> None:
    shaped = mask.view(*mask.shape, *[1] * (0 if mask.shape == TAIL.shape else 3 - mask.ndim))
    x = dtorch.from_torch(X, device_mesh=grid, placements=placements, requires_grad=True)
    plain = X.clone().requires_grad_()
    ours = torch.masked_select(x, dtorch.from_torch(shaped, device_mesh=grid))
    assert torch.equal(ours.to_torch(), plain.masked_select(shaped))
    weights = torch.arange(float(len(ours)))
    whole = ours.redistribute(placements=[Replicate()] * 2)
    (whole * dtorch.from_torch(weights, device_mesh=grid)).sum().backward()
    plain.masked_select(shaped).mul(weights).sum().backward()
    assert torch.equal(x.grad.to_torch(), plain.grad)
