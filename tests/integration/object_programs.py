"""Small programs about strides, values, copies, files and modules, run on both kinds of tensors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.integration.aliasing_programs import A, Send, linear, program

# ---- strides and memory formats ----


@program
def strides(send: Send) -> Any:
    x = send(A)
    t = x.t()
    return [
        *(
            t + 1,
            t * t,
            t.clone(),
            t.contiguous(),
            t.exp(),
            t.double(),
            torch.cat([t, t]),
            torch.stack([t, t]),
        ),
        *(t @ x, torch.where(t > 2, t, -t), t.flip(0), t.softmax(1), t.clamp(1, 2), t.repeat(2, 1), t.tril()),
        *(
            t[::2],
            t[1:, None],
            t[:, [0, 2]],
            t.unsqueeze(0).expand(2, 6, 4),
            t.narrow(0, 1, 3),
            t.mT,
            t.roll(1, 0),
        ),
        torch.zeros_like(t),
        A.t().to(send.device),
    ]


@program
def memory_formats(send: Send) -> Any:
    x = send(torch.arange(120.0).reshape(2, 3, 4, 5))
    y = x.clone(memory_format=torch.channels_last)
    last = [x.contiguous(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)]
    asked = [
        y.is_contiguous(),
        y.is_contiguous(memory_format=torch.channels_last),
        y.permute(0, 2, 3, 1).is_contiguous(),
    ]
    return [
        y,
        *last,
        asked,
        y.clone(),
        y.contiguous(),
        y * 2,
        y + x,
        x + y,
        y.sum(1),
        y.relu(),
        torch.zeros_like(y),
    ]


@program
def storages(send: Send) -> Any:
    x = send(A)
    row = x[1]
    same = [
        t.untyped_storage()._cdata == x.untyped_storage()._cdata
        for t in (row, x.detach(), x.clone(), x.view(24))
    ]
    return [same, x.untyped_storage().nbytes(), row.untyped_storage().nbytes(), x.is_set_to(x.view(4, 6))]


# ---- values, copies, modules ----


@program
def numbers(send: Send) -> Any:
    x, v, s, f = send(A), send(torch.tensor([3, 1, 2])), send(torch.tensor(3)), send(torch.tensor(2.5))
    return [
        *(len(x), x.tolist(), [int(n) for n in v], 3 in v, 7 in v, bool(s), int(s), float(f), complex(f)),
        *([10, 20, 30, 40][s], range(s)[-1], f"{f:.2f}", f"{s:d}", [int(n) for n in reversed(v)], s.item()),
        *(x.numpy().tolist(), torch.equal(x, x.clone()), torch.equal(x, x + 1), hash(x) == hash(x)),
        *(
            x.element_size(),
            x.nbytes,
            x.itemsize,
            x.is_floating_point(),
            x.is_signed(),
            x.layout == torch.strided,
        ),
    ]


@program
def deep_copies(send: Send) -> Any:
    x = send(A, True)
    (x * 2).sum().backward()
    x.note = ["kept"]
    y = copy.deepcopy(x)
    y.grad.add_(1)
    one, other = copy.deepcopy([x, x])
    whole = send(A)
    base, row = copy.deepcopy([whole, whole[1]])
    base.add_(1)
    shallow = copy.copy(x)
    shallow.data.add_(1)
    return [y, y.grad, x, x.grad, y.note, y.note is x.note, one is other, base, row, shallow]


@program
def files(send: Send) -> Any:
    """A saved tensor comes back on the CPU, with its value and what it is."""
    x = send(A, True)
    file = io.BytesIO()
    torch.save({"x": x, "row": x.detach()[1], "p": nn.Parameter(x.detach())}, file)
    file.seek(0)
    loaded = list(torch.load(file, weights_only=True, map_location="cpu").values())
    loaded += pickle.loads(pickle.dumps([x, x.detach()[1:]]))
    return [[type(t), t.requires_grad, t.is_leaf, t.dtype, t.tolist()] for t in loaded]


@program
def modules(send: Send) -> Any:
    layer = linear(send.device)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.add_(1)
    x = send(A)
    before = [layer(x).detach(), twin(x).detach(), isinstance(twin.weight, nn.Parameter)]
    ids = [id(p) for p in layer.parameters()]
    layer.to(torch.float64).half().float().apply(lambda module: nn.init.ones_(module.weight))
    twin.load_state_dict({"weight": send(torch.zeros(3, 6)), "bias": send(torch.ones(3))}, assign=True)
    return [*before, ids == [id(p) for p in layer.parameters()], layer.weight, twin(x).detach()]


@program
def parameters(send: Send) -> Any:
    module = nn.Module()
    module.p, module.b = nn.Parameter(send(A)), nn.Buffer(send(A))
    named = [[name for name, _ in module.named_parameters()], [name for name, _ in module.named_buffers()]]
    layer = linear(send.device)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    leaves, _ = pytree.tree_flatten({"a": module.p, "b": [module.b, 3]})
    return [named, isinstance(module.p, nn.Parameter), vector.detach(), layer.weight, leaves[0] is module.p]


@program
def tied_weights(send: Send) -> Any:
    first, second = linear("cpu", 6), linear("cpu", 6)
    second.weight = first.weight
    model = nn.Sequential(first, second).to(send.device)
    model(send(A)).sum().backward()
    return [first.weight is second.weight, first.weight.grad, len(list(model.parameters()))]


@program
def parametrizations(send: Send) -> Any:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).mT

    normed = nn.utils.parametrizations.weight_norm(linear("cpu")).to(send.device)
    normed(send(A)).sum().backward()
    square = linear(send.device, 6)
    nn.utils.parametrize.register_parametrization(square, "weight", Symmetric())
    return [*(p.grad for p in normed.parameters()), square.weight.detach()]


@program
def clipping(send: Send) -> Any:
    layer = linear(send.device)
    layer(send(A)).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    nn.utils.clip_grad_value_(layer.parameters(), 0.1)
    return [norm, *(p.grad for p in layer.parameters())]


@program
def swapping(send: Send) -> Any:
    x, y = send(A), send(A + 1)
    torch.utils.swap_tensors(x, y)
    return [x, y]
