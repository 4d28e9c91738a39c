"""Programs in ``auto_redistribute()`` give what plain PyTorch gives, however their tensors are placed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

A = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7 - 1.3
B = torch.arange(24, dtype=torch.float32).reshape(4, 6).flip(0) / 5 - 2.1
PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1), Partial()]
GRID_PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Partial(), Shard(0)),
    (Replicate(), Partial()),
]


def send(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Any, grad: bool = False) -> dtorch.Tensor:
    return dtorch.from_torch(
        tensor.detach(), device_mesh=mesh, placements=placements or None, requires_grad=grad
    )


def check(results: Any, expected: Any) -> None:
    """The same values, shapes and dtypes."""
    if isinstance(expected, list | tuple):
        assert len(results) == len(expected)
        for one, other in zip(results, expected, strict=True):
            check(one, other)
    else:
        assert isinstance(results, dtorch.Tensor)
        torch.testing.assert_close(results.to_torch(), expected.detach())
        assert results.stride() == expected.stride()


def check_program(
    mesh: DeviceMesh, program: Callable[..., Any], placements: Any, *given: torch.Tensor
) -> None:
    with dtorch.auto_redistribute():
        results = program(*(send(t, mesh, *p) for t, p in zip(given, placements, strict=True)))
    check(results, program(*(t.clone() for t in given)))


# ---- values ----


def _in_place(a: Any, b: Any) -> Any:
    same = a.add_(b)
    assert same is a
    b.mul_(2).cumsum_(0)
    a.clamp_(max=1).sub_(b)
    torch._foreach_add_([a, b], [b, a])
    return a, b


def _out(a: Any, b: Any) -> Any:
    target = torch.zeros_like(b)
    assert torch.add(a, b, out=target) is target
    torch.cumsum(target, 1, out=a)
    return a, target


def _out_of_other_kernels(a: Any, b: Any) -> Any:
    rows, number = torch.zeros_like(a[0]), torch.zeros_like(b[0, 0])
    torch.mean(a, 0, out=rows)
    torch.ops.aten.mse_loss.out(a, b, out=number)
    triangle = torch.tril(a, -1, out=torch.zeros_like(b))
    looked_up = torch.ops.aten.embedding.out(
        a, torch.ones_like(b[0]).long(), out=torch.zeros_like(b[[0] * 6])
    )
    return rows, number, triangle, looked_up


FUNCTIONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: (a @ b.t()).relu(),
    lambda a, b: torch.cat([a.cumsum(0), b.cumsum(1)]),
    lambda a, b: torch.where(a > b, a.exp(), b),
    lambda a, b: F.linear(a, b).softmax(0),
    lambda a, b: (a.t() * b.t()).cumsum(0),
    lambda a, b: a.sort(0).values - b.flip(1),
    lambda a, b: torch.stack([a, b]).amax((0, 2)),
    lambda a, b: F.layer_norm(a, (6,), b[0], b[1]),
    lambda a, b: F.pad(a, (1, 2, 1, 0)).sum(0)[:6] / (b.var() + 1),
    _in_place,
    _out,
    _out_of_other_kernels,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions(mesh: DeviceMesh, function: Callable[..., Any]) -> None:
    for a, b in itertools.product(PLACEMENTS, PLACEMENTS):
        check_program(mesh, function, ((a,), (b,)), A, B)


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_functions_on_a_grid(grid: DeviceMesh, function: Callable[..., Any]) -> None:
    for a, b in itertools.pairwise([*GRID_PLACEMENTS, GRID_PLACEMENTS[0]]):
        check_program(grid, function, (a, b), A, B)


def test_strict_outside_and_auto_inside(mesh: DeviceMesh) -> None:
    x, y = send(A, mesh, Shard(0)), send(B, mesh, Shard(1))
    for _ in range(2):
        with pytest.raises(dtorch.PlacementError, match="auto_redistribute"):
            x + y
        with dtorch.auto_redistribute():
            check(x + y, A + B)
            with dtorch.auto_redistribute(enabled=False), pytest.raises(dtorch.PlacementError):
                x + y


def test_meshes_are_not_mixed(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", [2, 3])
    with dtorch.auto_redistribute(), pytest.raises(dtorch.MeshError):
        send(A, mesh, Shard(0)) + send(B, other, Shard(0))


def test_the_list_names_lines_and_bytes(mesh: DeviceMesh) -> None:
    with dtorch.auto_redistribute():
        x, y = send(A, mesh, Shard(0)), send(B, mesh, Shard(1))
        for _ in range(3):
            x + y
    (record,) = dtorch.explain_redistributions()
    assert record.op == "aten::add.Tensor"
    assert (record.operand, record.source, record.target) == ("other", (Shard(1),), (Shard(0),))
    assert record.count == 3
    assert record.num_bytes == 3 * 2 * 24  # each of two devices receives a quarter of 96 bytes
    assert "test_client_auto.py" in record.location
    assert "x + y" in record.location


def test_the_list_has_what_strict_mode_documents(mesh: DeviceMesh) -> None:
    with dtorch.auto_redistribute():
        pass
    target = send(A, mesh, Shard(0))
    target.copy_(send(B, mesh, Shard(1)))
    target + send(B, mesh)  # a local slice moves nothing
    (record,) = dtorch.explain_redistributions()
    assert (record.op, record.operand, record.mode) == ("aten::copy_.default", "src", "strict")
    assert record.num_bytes == 48


# ---- gradients ----


def _through_views(a: Any, b: Any) -> Any:
    y = a * 2
    y[1:3].mul_(b[1:3])
    y.view(-1)[3:9].add_(b.reshape(-1)[3:9])
    y.t()[0:2].exp_()
    return (y**2).sum()


LOSSES: list[Callable[[Any, Any], torch.Tensor]] = [
    lambda a, b: ((a * b).cumsum(0) ** 2).sum(),
    lambda a, b: F.linear(a, b).log_softmax(-1)[1:3].sum(),
    lambda a, b: (a.cumsum(0).t() @ b.cumsum(1)).var(),
    lambda a, b: (a[:, ::2] * b[:, 1::2]).prod(1).mean(),
    _through_views,
]


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_gradients(mesh: DeviceMesh, loss: Callable[..., torch.Tensor]) -> None:
    leaves = [t.clone().requires_grad_() for t in (A, B)]
    loss(*leaves).backward()
    for a, b in itertools.product(PLACEMENTS, PLACEMENTS):
        symbols = [send(A, mesh, a, grad=True), send(B, mesh, b, grad=True)]
        with dtorch.auto_redistribute():
            loss(*symbols).backward()
        for symbol, leaf in zip(symbols, leaves, strict=True):
            assert symbol.grad is not None
            torch.testing.assert_close(symbol.grad.to_torch(), leaf.grad)  # type: ignore[operator]  # a dtorch.Tensor


def test_a_backward_pass_is_in_the_scope_it_was_started_in(mesh: DeviceMesh) -> None:
    """The gradient of x comes back cut otherwise than x's other factor is."""

    class Recut(torch.autograd.Function):
        """A gradient that no signature of ``mul`` fits."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient.redistribute(placements=[Shard(1)])

    def recut() -> torch.Tensor:
        x, y = send(A, mesh, Shard(0), grad=True), send(B, mesh, Shard(0))
        return Recut.apply(x.mul(y)).sum()  # type: ignore[no-any-return]  # a tensor

    outside = recut()
    with dtorch.auto_redistribute():
        inside = recut()
        outside.backward()
        strict = recut()
        with dtorch.auto_redistribute(enabled=False), pytest.raises(dtorch.PlacementError):
            strict.backward()
    with pytest.raises(dtorch.PlacementError):
        inside.backward()


def test_gradients_add_up_wherever_they_are(mesh: DeviceMesh) -> None:
    leaf = A.clone().requires_grad_()
    x = send(A, mesh, Shard(0), grad=True)
    for placement in PLACEMENTS[:3]:
        (leaf * B).sum().backward()
        with dtorch.auto_redistribute():
            (x.redistribute(placements=[placement]) * send(B, mesh, placement)).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.to_torch(), leaf.grad)  # type: ignore[operator]  # a dtorch.Tensor


# ---- models ----


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.first(x).relu()).chunk(2, dim=1)[0]
        result: torch.Tensor = self.last(torch.cat([hidden, hidden * 2], dim=1))
        return result


@pytest.mark.parametrize(
    "optimizer",
    # A bias before a normalization has no gradient but rounding; eps keeps AdamW from dividing it by itself.
    [partial(torch.optim.SGD, lr=0.1, weight_decay=0.01), partial(torch.optim.AdamW, lr=0.1, eps=1e-2)],
    ids=["SGD", "AdamW"],
)
def test_training_with_parameters_placed_anyhow(mesh: DeviceMesh, optimizer: Any) -> None:
    torch.manual_seed(0)
    plain = _Model().double()
    with dtorch.Graph.default_graph().device_mesh_guard(mesh):
        remote = _Model().double()
        remote.load_state_dict(plain.state_dict())
        placements = itertools.cycle([Shard(0), Replicate(), Shard(0)])
        for module in remote.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        where = next(placements) if tensor.ndim else Replicate()
                        symbol: Any = send(tensor, mesh, where)
                        tensors[name] = (
                            torch.nn.Parameter(symbol) if tensors is module._parameters else symbol
                        )
        x, y = torch.randn(5, 6).double(), torch.randn(5, 3).double()
        losses = []
        for model, send_ in ((plain, lambda t: t), (remote, lambda t: send(t, mesh, Shard(1)))):
            steps = optimizer(model.parameters())
            for step in range(3):
                with dtorch.auto_redistribute():
                    if step != 1:  # the gradients of two steps add up
                        steps.zero_grad()
                    loss = F.mse_loss(model(send_(x)), send_(y))
                    loss.backward()
                    steps.step()
            losses.append(loss.item())
        torch.testing.assert_close(losses[0], losses[1])
        for (name, one), other in zip(plain.state_dict().items(), remote.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other.to_torch(), msg=lambda text, name=name: f"{name}: {text}")


# ---- views ----


def _views(t: Any) -> Any:
    """Writes through views of one tensor, each seen by the others."""
    found = []
    rows, columns, flat = t[1:3], t.t()[:, 0:2], t.view(-1)
    rows.add_(1)
    found += [columns.clone(), flat[2:5] * 2]
    t.mul_(2)
    found += [rows * 1, columns.sum()]
    columns[0].fill_(3)
    found += [flat.clone(), rows.clone()]
    flat[3:9].neg_()
    found += [t.clone(), columns + 1]
    t.diagonal().zero_()
    t.split(1)[2].copy_(t[0:1])
    flat.unfold(0, 4, 4)[1].add_(5)
    first, second = t.unbind(0)[:2]
    first.add_(second)
    found += [rows[0] * 1, flat.detach() * 1]
    rows[:, 1] = 9
    t[0] += 1
    found += [t * 1, flat * 1, rows.view(-1)[2:] * 1, columns.t()[1] * 1]
    return found


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
def test_views_and_bases_see_each_others_writes(mesh: DeviceMesh, mode: Any, placement: Any) -> None:
    with mode():
        check_program(mesh, _views, [(placement,)], A)


def test_views_on_a_grid(grid: DeviceMesh) -> None:
    for placements in GRID_PLACEMENTS:
        check_program(grid, _views, [placements], A)


def test_a_linked_view_outlives_scope_and_base(mesh: DeviceMesh) -> None:
    x, a = send(A, mesh, Shard(0)), A.clone()
    with dtorch.auto_redistribute():
        view = x[1:3]
    assert isinstance(view, dtorch.Tensor)
    for base, part in ((x, view), (a, a[1:3])):
        part.mul_(2)
        base.add_(1)
        part.sub_(3)
    check(view, a[1:3])
    check(x, a)
    handle = x.detach()
    del x
    view.zero_()
    a[1:3].zero_()
    check(handle, a)


def _overlapping_lists(t: Any) -> Any:
    """Each position sees what the ones before it wrote."""
    torch._foreach_add_([t[0:2], t[1:3], t], 1.0)
    torch._foreach_mul_([t[:, 0:3], t[1]], [t[:, 3:6], t[2]])
    return t


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_lists_of_views_are_written_in_order(mesh: DeviceMesh, placement: Any) -> None:
    check_program(mesh, _overlapping_lists, [(placement,)], A)


def _other_values(t: Any) -> Any:
    """Symbols that come to stand for other values, linked or not."""
    alias, rows, found = t.view_as(t), t[1:3], []
    rows.t_()
    rows.add_(1)
    found += [t * 1, rows.sum(0)]
    rows.data[0:2].mul_(3)
    t.data.sub_(1)
    found += [t * 1, rows * 1]
    column = t[:, 0].unsqueeze(1)
    column.squeeze_(1)
    column.neg_()
    rows.data = t[0:2]
    rows.zero_()
    found += [t * 1, column * 1]
    t.resize_(6, 4)
    t[1:3] = 7
    found += [alias * 1, t * 1]
    column.set_(rows)
    column.fill_(2)
    found += [alias * 1, t.sum(0)]
    t.resize_as_(torch.empty(2, 3))
    t.add_(1)
    return [*found, t * 1, alias * 1, torch.add(alias[0:2], 1, out=alias.new_empty(0))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
def test_symbols_that_come_to_stand_for_other_values(mesh: DeviceMesh, mode: Any, placement: Any) -> None:
    with mode():
        check_program(mesh, _other_values, [(placement,)], A)


def _reads_what_it_writes(t: Any) -> Any:
    """Elements that are read after they were written: what torch does is what its kernels do in order."""
    t.sub_(t.unbind(1)[0][:, None])
    other = t.flip(0)
    other += other.narrow(1, 1, 1)
    t[:, 0:3].sub_(t[:, 2:3])
    return t, other


def _copies_and_views(t: Any) -> Any:
    """What can be a view again is decided by the strides in the memory of the base."""
    part = t[:, 1:][2:4]
    copied, viewed = part.flatten(0), part.unflatten(1, (5, 1)).view(2, 5)
    t[torch.tensor([1, 3, 0], device=t.device)] = 2
    assert part.stride() == viewed.stride() == (6, 1)
    viewed.add_(1)
    return copied * 1, viewed * 1, t * 1


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_copies_stay_copies_and_views_stay_views(mesh: DeviceMesh, placement: Any) -> None:
    check_program(mesh, _copies_and_views, [(placement,)], A)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_ops_that_read_what_they_write(mesh: DeviceMesh, placement: Any) -> None:
    check_program(mesh, _reads_what_it_writes, [(placement,)], A)


def test_views_share_one_copy(mesh: DeviceMesh) -> None:
    with dtorch.auto_redistribute():
        x = send(A, mesh, Shard(0))
        views = [x[number] for number in range(4)]
        views[0].add_(views[1])
        check(torch.stack(views), torch.stack([A[0] + A[1], A[1], A[2], A[3]]))
    gathered = [r for r in dtorch.explain_redistributions() if r.op == "aten::select.int"]
    assert [(r.operand, r.count) for r in gathered] == [("self", 1), ("self (back)", 1)]


def test_a_linked_view_is_redistributed(mesh: DeviceMesh) -> None:
    with dtorch.auto_redistribute():
        x = send(A, mesh, Shard(0), grad=True)
        moved: Any = x[1:3].redistribute(placements=[Replicate()])  # type: ignore[attr-defined]  # a dtorch.Tensor
    assert type(moved) is dtorch.Tensor
    check(moved, A[1:3])


def test_what_links_cannot_do_is_refused(mesh: DeviceMesh) -> None:
    x = send(A, mesh, Shard(0))
    with dtorch.auto_redistribute():
        one, other = x[1:3], x.view(-1)[1:7]
        with pytest.raises(dtorch.PlacementError, match="one after the other"):
            torch.aminmax(send(B, mesh), dim=0, out=(one[0], other))
        with pytest.raises(dtorch.PlacementError, match="memory"):
            one[:, 0:2].clone().redistribute(placements=[Shard(0)])[0].as_strided((2, 2), (1, 1))
        with pytest.raises(dtorch.PlacementError, match="memory"):
            one.resize_(5, 6)
    check(x, A)


def test_writing_to_an_expanded_tensor_is_refused_as_in_torch(mesh: DeviceMesh) -> None:
    expanded = send(A[0], mesh, Shard(0)).expand(4, 6)
    with dtorch.auto_redistribute(), pytest.raises(RuntimeError, match="more than one element"):
        expanded.add_(send(B, mesh, Shard(0)))


def _writes_through_repetitions(a: Any) -> Any:
    wide = a[:, :1].expand(4, 5)
    row, column, diagonal = wide[2], wide[:, 1], wide.diagonal(1)
    column.mul_(2)
    row[:1].add_(1)
    diagonal[1:3].add_(row[1:2])
    a.add_(1)
    three = a.expand(3, 4, 6)
    three[1, 2, 3:5].zero_()
    three.transpose(0, 2).diagonal()[0, :1].add_(7)
    return [a, row, column, diagonal, three, wide[1:]]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_writes_to_one_repetition_are_in_all(mesh: DeviceMesh, placement: Any) -> None:
    check_program(mesh, _writes_through_repetitions, [(placement,)], A)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_writes_to_windows_that_overlap_are_refused(mesh: DeviceMesh, placement: Any) -> None:
    check_program(mesh, lambda a: [a.unfold(0, 2, 1)[:, 1] * 2, a.unfold(1, 2, 1)[1] * 2], [(placement,)], A)
    with dtorch.auto_redistribute():
        windows = send(A, mesh, placement).unfold(1 - placement.dim, 2, 1)
        column = windows.select(placement.dim, 1)
        with pytest.raises(dtorch.PlacementError, match="share memory.*write to the tensor that this one is"):
            column[0].zero_()


@pytest.mark.filterwarnings("ignore:Use of index_fill_ on expanded")
def test_a_copy_is_not_brought_back_into_an_expanded_tensor(mesh: DeviceMesh) -> None:
    index = dtorch.tensor([1, 2], device_mesh=mesh)
    expanded = send(A[0], mesh, Shard(0)).expand(4, 6)
    with dtorch.auto_redistribute(), pytest.raises(dtorch.PlacementError, match=r"self\.redistribute\("):
        expanded.index_fill_(1, index, 0)
