"""Small programs about lazy conjugates and negatives (``x.conj()``, ``x.conj().imag``), run on both kinds of tensors.

Each gives tensors, of which is compared whether torch takes them for lazy, or what it raises. The table below makes a
program of each look at a tensor: what it is, whose memory it is, and its gradient.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from tests.integration.aliasing_programs import Send

PROGRAMS: list[Callable[[Send], Any]] = []
X = torch.complex(torch.arange(24.0).reshape(4, 6) / 7 + 1, torch.arange(24.0).reshape(4, 6).flip(1) / 5 - 2)
Y = X.roll(1, 0) * 0.5j + 1


def program(function: Callable[[Send], Any]) -> Callable[[Send], Any]:
    PROGRAMS.append(function)
    return function


def _named(name: str, function: Callable[[Send], Any]) -> None:
    function.__name__ = name
    PROGRAMS.append(function)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "conj": lambda x: x.conj(),
    "conj twice": lambda x: x.conj().conj(),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "conj real": lambda x: x.conj().real,
    "conj imag": lambda x: x.conj().imag,
    "torch.real": lambda x: torch.real(x.conj()),
    "torch.imag": lambda x: torch.imag(x.conj()),
    "conj real of a real": lambda x: x.conj().real.conj(),
    "conj imag of the transposed": lambda x: x.mH.imag,
    "imag negated": lambda x: x.conj().imag._neg_view(),
    "view_as_real": lambda x: torch.view_as_real(x),
    "view_as_real of a conj": lambda x: torch.view_as_real(x.conj()),
    "view_as_real of two": lambda x: torch.view_as_real(x.conj().conj()),
    "view_as_real of resolved": lambda x: torch.view_as_real(x.conj().resolve_conj()),
    "view_as_real of _conj": lambda x: torch.view_as_real(torch._conj(torch._conj(x))),
    "view_as_complex of a negative": lambda x: torch.view_as_complex(torch.view_as_real(x)._neg_view()),
    "negative": lambda x: x._neg_view(),
    "negative conj": lambda x: x._neg_view().conj(),
    "negative conj imag": lambda x: x._neg_view().conj().imag,
    "negative view_as_real": lambda x: torch.view_as_real(x._neg_view()),
    "resolve_conj": lambda x: x.conj().resolve_conj(),
    "resolve_conj of none": lambda x: x.resolve_conj(),
    "resolve_conj of two": lambda x: x.conj().conj().resolve_conj(),
    "resolve_neg": lambda x: x.conj().imag.resolve_neg(),
    "resolve_neg of none": lambda x: x.imag.resolve_neg(),
    "resolve_neg of a conj": lambda x: x.conj().resolve_neg(),
    "conj_physical": lambda x: x.conj_physical(),
    "conj_physical of a conj": lambda x: x.conj().conj_physical(),
    "clone": lambda x: x.conj().clone(),
    "clone of imag": lambda x: x.conj().imag.clone(),
    "contiguous": lambda x: x.conj().contiguous(),
    "contiguous of transposed": lambda x: x.mH.contiguous(),
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
    "mT": lambda x: x.conj().mT,
    "T": lambda x: x.conj().T,
    "adjoint": lambda x: x.adjoint(),
    "adjoint twice": lambda x: x.adjoint().adjoint(),
    "row": lambda x: x.conj()[1],
    "rows": lambda x: x.conj()[1:3],
    "column": lambda x: x.conj()[:, 2],
    "columns of imag": lambda x: x.conj().imag[:, ::2],
    "element": lambda x: x.conj()[2, 3],
    "picked": lambda x: x.conj()[torch.tensor([2, 0], device=x.device)],
    "view": lambda x: x.conj().view(2, 2, 6),
    "reshape": lambda x: x.conj().reshape(24),
    "reshape to a copy": lambda x: x.mH.reshape(24),
    "view_as": lambda x: x.conj().view_as(x),
    "view of another dtype": lambda x: x.conj().view(torch.float32),
    "view of another dtype of imag": lambda x: x.conj().imag.view(torch.int32),
    "view of the same dtype": lambda x: x.conj().view(x.dtype),
    "unsqueeze": lambda x: x.conj().unsqueeze(1),
    "permute": lambda x: x.conj().unsqueeze(0).permute(2, 0, 1),
    "diagonal": lambda x: x.conj().diagonal(),
    "unfold": lambda x: x.conj().unfold(1, 2, 2),
    "split": lambda x: x.conj().split([2, 4], 1)[1],
    "unbind": lambda x: x.conj().unbind(1)[3],
    "as_strided": lambda x: x.conj().as_strided((2, 3), (6, 2)),
    "as_strided with an offset": lambda x: x.conj().as_strided((2, 3), (6, 2), 1),
    "detach": lambda x: x.conj().detach(),
    "data": lambda x: x.conj().data,
    "alias": lambda x: torch.ops.aten.alias(x.conj()),
    "_lazy_clone": lambda x: torch._lazy_clone(x.conj()),
    "_lazy_clone of x": lambda x: torch._lazy_clone(x),
    "view_copy": lambda x: torch.view_copy(x.conj(), (24,)),
    "_conj_copy": lambda x: torch._conj_copy(x),
    "_neg_view_copy": lambda x: torch._neg_view_copy(x.conj().imag),
    "to": lambda x: x.conj().to(x.dtype),
    "to another dtype": lambda x: x.conj().to(torch.complex128),
    "to a copy": lambda x: x.conj().to(x.dtype, copy=True),
    "zeros_like": lambda x: torch.zeros_like(x.conj()),
    "new tensors": lambda x: x.conj() + 1,
    "imag plus": lambda x: x.conj().imag + x.conj().real,
    "cat": lambda x: torch.cat([x.conj(), x]),
    "product": lambda x: x.conj() @ x.mT,
    "product of adjoint": lambda x: x @ x.mH,
    "product with a vector": lambda x: x.conj() @ x[0],
    "product of imag": lambda x: x.conj().imag @ x.imag.mT,
    "bmm": lambda x: torch.bmm(x.view(2, 2, 6), x.view(2, 2, 6).mH),
    "addmm": lambda x: torch.addmm(x[:, :4].conj(), x.conj(), x.mH),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.conj()),
    "linear": lambda x: torch.nn.functional.linear(x.conj(), x.conj()),
    "vdot": lambda x: torch.vdot(x[:, 1].conj(), x[:, 2]),
    "dot": lambda x: torch.dot(x[:, 1].conj(), x[:, 2]),
    "dot of two": lambda x: torch.dot(x[:, 1].conj(), x[:, 2].conj()).imag,
    "dot of none": lambda x: torch.dot(x[:, 1], x[:, 2]).imag,
    "vdot of the second": lambda x: torch.vdot(x[:, 1], x[:, 2].conj()).imag,
    "vdot of two": lambda x: torch.vdot(x[:, 1].conj(), x[:, 2].conj()).imag,
    "vector @ vector": lambda x: (x[:, 1].conj() @ x[:, 2].conj()).resolve_conj().imag,
    "inner": lambda x: torch.inner(x[1].conj(), x[2].conj()).resolve_conj().imag,
    "vecdot": lambda x: torch.linalg.vecdot(x, x.conj()).imag,
    "solved from the right": lambda x: torch.linalg.solve(_square(x), x.mH, left=False).resolve_conj().imag,
    "solved with factors": lambda x: (
        torch.linalg.lu_solve(
            *torch.linalg.lu_factor(_square(x)), x.mH, left=False, adjoint=True
        ).resolve_conj()
        / 20
    ),
    "sum": lambda x: x.conj().sum(1),
    "abs": lambda x: x.conj().abs(),
    "angle": lambda x: x.conj().angle(),
    "fft": lambda x: torch.fft.fft(x.conj(), dim=1),
    "svd": lambda x: torch.linalg.svdvals(x.conj()),
    "pinv": lambda x: torch.linalg.pinv(x.conj()),
    "triangular": lambda x: torch.linalg.solve_triangular(
        (x.mH @ x).tril() / 99 + 2 * torch.eye(6, device=x.device), x.mH, upper=False
    ),
}
#: These look at the memory around a view, which a converted copy has not.
NOT_CONVERTED = ("as_strided", "resize_")


def _square(x: Any) -> Any:
    return x @ x.mT / 99 + 2 * torch.eye(4, device=x.device)


def bits(tensor: Any) -> Any:
    return [tensor, tensor.is_conj(), tensor.is_neg()]


def _weights(tensor: Any) -> Any:
    count = torch.arange(1.0, tensor.numel() + 1, device=tensor.device).view(tensor.shape)
    return torch.complex(count, 2 - count) if tensor.is_complex() else count


for _name, _look in LOOKS.items():

    def _written_to(send: Send, look: Callable[[Any], Any] = _look) -> Any:
        x = send(X)
        seen = look(x)
        before = bits(seen.clone())
        if seen.is_floating_point() or seen.is_complex():
            seen.mul_(3 if seen.is_floating_point() else 3 + 1j)
        return [before, bits(seen), x, seen._version, x._version]

    def _base_written_to(send: Send, look: Callable[[Any], Any] = _look) -> Any:
        x = send(X)
        seen = look(x)
        x.mul_(2 - 1j)
        return [bits(seen), x]

    def _of_inference(send: Send, look: Callable[[Any], Any] = _look) -> Any:
        with torch.inference_mode():
            x = send(X)
            seen = look(x)
            seen.zero_()
            return [bits(seen), x]

    def _gradient(send: Send, look: Callable[[Any], Any] = _look) -> Any:
        x = send(X, True)
        y = x * (1 + 2j)
        seen = look(y)
        if not seen.requires_grad:
            return bits(seen)
        (seen * _weights(seen)).sum().abs().backward()
        return [bits(seen), x.grad]

    def _gradient_through_a_write(send: Send, look: Callable[[Any], Any] = _look) -> Any:
        x = send(X, True)
        y = x * (1 + 2j)
        seen = look(y)
        seen.mul_(_weights(seen).detach())
        (y * _weights(y)).sum().abs().backward()
        return [bits(seen), y, x.grad]

    _named(f"{_name}, written to", _written_to)
    _named(f"{_name}, base written to", _base_written_to)
    _named(f"{_name}, in inference mode", _of_inference)
    if not _name.startswith("as_strided"):  # refused of a view that autograd follows
        _named(f"{_name}, gradient", _gradient)
        _named(f"{_name}, gradient through a write", _gradient_through_a_write)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_ into": lambda x, y: x.conj().copy_(y),
    "copy_ from": lambda x, y: x.copy_(y.conj()),
    "copy_ both": lambda x, y: x.conj().copy_(y.conj()),
    "copy_ into imag": lambda x, y: x.conj().imag.copy_(y.real),
    "copy_ from imag": lambda x, y: x.real.copy_(y.conj().imag),
    "copy_ from its own": lambda x, y: x.copy_(x.conj()),
    "copy_ from the CPU": lambda x, y: x.conj().copy_(Y.conj()),
    "setitem": lambda x, y: x.conj().__setitem__((slice(None), 1), 3j),
    "setitem of imag": lambda x, y: x.conj().imag.__setitem__(..., 2.0),
    "setitem with a tensor": lambda x, y: x.mH.__setitem__(2, y[:, 0].conj()),
    "in place": lambda x, y: x.conj().mul_(2j),
    "fill_": lambda x, y: x.conj().fill_(3j),
    "transposed": lambda x, y: x.mH.add_(1j),
    "a column": lambda x, y: x.conj()[:, 1].add_(1j),
    "masked": lambda x, y: x.conj().masked_fill_(x.real > 2, 1j),
    "zero_": lambda x, y: x.conj().zero_(),
    "zero_ of resolved": lambda x, y: x.conj().resolve_conj().zero_(),
    "zero_ of a clone": lambda x, y: x.conj().clone().zero_(),
    "conj_physical_": lambda x, y: x.conj_physical_(),
    "conj_physical_ of a conj": lambda x, y: x.conj().conj_physical_(),
    "fill_ of imag": lambda x, y: x.conj().imag.fill_(5),
    "twice": lambda x, y: x.conj().conj().add_(1j),
    "out": lambda x, y: torch.add(y, 1j, out=x.conj()),
    "out conj": lambda x, y: torch.add(y.conj(), 1j, out=x.conj()),
    "out imag": lambda x, y: torch.exp(y.real, out=x.conj().imag),
    "out resized": lambda x, y: torch.add(y, 1j, out=x[:0].conj()),
    "out of mm": lambda x, y: torch.mm(y, y.mH, out=x[:, :4].conj()),
    "addmm_": lambda x, y: x[:, :4].conj().addmm_(y.conj(), y.mH),
    "foreach": lambda x, y: torch._foreach_add_([x.conj()], 1j),
    "foreach of conj": lambda x, y: torch._foreach_add_([x], [y.conj()]),
    "foreach result": lambda x, y: torch._foreach_mul([x.conj()], 2)[0],
    "index_put_": lambda x, y: x.conj().index_put_((torch.tensor([1, 0], device=x.device),), y[:2].conj()),
    "scatter_": lambda x, y: x.conj().index_add_(1, torch.tensor([1, 0], device=x.device), y[:, :2].conj()),
    "add itself": lambda x, y: x.conj().add_(x),
    "add the other": lambda x, y: x.add_(x.conj()),
    "sqrt_ of imag": lambda x, y: x.conj().imag.abs_().sqrt_(),
    "t_": lambda x, y: x.conj().t_().mul_(2j),
    "unsqueeze_": lambda x, y: x.conj().unsqueeze_(1).mul_(2j),
    "resize_": lambda x, y: x.conj().resize_(2, 3).mul_(2j),
    "resize_ imag": lambda x, y: x.conj().clone().imag.resize_(2, 3),
    "as_strided_": lambda x, y: x.conj().as_strided_((2, 3), (6, 1)),
    "set_ to a conj": lambda x, y: x.set_(y.conj()).mul_(2j),
    "set_ of a conj": lambda x, y: x.conj().set_(y).mul_(2j),
    "set_ to nothing": lambda x, y: x.conj().set_(),
    "data": lambda x, y: setattr(x, "data", y.conj()) or x.mul_(2j),
    "data of a conj": lambda x, y: (lambda z: setattr(z, "data", y) or z.mul_(2j))(x.conj()),
    "swapped": lambda x, y: (lambda z: [z.imag.mul_(2), x.conj().imag.add_(1), z.real.sub_(3)])(x.conj()),
}
for _name, _write in WRITES.items():

    def _write_to(send: Send, write: Callable[[Any, Any], Any] = _write) -> Any:
        x, y = send(X), send(Y)
        lazy = x.conj()
        result = write(x, y)
        return [bits(t) for t in (result if isinstance(result, list) else [result]) if t is not None] + [
            [bits(t) for t in (x, y, lazy)],
            x._version,
        ]

    _named(_name, _write_to)

ASKED: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.conj().numpy(),
    "numpy of imag": lambda x: x.conj().imag.numpy(),
    "numpy forced": lambda x: x.conj().numpy(force=True).tolist(),
    "numpy of resolved": lambda x: x.conj().resolve_conj().numpy().tolist(),
    "tolist": lambda x: [x.conj().tolist(), x.conj().imag.tolist()],
    "item": lambda x: [x.conj()[0, 0].item(), x.conj().imag[0, 0].item()],
    "cpu": lambda x: [x.conj().cpu().resolve_conj(), x.conj().imag.cpu().resolve_neg()],
    "pickle": lambda x: [_pickled(t) for t in (x.conj(), x.conj().imag, x.mH, x)],
    "copy": lambda x: [bits(copy.copy(t)) for t in (x.conj(), x.conj().imag)],
    "lift_fresh": lambda x: bits(torch.ops.aten.lift_fresh(x.conj())),
    "torch.save": lambda x: [_saved(t) for t in (x.conj(), x.conj().imag)],
    "the same storage": lambda x: [
        x.untyped_storage()._cdata == t.untyped_storage()._cdata
        for t in (x.conj(), x.conj().imag, x.conj().resolve_conj(), x.conj().clone())
    ],
    "deepcopy": lambda x: [bits(copy.deepcopy(t)) for t in (x.conj(), x.conj().imag, x.imag)],
    "deepcopy of both": lambda x: [bits(t) for t in _of_both(copy.deepcopy([x, x.conj(), x.real]))],
    "deepcopy of both, conj first": lambda x: [bits(t) for t in copy.deepcopy([x.conj(), x, x.imag])],
    "is_set_to": lambda x: [x.conj().is_set_to(x), x.conj().conj().is_set_to(x), x.is_set_to(x.conj())],
    "equal": lambda x: [torch.equal(x.conj(), x), torch.equal(x.conj(), x.conj_physical())],
    "parameter": lambda x: bits(torch.nn.Parameter(x.conj()).detach()),
    "resolved is itself": lambda x: [x.resolve_conj() is x, x.real.conj().is_conj(), x.conj().is_complex()],
    "sent twice": lambda x: [X.conj().to(x.device) + x.conj(), X.conj().imag.to(x.device) + x.imag],
    "_unsafe_view": lambda x: torch.ops.aten._unsafe_view(x.conj(), [4, 2, 3]).resolve_conj().real,
    "vmap": lambda x: torch.vmap(lambda row: row.conj() * row + row.conj().real)(x),
    "vmap of views": lambda x: [
        bits(t) for t in torch.vmap(lambda row: (row.conj(), row.conj().real, row.conj() + 0))(x)
    ],
    "vmap of a resolved one": lambda x: bits(torch.vmap(lambda row: row.conj().resolve_conj())(x)),
    "vmap over a conj": lambda x: bits(torch.vmap(lambda row: row.real * 2)(x.conj())),
    "vmap over a product": lambda x: bits(torch.vmap(lambda row: row.conj() @ row.conj())(x)),
    "vmap of what torch cannot": lambda x: torch.vmap(lambda row: row.conj().imag)(x),
    "func.grad": lambda x: torch.func.grad(
        lambda z: (z.conj().imag * z.real).sum() + (z * z.conj()).real.sum()
    )(x),
    "func.grad of a conj": lambda x: torch.func.grad(lambda z: (z.conj().imag * z.real).sum())(x.conj()),
    "func.jvp": lambda x: torch.func.jvp(lambda z: z.conj() * z.conj().imag, (x,), (x.conj(),)),
    "func.vjp": lambda x: torch.func.vjp(lambda z: z.mH @ z, x)[1](x.mH[:, :1] * x[:1]),
    "func.functionalize": lambda x: torch.func.functionalize(lambda z: z.conj().mul(2j).imag.add_(1))(x),
    "grad of grad": lambda x: _grad_of_grad(x),
}
for _name, _ask in ASKED.items():

    def _asked(send: Send, ask: Callable[[Any], Any] = _ask) -> Any:
        return ask(send(X))

    _named(_name, _asked)


def _pickled(tensor: Any) -> Any:
    """Pickled by value: in rows."""
    loaded = pickle.loads(pickle.dumps(tensor))
    return [loaded.is_conj(), loaded.is_neg(), loaded.clone(memory_format=torch.contiguous_format)]


def _saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return [loaded.is_conj(), loaded.is_neg(), loaded.clone(memory_format=torch.contiguous_format)]


def _of_both(copies: Any) -> Any:
    copies[0].add_(1j)
    return copies


def _grad_of_grad(x: Any) -> Any:
    x = x.detach().requires_grad_()
    value = (x.conj() * x * x.conj().imag).sum().abs()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad((first.conj() * x.conj()).imag.sum(), x)
    return [bits(first.detach()), second]


@program
def a_hook_sees_a_gradient(send: Send) -> Any:
    x = send(X, True)
    seen: list[Any] = []
    y = x.conj()
    y.register_hook(lambda grad: seen.append(grad.clone()))
    (y.imag * 3 + y.real).sum().backward()
    return [*seen, x.grad]


def _trained(send: Send, make_optimizer: Callable[[list[Any]], torch.optim.Optimizer]) -> Any:
    parameters = [send(X, True), send(Y, True)]
    optimizer = make_optimizer(parameters)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (parameters[0] * parameters[1]).abs().square().sum() / 1e3
        loss.backward()
        optimizer.step()
    return [bits(p.detach()) for p in parameters]


for _name, _make in {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.1, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=0.1),
}.items():

    def _of_optimizer(send: Send, make: Any = _make) -> Any:
        return _trained(send, make)

    _named(f"trained by {_name}", _of_optimizer)
