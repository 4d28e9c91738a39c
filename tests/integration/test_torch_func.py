"""``torch.func``, forward-mode derivatives and ``torch.autograd.functional`` give what they give on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import autograd, func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dtorch
from dtorch import DeviceMesh, PlacementError, Replicate, Shard

#: Of torch itself, when it loads what forward derivatives need and when it folds constants of a traced function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

A = torch.arange(24, dtype=torch.float64).reshape(4, 6).mul(0.3).sin()
B = torch.arange(36, dtype=torch.float64).reshape(6, 6).mul(0.7).cos()
MODEL = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
for number, parameter in enumerate(MODEL.parameters()):
    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

Case = Callable[[Any, Any], Any]


def _parameters_like(a: Any) -> dict[str, torch.Tensor]:
    """The parameters of MODEL, whole where ``a`` is."""

    def send(parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(a, dtorch.Tensor):
            return dtorch.from_torch(parameter.detach(), device_mesh=a.device_mesh)
        return parameter.detach()

    return {name: send(parameter) for name, parameter in MODEL.named_parameters()}


def _loss(parameters: Any, x: Any) -> Any:
    return func.functional_call(MODEL, parameters, (x,)).pow(2).sum()


def _ensemble(a: Any, b: Any) -> Any:
    stacked = {name: torch.stack([p, p * 2, -p]) for name, p in _parameters_like(a).items()}
    return func.vmap(lambda p, x: func.functional_call(MODEL, p, (x,)), in_dims=(0, None))(stacked, a)


def _dual(a: Any, b: Any) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a * 2)
        return tuple(forward_ad.unpack_dual((dual.sin() @ b) * dual.sum()))


def _attention(x: Any) -> Any:
    return F.scaled_dot_product_attention(x[None], x[None], x[None]).sum()


#: Each gets a [4, 6] and b [6, 6].
CASES: dict[str, Case] = {
    "vmap": lambda a, b: func.vmap(lambda x: x * 2 + x.exp())(a),
    "vmap with a sum": lambda a, b: func.vmap(lambda x: x * 2 + x.sum())(a),
    "vmap over columns": lambda a, b: func.vmap(lambda x: x.cumsum(0), in_dims=1, out_dims=1)(a),
    "vmap of matmul": lambda a, b: func.vmap(lambda x: b @ x)(a),
    "vmap of linear": lambda a, b: func.vmap(lambda x: F.linear(x, b, b[0]))(a),
    "vmap in chunks": lambda a, b: func.vmap(lambda x: x @ b, chunk_size=3)(a),
    "vmap of dot": lambda a, b: func.vmap(torch.dot)(a, a + 1),
    "vmap of vmap": lambda a, b: func.vmap(func.vmap(lambda x, y: x * y, (None, 0)), (0, None))(a[:, 0], b),
    "vmap of where": lambda a, b: func.vmap(lambda x: torch.where(x > 0, x, -x).softmax(0))(a),
    "vmap with equal draws": lambda a, b: func.vmap(lambda x: x + torch.rand_like(x) * 0, randomness="same")(
        a
    ),
    "vmap with different draws": lambda a, b: func.vmap(
        lambda x: x + torch.rand(6, device=x.device) * 0, randomness="different"
    )(a),
    "vmap of attention": lambda a, b: func.vmap(_attention)(a.reshape(2, 2, 6)),
    "grad": lambda a, b: func.grad(lambda x: (x.sin() * x).sum())(a),
    "grad of matmul": lambda a, b: func.grad(lambda x: (x @ b).sin().sum())(a),
    "grad of linear": lambda a, b: func.grad(lambda x: F.linear(x, b).sin().sum())(a),
    "grad of attention": lambda a, b: func.grad(_attention)(a),
    "grad of grad": lambda a, b: func.grad(lambda x: func.grad(lambda y: (y**3).sum())(x).sum())(a),
    "grad and value": lambda a, b: func.grad_and_value(lambda x: (x @ b).pow(2).sum())(a),
    "grad with aux": lambda a, b: func.grad(lambda x: ((x * x).sum(), x.exp()), has_aux=True)(a),
    "grad of an index": lambda a, b: func.grad(lambda x: x[1:, [0, 2]].exp().sum())(a),
    "vjp": lambda a, b: func.vjp(lambda x: x.sin() @ b, a)[1](a),
    "jvp": lambda a, b: func.jvp(lambda x: x.sin(), (a,), (a * 2,)),
    "jvp of matmul": lambda a, b: func.jvp(lambda x, y: x @ y, (a, b), (a * 2, b + 1)),
    "jvp of a layer": lambda a, b: func.jvp(lambda x: F.layer_norm(x, (6,)).softmax(-1), (a,), (a * 2,)),
    "linearize": lambda a, b: func.linearize(lambda x: x.sin() @ b, a)[1](a * 2),
    "jacrev": lambda a, b: func.jacrev(lambda x: x.sin() @ b)(a),
    "jacfwd": lambda a, b: func.jacfwd(lambda x: x.sin() @ b)(a),
    "hessian": lambda a, b: func.hessian(lambda x: (x.sin() @ b[:, :2]).pow(2).sum())(a[:2]),
    "gradients of samples": lambda a, b: func.vmap(func.grad(_loss), in_dims=(None, 0))(
        _parameters_like(a), a
    ),
    "gradients of parameters": lambda a, b: func.grad(_loss)(_parameters_like(a), a),
    "an ensemble": _ensemble,
    "forward mode": _dual,
    "functional.jacobian": lambda a, b: autograd.functional.jacobian(lambda x: x.sin() @ b, a),
    "functional.jacobian at once": lambda a, b: autograd.functional.jacobian(
        lambda x: x.sin() @ b, a, vectorize=True
    ),
    "functional.jacobian forward": lambda a, b: autograd.functional.jacobian(
        lambda x: x.sin() @ b, a, vectorize=True, strategy="forward-mode"
    ),
    "functional.hessian": lambda a, b: autograd.functional.hessian(lambda x: (x.sin() @ b).sum(), a[:2]),
    "functional.vjp": lambda a, b: autograd.functional.vjp(lambda x: x.sin() @ b, a, a),
    "functional.jvp": lambda a, b: autograd.functional.jvp(lambda x: x.sin() @ b, a, a),
    "functional.hvp": lambda a, b: autograd.functional.hvp(lambda x: (x.sin() @ b).sum(), a, a),
    "functional.vhp": lambda a, b: autograd.functional.vhp(lambda x: (x.sin() @ b).sum(), a, a),
}


def values_of(result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(result)
    return [leaf.to_torch() if isinstance(leaf, dtorch.Tensor) else leaf.detach() for leaf in leaves]


def refusal_of(check: Callable[[], None]) -> PlacementError | None:
    try:
        check()
    except PlacementError as error:
        return error
    return None


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(mesh: DeviceMesh, name: str) -> None:
    """Whole inputs work; others are equal or refused, and then work in the auto scope."""
    expected = values_of(CASES[name](A, B))
    for placement in (Replicate(), Shard(0), Shard(1)):
        a = dtorch.from_torch(A, device_mesh=mesh, placements=[placement])
        b = dtorch.from_torch(B, device_mesh=mesh)

        def check(a: Any = a, b: Any = b) -> None:
            torch.testing.assert_close(values_of(CASES[name](a, b)), expected)

        refused = refusal_of(check)
        if refused is not None:
            assert placement != Replicate(), refused
            with dtorch.auto_redistribute():
                check()


def test_draws_under_vmap(mesh: DeviceMesh) -> None:
    """``randomness`` means what it does in torch, and draws depend on the seed."""
    a = dtorch.zeros(4, 3, device_mesh=mesh)

    def draw(randomness: str) -> torch.Tensor:
        torch.manual_seed(5)
        drawn: Any = func.vmap(lambda x: x + torch.rand_like(x), randomness=randomness)(a)
        value: torch.Tensor = drawn.to_torch()
        return value

    same, different = draw("same"), draw("different")
    assert (same == same[0]).all()
    assert len(set(different.flatten().tolist())) == 12
    assert torch.equal(different, draw("different"))
    with pytest.raises(RuntimeError, match="random operation while in randomness error mode"):
        draw("error")


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_gradients_are_checked(mesh: DeviceMesh, placement: Any) -> None:
    """``gradcheck`` compares derivatives of all kinds with differences."""
    x = dtorch.from_torch(A[:2, :3], device_mesh=mesh, placements=[placement], requires_grad=True)
    w = dtorch.from_torch(B[:3, :2], device_mesh=mesh, requires_grad=True)
    with dtorch.auto_redistribute(), dtorch.Graph.default_graph().device_mesh_guard(mesh):
        assert autograd.gradcheck(lambda x, w: (x @ w).sin() * 2, (x, w), check_forward_ad=True)
        assert autograd.gradgradcheck(lambda x: (x * x.exp()).sum(0), (x,))


# ---- modes, traces and compilers ----


def _layer(x: Any) -> Any:
    return F.linear(x @ x.mT, x.mT).relu() * 2


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_every_op(mesh: DeviceMesh) -> None:
    a = dtorch.from_torch(A, device_mesh=mesh, requires_grad=True)
    with _Names() as names:
        _layer(a.detach())
    assert {"aten.matmul.default", "aten.linear.default", "aten.relu.default"} <= set(names.seen)
    with FlopCounterMode(display=False) as counted:
        _layer(a).sum().backward()
    with FlopCounterMode(display=False) as expected:
        _layer(A.clone().requires_grad_()).sum().backward()
    assert counted.get_total_flops() == expected.get_total_flops() > 0


@pytest.mark.parametrize(
    "transformed",
    [
        lambda a: torch.compile(_layer, backend="eager")(a),
        lambda a: make_fx(_layer)(a)(a * 1),
        lambda a: torch.jit.trace(_layer, a, check_trace=False)(a),
        lambda a: checkpoint(_layer, a, use_reentrant=False),
        lambda a: checkpoint(_layer, a, use_reentrant=True),
    ],
    ids=["compile", "make_fx", "jit.trace", "checkpoint", "reentrant checkpoint"],
)
def test_transformed_functions(mesh: DeviceMesh, transformed: Callable[[Any], Any]) -> None:
    a = dtorch.from_torch(A, device_mesh=mesh, requires_grad=True)
    result = transformed(a)
    torch.testing.assert_close(result.to_torch(), _layer(A))
    result.pow(2).sum().backward()
    leaf = A.clone().requires_grad_()
    _layer(leaf).pow(2).sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(a.grad.to_torch(), leaf.grad)


def test_a_checkpoint_with_a_mask(mesh: DeviceMesh) -> None:
    a = dtorch.from_torch(A, device_mesh=mesh, requires_grad=True)
    checkpoint(lambda x: x[x > 0] ** 2, a, use_reentrant=False).sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(a.grad.to_torch(), torch.where(A > 0, 2 * A, 0.0))
