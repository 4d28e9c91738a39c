"""Small programs about views, writes, metadata and gradients, run on both kinds of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class Send(Protocol):
    """Makes a tensor of the kind under test from a plain one."""

    device: str

    def __call__(self, tensor: torch.Tensor, requires_grad: bool = False) -> Any: ...


PROGRAMS: list[Callable[[Send], Any]] = []
A = torch.arange(24.0).reshape(4, 6) / 7 + 1


def program(function: Callable[[Send], Any]) -> Callable[[Send], Any]:
    PROGRAMS.append(function)
    return function


def _named(name: str, function: Callable[[Send], Any]) -> None:
    function.__name__ = name
    PROGRAMS.append(function)


def linear(device: str, features: int = 3) -> nn.Linear:
    """A layer whose parameters are known."""
    layer = nn.Linear(6, features)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0 * features).reshape(features, 6))
        layer.bias.zero_()
    return layer.to(device)


# ---- metadata in place ----

CHANGES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, -1),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_dim": lambda x: x.squeeze_(0),
    "squeeze_dims": lambda x: x.squeeze_((0, 1)),
    "as_strided_": lambda x: x.as_strided_((2, 3), (1, 2)),
    "as_strided_offset": lambda x: x.as_strided_((2, 3), (1, 2), 3),
    "resize_smaller": lambda x: x.resize_(2, 3),
    "resize_same": lambda x: x.resize_(x.shape),
    "resize_flat": lambda x: x.resize_(x.numel()),
    "resize_regrouped": lambda x: x.resize_(2, x.shape[0] // 2, x.shape[1]),
    "t_twice": lambda x: x.t_().mul_(2).t_(),
}
for _name, _change in CHANGES.items():

    def _of_a_tensor(send: Send, change: Callable[[Any], Any] = _change) -> Any:
        x = send(A)
        view = x.view(4, 6)
        change(x)
        view.add_(1)
        return [x, view, x._version, view._version]

    def _of_a_view(send: Send, change: Callable[[Any], Any] = _change) -> Any:
        x = send(A)
        view = x[1:3]
        change(view)
        view.mul_(3)
        return [x, view, view._version]

    def _of_a_result(send: Send, change: Callable[[Any], Any] = _change) -> Any:
        x = send(A, True)
        y = x * 2
        change(y)
        y.sum().backward()
        return [y, x.grad]

    _named(f"{_name} of a tensor", _of_a_tensor)
    _named(f"{_name} of a view", _of_a_view)
    _named(f"{_name} of a result", _of_a_result)


@program
def growing(send: Send) -> Any:
    x = send(A)
    rows = x[1:]
    x.resize_(6, 6)
    x[0] = 9
    x[1] = 8
    return [x[:4], rows]


@program
def growing_from_nothing(send: Send) -> Any:
    x = send(torch.empty(0, 2))
    return x.resize_(3, 2).fill_(2)


@program
def resize_as_another(send: Send) -> Any:
    return send(A).resize_as_(send(torch.zeros(2, 3)))


@program
def resizing_a_leaf(send: Send) -> Any:
    return send(A, True).resize_(2, 3)


@program
def setting(send: Send) -> Any:
    x, y = send(A), send(torch.arange(6.0).reshape(2, 3))
    x.set_(y)
    y.add_(1)
    x.mul_(2)
    z = send(A)
    z.set_(y[1])
    z.sub_(1)
    return [x, y, z, x.is_set_to(y), x.is_set_to(z), send(A).set_().shape]


@program
def setting_another_dtype(send: Send) -> Any:
    return send(A).set_(send(torch.zeros(2, dtype=torch.int64)))


@program
def data_of_a_leaf(send: Send) -> Any:
    x = send(A, True)
    y = send(torch.zeros(2, 3))
    loss = (x * x).sum()
    x.data.add_(1)
    loss.backward()
    gradient = x.grad
    x.grad = None
    x.data = y
    y.add_(1)
    return [x, gradient, x._version, x.data._version]


# ---- writes that torch refuses ----

REFUSED: dict[str, Callable[[Send], Any]] = {
    "a saved result": lambda send: _backward_after(send, lambda y: y.add_(1)),
    "a saved result through detach": lambda send: _backward_after(send, lambda y: y.detach().add_(1)),
    "a leaf": lambda send: send(A, True).add_(1),
    "a view of a leaf": lambda send: send(A, True)[0].add_(1),
    "one of several views": lambda send: (send(A, True) * 1).split(2, 1)[0].add_(1),
    "itself, shifted": lambda send: _shifted(send(A.reshape(-1)), lambda a, b: a.add_(b)),
    "a copy of itself, shifted": lambda send: _shifted(send(A.reshape(-1)), lambda a, b: a.copy_(b)),
    "out= of itself, shifted": lambda send: _shifted(send(A.reshape(-1)), lambda a, b: torch.exp(a, out=b)),
    "detached, shifted": lambda send: _shifted(send(A.reshape(-1)), lambda a, b: a.detach().mul_(b.data)),
    "itself, transposed": lambda send: _square(send(A[:, :4]), lambda a: a.add_(a.t())),
    "an expanded tensor": lambda send: send(torch.ones(3, 1)).expand(3, 4).add_(1),
    "an expanded tensor, from numbers": lambda send: (
        send(torch.ones(3, 1)).expand(3, 4).copy_(torch.ones(3, 4))
    ),
    "an expanded tensor, at random": lambda send: send(torch.ones(3, 1)).expand(3, 4).normal_(),
    "out= an expanded tensor": lambda send: torch.exp(send(A), out=send(torch.ones(4, 1)).expand(4, 6)),
    "a tensor of inference": lambda send: _of_inference(send).add_(1),
    "a shape that does not fit": lambda send: send(torch.zeros(3)).add_(send(A)),
    "a dtype that does not fit": lambda send: send(torch.zeros(4, 6, dtype=torch.int64)).add_(send(A)),
    "a bool": lambda send: send(torch.zeros(4, dtype=torch.bool)).add_(1),
    "a copy that does not fit": lambda send: send(A).copy_(torch.zeros(5)),
    "out= of a dtype that does not fit": lambda send: torch.add(
        send(A), 1, out=send(torch.zeros(4, 6).long())
    ),
    "out= with gradients": lambda send: torch.add(send(A, True), 1, out=send(torch.zeros(4, 6))),
    "view of what is not contiguous": lambda send: send(A).t().view(24),
}


def _backward_after(send: Send, write: Callable[[Any], Any]) -> Any:
    y = send(A, True).exp()
    write(y)
    return y.sum().backward()


def _shifted(flat: Any, write: Callable[[Any, Any], Any]) -> Any:
    return write(flat[1:], flat[:-1])


def _square(square: Any, write: Callable[[Any], Any]) -> Any:
    return write(square)


def _of_inference(send: Send) -> Any:
    with torch.inference_mode():
        return send(A) * 2


for _name, _function in REFUSED.items():
    _named(f"refused: {_name}", _function)


# ---- writes that torch allows ----


@program
def overlaps_that_are_none(send: Send) -> Any:
    x = send(A)
    x[:2].add_(x[2:])
    x.mul_(x.view(4, 6))
    x[:, 1:].add_(x[:, :-1].clone())
    ones = send(torch.ones(3, 1))
    ones.expand(3, 4).fill_(2)
    return [x, ones]


@program
def modes(send: Send) -> Any:
    leaf = send(A, True)
    with torch.no_grad():
        leaf.add_(1)
        row = leaf[0]
    x = send(A)
    with torch.inference_mode():
        made = x * 2
        part = made[1:]
        part.add_(1)
        view = x[1:]
        view.mul_(2)
    return [leaf, row, made, part, x, view, x._version, view._version]


@program
def versions(send: Send) -> Any:
    x = send(A)
    seen = [x._version]
    row = x[0]
    for write in (
        lambda: row.add_(1),
        lambda: x.zero_(),
        lambda: x.copy_(A),
        lambda: torch.add(x, 1, out=x),
        lambda: x.__setitem__(0, 1),
        lambda: x.detach().add_(1),
        lambda: x.data.add_(1),
    ):
        write()
        seen += [x._version, row._version]
    return [x, seen]


@program
def out_variants(send: Send) -> Any:
    x = send(A)
    same, wider, rows = (
        send(torch.zeros(4, 6)),
        send(torch.zeros(4, 6, dtype=torch.float64)),
        send(torch.zeros(8, 6)),
    )
    result = torch.add(x, x, out=same)
    torch.mul(x, 2, out=wider)
    torch.exp(x, out=rows[2:6])
    return [result is same, same, wider, rows]


@program
def out_of_another_size(send: Send) -> Any:
    x = send(A)
    empty, short = send(torch.empty(0)), send(torch.zeros(2))
    torch.sub(x, 1, out=empty)
    torch.add(x, x, out=short)
    values, indices = send(torch.empty(0)), send(torch.empty(0, dtype=torch.int64))
    torch.max(x, 1, out=(values, indices))
    joined, product, numbers = send(torch.empty(0)), send(torch.empty(0)), send(torch.empty(0))
    torch.cat([x, x], out=joined)
    torch.matmul(x, x.t(), out=product)
    torch.arange(5, out=numbers)
    return [empty, short, values, indices, joined, product, numbers]


@program
def copies(send: Send) -> Any:
    x, y, z = send(torch.zeros(4, 6)), send(torch.zeros(4, 6, dtype=torch.int32)), send(torch.zeros(4, 6))
    x.copy_(A)
    y.copy_(send(A * 3))
    z.copy_(A[0])
    x[1].copy_(A[0] + 50)
    x[:, 2] = torch.tensor(7.0)
    x[0, :3] = A[3, :3]
    z += torch.tensor(2, dtype=torch.int32)
    return [x, y, z, send(A.long()) * torch.tensor(2.0, dtype=torch.float64), x.lerp(z, torch.tensor(0.5))]


@program
def gradients_of_copies(send: Send) -> Any:
    x = send(A, True)
    y = send(torch.zeros(8, 6))
    y[2:6] = x * 2
    y[0] = x[1]
    y[1].copy_(x[0])
    (y * y).sum().backward()
    return [y, x.grad]


@program
def setting_items(send: Send) -> Any:
    x = send(A)
    x[0] = 1
    x[1:3, ::2] = send(torch.zeros(2, 3))
    x[x > 3] = 0
    x[[0, 1], [1, 2]] = 9.0
    x[..., -1] += 1
    x[2, 3] = send(torch.tensor(5.0))
    y = x
    y += 1
    y **= 2
    y //= 3
    return [x, y is x]


# ---- gradients and hooks ----


@program
def hooks(send: Send) -> Any:
    x = send(A, True)
    log: list[Any] = []
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    y.retain_grad()
    x.register_hook(lambda gradient: log.append("before"))
    x.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad.sum().item()))
    y.sum().backward()
    return [x.grad, y.grad, log]


@program
def module_hooks(send: Send) -> Any:
    layer = linear(send.device)
    log: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: log.append("before"))
    layer.register_forward_hook(lambda module, args, result: result * 2)
    layer.register_full_backward_hook(lambda module, given, got: log.append([tuple(g.shape) for g in got]))
    x = send(A, True)
    y = layer(x)
    y.sum().backward()
    return [y, x.grad, log]


@program
def gradients(send: Send) -> Any:
    x, w = send(A, True), send(A, True)
    (x * w).sum().backward(inputs=[x])
    first = x.grad
    (x * 3).sum().backward()
    (once,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    once.sum().backward()
    y = send(A, True)
    y.grad = send(torch.ones(4, 6))
    (y * y).backward(send(A))
    return [x.grad is first, x.grad, once, w.grad, y.grad]


@program
def detaching(send: Send) -> Any:
    y = send(A, True) * 2
    z = y.detach()
    return [y.detach_(), z]


ERRORS: dict[str, Callable[[Send], Any]] = {
    "backward of many elements": lambda send: send(A, True).mul(2).backward(),
    "backward without gradients": lambda send: send(A).sum().backward(),
    "backward twice": lambda send: [y.backward() for y in [send(A, True).exp().sum()] * 2],
    "a gradient of another shape": lambda send: setattr(send(A, True), "grad", send(torch.ones(3))),
    "a gradient of another dtype": lambda send: setattr(send(A, True), "grad", send(A.double())),
    "gradients of integers": lambda send: send(A.long()).requires_grad_(),
    "a result that needs no gradient": lambda send: (send(A, True) * 2).requires_grad_(False),
    "detaching a view": lambda send: (send(A, True) * 2)[0].detach_(),
    "deepcopy of a result": lambda send: copy.deepcopy(send(A, True) * 2),
    "iteration over a number": lambda send: list(send(torch.tensor(3.0))),
    "length of a number": lambda send: len(send(torch.tensor(3.0))),
    "truth of many elements": lambda send: bool(send(A)),
    "item of many elements": lambda send: send(A).item(),
    "int of many elements": lambda send: int(send(A)),
    "a float as index": lambda send: [1, 2, 3][send(torch.tensor(1.0))],
    "numpy with gradients": lambda send: send(A, True).numpy(),
    "numpy of bfloat16": lambda send: send(A.bfloat16()).numpy(),
    "a string in a tensor": lambda send: "a" in send(A),
    "state of another shape": lambda send: linear(send.device).load_state_dict(
        {"weight": torch.zeros(2, 6), "bias": torch.zeros(3)}
    ),
}
for _name, _function in ERRORS.items():
    _named(f"error: {_name}", _function)


@program
def the_memory_around_a_view_is_all_that_was_made(send: Send) -> Any:
    x = send(A) + 1
    parts = [
        x[2:].as_strided((4, 6), (6, 1), 0),
        send(A)[3].as_strided((6,), (1,)),
        x[1].as_strided((0,), (1,), 99),
    ]
    return [*parts, x[1:].view(torch.int32).as_strided((18,), (1,))]


@program
def memory_that_a_resize_left_or_made_counts(send: Send) -> Any:
    x, y = send(A), send(A)
    alias = y.view(-1)
    x.resize_(2)
    y.resize_(5, 6)
    y.fill_(2)
    return [x.as_strided((24,), (1,)), alias.as_strided((30,), (1,))]
