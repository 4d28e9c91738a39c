"""From ATen calls to op records: what is one template and what is another, and what the user gets."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import entries
from dtorch_runtime.ir.placement import Partial, Replicate, Shard
from dtorch_runtime.testing.wait import wait_until
from dtorch_runtime.wire.messages import Fetch, Upload
from tests.support.client import Controller

NAN = float("nan")


@pytest.fixture
def x(controller: Controller) -> dtorch.Tensor:
    return dtorch.ones(2, 3)


def flushed(controller: Controller) -> list[str]:
    dtorch.Graph.default_graph().flush()
    return controller.ops()


# ---- what the cache tells apart ----


@pytest.mark.parametrize(
    "constants",
    [(1, 1.0, True), (0.0, -0.0), (0, False, 0.0), (2, 2.0, 3.0), (NAN, 1.0), (1j, 1.0)],
    ids=str,
)
def test_constants_that_are_equal_and_differ_are_different_templates(
    controller: Controller, x: dtorch.Tensor, constants: tuple[Any, ...]
) -> None:
    for _ in range(2):
        for constant in constants:
            x * constant
    flushed(controller)
    multiplications = [record for record in controller.templates.values() if "mul" in record.op]
    assert len(multiplications) == len(constants)
    assert [repr(record.args[1]) for record in multiplications if not isinstance(constants[0], complex)] == [
        repr(constant) for constant in constants if not isinstance(constants[0], complex)
    ]


def test_the_same_call_is_one_template(controller: Controller, x: dtorch.Tensor) -> None:
    for _ in range(3):
        x + x
        x.float() * NAN
    flushed(controller)
    assert sorted(r.op for r in controller.templates.values()) == [
        "aten::add.Tensor",
        "aten::mul.Tensor",
        "aten::ones.default",
    ]


def test_equal_templates_of_different_shapes_are_one(controller: Controller) -> None:
    for size in (1, 2, 3):
        y = dtorch.ones(size)
        y + y
    flushed(controller)
    assert [r.op for r in controller.templates.values()].count("aten::add.Tensor") == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: torch.cat([x, x]), lambda x: torch.cat([x], 0)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
        (lambda x: x.view(3, 2), lambda x: x.view(6)),
        (lambda x: x.add(x), lambda x: x.add(x, alpha=2)),
        (lambda x: x.clamp(min=1.0), lambda x: x.clamp(max=1.0)),
    ],
    ids=range(7),
)
def test_arguments_of_every_kind_are_told_apart(
    controller: Controller,
    x: dtorch.Tensor,
    one: Callable[[Any], torch.Tensor],
    other: Callable[[Any], torch.Tensor],
) -> None:
    first, second = one(x), other(x)
    again = one(x)
    flushed(controller)
    assert (first.shape, first.dtype) == (again.shape, again.dtype)
    before = dtorch.ones(2, 3)
    assert one(before).shape == first.shape
    records = [record for record in controller.records() if record[0]]
    by_output = {record[-1]: record[0] for record in records}
    templates = [by_output[t._handle.value_id] for t in (first, second, again)]
    assert templates[0] == templates[2] != templates[1]


def test_the_default_dtype_counts_where_it_decides(controller: Controller) -> None:
    i = dtorch.tensor([1, 2])
    torch.set_default_dtype(torch.float64)
    try:
        assert (i / 2).dtype is torch.float64
        assert torch.ones(2, device="dtorch").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (i / 2).dtype is torch.float32
    assert torch.ones(2, device="dtorch").dtype is torch.float32
    assert (i + 1).dtype is torch.int64


# ---- the records ----


def test_a_record_names_its_place_inputs_and_outputs(controller: Controller, x: dtorch.Tensor) -> None:
    from dtorch.location import describe

    y = x + x  # THE LINE
    flushed(controller)
    record = controller.records()[-1]
    assert record[2:] == [x._handle.value_id, x._handle.value_id, y._handle.value_id]
    assert "test_dispatch.py" in describe(record[1])
    assert describe(record[1]).endswith("y = x + x  # THE LINE")


def test_library_code_is_not_the_place(controller: Controller, x: dtorch.Tensor) -> None:
    from dtorch.location import describe

    layer = torch.nn.LayerNorm(3, device="dtorch")
    layer(x)  # HERE
    flushed(controller)
    places = [describe(record[1]) for record in controller.records() if record[0]]
    assert "layer(x)  # HERE" in places[-1]


def test_backward_ops_are_of_the_line_that_asked_for_them(controller: Controller) -> None:
    from dtorch.location import describe

    x = dtorch.ones(3, requires_grad=True)
    y = (x * x).sum()
    num_forward = len(flushed(controller))
    y.backward()  # BACK
    flushed(controller)
    records = [record for record in controller.records() if record[0]][num_forward:]
    assert len(records) >= 2
    assert all("y.backward()  # BACK" in describe(record[1]) for record in records)


def test_random_ops_carry_seeds(controller: Controller) -> None:
    dtorch.manual_seed(5)
    dtorch.rand(2)
    dtorch.rand(2)
    dtorch.manual_seed(5)
    dtorch.rand(2)
    flushed(controller)
    seeds = [record[-1] for record in controller.records()]
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_generator_gives_the_seeds(controller: Controller) -> None:
    for make in (
        lambda g: dtorch.zeros(2).normal_(generator=g),
        lambda g: torch.rand(2, generator=g, device="dtorch"),
        lambda g: torch.multinomial(dtorch.ones(3), 2, generator=g),
    ):
        generator = torch.Generator()
        seeds = []
        for seed in (3, 3, 4):
            num_before = len(flushed(controller))
            make(generator.manual_seed(seed))
            flushed(controller)
            records = [record for record in controller.records() if record[0]][num_before:]
            seeds.append(records[-1][-1])
        assert seeds[0] == seeds[1] != seeds[2]


# ---- what the user gets ----


def test_in_place_ops_return_their_tensor_and_count_versions(
    controller: Controller, x: dtorch.Tensor
) -> None:
    before = x._version
    assert x.add_(1) is x
    y = x
    y += 1
    assert y is x
    assert torch.add(x, x, out=x) is x
    assert x._version == before + 3
    flushed(controller)
    assert [r.mutates for r in controller.templates.values() if "add_" in r.op] == [[0]] * 1
    assert [r.num_outputs for r in controller.templates.values() if "add_" in r.op] == [0]


def test_a_write_after_saving_for_backward_is_noticed(controller: Controller) -> None:
    x = dtorch.ones(3, requires_grad=True)
    y = x * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_detach_is_no_op_of_the_cluster(controller: Controller, x: dtorch.Tensor) -> None:
    num_ops = len(flushed(controller))
    y = x.detach()
    assert y is not x
    assert y._handle is x._handle
    assert len(flushed(controller)) == num_ops


def test_ops_with_several_results(controller: Controller, x: dtorch.Tensor) -> None:
    parts = x.split(1)
    assert isinstance(parts, tuple)
    assert [tuple(part.shape) for part in parts] == [(1, 3), (1, 3)]
    values, indices = x.max(1)
    assert indices.dtype is torch.int64
    assert len({values._handle.value_id, indices._handle.value_id}) == 2


def test_some_ops_stay_whole_without_gradients(controller: Controller) -> None:
    x, w = dtorch.ones(2, 5, 3), dtorch.ones(4, 3)
    num_ops = len(flushed(controller))
    torch.nn.functional.linear(x, w)
    torch.matmul(x, w.t())
    q = dtorch.ones(1, 2, 4, 3)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with torch.inference_mode():
        torch.nn.functional.linear(x, w)
    assert flushed(controller)[num_ops:] == [
        "aten::linear.default",
        "aten::t.default",
        "aten::matmul.default",
        "aten::ones.default",
        "dtorch::attention",
        "aten::linear.default",
    ]


def test_factories_are_one_op(controller: Controller) -> None:
    torch.zeros(2, device="dtorch")
    torch.full((2,), 3.0, device="dtorch")
    torch.arange(4, device="dtorch")
    torch.rand(2, device="dtorch")
    dtorch.eye(3)
    assert flushed(controller) == [
        "aten::zeros.default",
        "aten::full.default",
        "aten::arange.default",
        "dtorch::random_new",
        "aten::eye.m",
    ]


def test_a_symbol_is_a_tensor_of_the_device(x: dtorch.Tensor) -> None:
    assert isinstance(x, torch.Tensor)
    assert x.device == torch.device("dtorch:0")
    assert x.is_dtorch  # type: ignore[attr-defined]  # made by torch for the backend
    assert (x.shape, x.stride(), x.is_contiguous()) == ((2, 3), (3, 1), True)
    assert x.t().stride() == (1, 3)
    assert len(x) == 2
    assert isinstance(torch.nn.Parameter(x), dtorch.Tensor)
    with pytest.raises(dtorch.UnsupportedError, match="is not called"):
        dtorch.Tensor([1])


def test_assigning_data_changes_what_it_stands_for(controller: Controller, x: dtorch.Tensor) -> None:
    parameter = torch.nn.Parameter(x)
    other = dtorch.zeros(4, 4, dtype=torch.float16)
    parameter.data = other
    assert (parameter.shape, parameter.dtype) == ((4, 4), torch.float16)
    assert parameter._handle is other._handle
    assert parameter.data._handle is other._handle
    with pytest.raises(dtorch.MixedTensorError, match="takes another dtorch tensor"):
        parameter.data = torch.ones(2)


def test_deep_copies_are_leaves_of_their_own(controller: Controller, x: dtorch.Tensor) -> None:
    parameter = torch.nn.Parameter(x)
    parameter.grad = dtorch.ones(2, 3)
    pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1]
    assert isinstance(pair[0], torch.nn.Parameter)
    assert pair[0].requires_grad
    assert pair[0].grad is not None
    assert pair[0]._handle is not parameter._handle
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(parameter * 2)


# ---- plain tensors ----


@pytest.mark.parametrize("mix", [lambda x, t: x + t, lambda x, t: t + x, lambda x, t: torch.cat([x, t])])
def test_a_plain_tensor_with_data_is_refused(
    x: dtorch.Tensor, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(dtorch.MixedTensorError, match=r"shape \[2, 3\] on cpu.*Write t.to\('dtorch'\)"):
        mix(x, torch.ones(2, 3))


def test_a_scalar_of_the_cpu_is_a_number(controller: Controller, x: dtorch.Tensor) -> None:
    y = x * torch.tensor(3.0)
    assert y.dtype is torch.float32
    flushed(controller)
    [template] = [r for r in controller.templates.values() if "mul" in r.op]
    assert template.args[1] == 3.0


def test_indices_of_the_cpu_are_uploaded_to_the_mesh_of_the_tensor(controller: Controller) -> None:
    x = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [1, 2]))
    assert x[torch.tensor([0, 2])].shape == (2,)
    [upload] = controller.messages(Upload)
    assert upload.devices == [1, 2]
    assert upload.dtype == "int64"


def test_each_piece_is_uploaded_once(controller: Controller) -> None:
    mesh = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
    dtorch.from_torch(torch.arange(5), device_mesh=mesh, placements=[Shard(0), Replicate()])
    uploads = [(m.devices, m.shape, bytes(p[0])) for m, p in controller.link.sent if isinstance(m, Upload)]
    values = torch.arange(5).numpy().tobytes()
    assert uploads == [([0, 1], [3], values[:24]), ([2, 3], [2], values[24:])]


def test_what_is_uploaded_is_the_value_at_the_call(controller: Controller) -> None:
    data = torch.ones(100_000)
    data.to("dtorch")
    data.zero_()
    [(_, payload)] = [(m, p) for m, p in controller.link.sent if isinstance(m, Upload)]
    assert bytes(payload[0]) == torch.ones(100_000).numpy().tobytes()


# ---- meshes ----


def test_a_tensor_without_a_mesh_follows_the_others(controller: Controller) -> None:
    mesh = dtorch.DeviceMesh("cpu", [1, 2])
    x = dtorch.ones(4, device_mesh=mesh, placements=[Shard(0)])
    positions = torch.arange(4, device="dtorch")
    y = x.redistribute(placements=[Replicate()]) * positions
    assert y.device_mesh == mesh
    x_whole = dtorch.zeros(4, device_mesh=mesh)
    x_whole[1:3] = 7
    assert x_whole.device_mesh == mesh


def test_tensors_of_two_named_meshes_do_not_mix(controller: Controller) -> None:
    a = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
    b = dtorch.ones(4, device_mesh=dtorch.DeviceMesh("cpu", [2, 3]))
    with pytest.raises(dtorch.MeshError, match="different meshes"):
        a + b
    nobody = dtorch.ones(4)
    with pytest.raises(dtorch.MeshError, match="different meshes"):
        nobody.add_(a)


# ---- gradients of errors ----


def test_an_op_that_is_refused_in_backward_raises_from_backward(controller: Controller) -> None:
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> torch.Tensor:
            return gradient + dtorch.ones(3, device_mesh=dtorch.DeviceMesh("cpu", [3]))  # type: ignore[no-any-return]

    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.ones(3, device_mesh=mesh, requires_grad=True)
    y: Any = Refuse.apply(x * 2)
    with pytest.raises(dtorch.MeshError, match="different meshes"):
        y.sum().backward()


def test_an_aten_op_that_is_refused_in_backward_does_not_end_the_process(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = dtorch.ones(3, requires_grad=True)
    y = x.sinh().sum()
    propagate = entries.propagate

    def refuse(func: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        if func is torch.ops.aten.cosh.default:
            raise dtorch.PlacementError("cosh is refused")
        return propagate(func, args, kwargs, **options)

    monkeypatch.setattr(entries, "propagate", refuse)
    with pytest.raises(dtorch.PlacementError, match="cosh is refused"):
        y.backward()
    z = (x * x).sum()
    z.backward()
    assert x.grad is not None


# ---- fetches ----


def test_a_replicated_value_is_asked_of_one_device(controller: Controller) -> None:
    mesh = dtorch.DeviceMesh("cpu", [2, 1])
    future = dtorch.ones(2, device_mesh=mesh).value()
    [fetch] = controller.messages(Fetch)
    assert fetch.device == 2
    controller.answer(fetch, torch.tensor([5.0, 6.0]).numpy().tobytes(), "float32", [2])
    assert future.get().tolist() == [5.0, 6.0]


def test_a_sharded_value_is_asked_of_one_holder_of_each_piece(controller: Controller) -> None:
    mesh = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
    x = dtorch.zeros(3, device_mesh=mesh, placements=[Shard(0), Replicate()])
    future = x.value()
    fetches = {fetch.device: fetch for fetch in controller.messages(Fetch)}
    assert len(fetches) == 2
    for device, fetch in fetches.items():
        piece = torch.tensor([1.0, 2.0]) if device in (0, 1) else torch.tensor([3.0])
        controller.answer(fetch, piece.numpy().tobytes(), "float32", list(piece.shape))
    assert future.get().tolist() == [1.0, 2.0, 3.0]


def test_a_partial_value_is_reduced(controller: Controller) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.zeros(2, device_mesh=mesh).redistribute(placements=[Partial("max")])
    future = x.value()
    for fetch in controller.messages(Fetch):
        piece = torch.tensor([float(fetch.device), -float(fetch.device)])
        controller.answer(fetch, piece.numpy().tobytes(), "float32", [2])
    assert future.get().tolist() == [1.0, 0.0]


def test_a_wait_in_one_thread_does_not_stop_another(controller: Controller) -> None:
    x = dtorch.ones(2)
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(x[0].item()))
    thread.start()
    wait_until(lambda: controller.messages(Fetch), "the fetch of the thread")
    for _ in range(200):
        x = x + 1
    [fetch] = controller.messages(Fetch)
    controller.answer(fetch, torch.tensor(4.0).numpy().tobytes(), "float32", [])
    thread.join(10)
    assert values == [4.0]
