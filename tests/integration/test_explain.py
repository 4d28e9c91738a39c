"""``dtorch.explain``, ``Graph.dump`` and ``dtorch.capture.dump``: what was issued, as a user reads it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch


@dtorch.capture
def half_used(x: Any) -> Any:
    unused = x.exp()
    return (x * 2).relu() + (x * 2) if unused is not None else x


def test_explain_prints_the_last_captured_call(
    mesh: dtorch.DeviceMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    dtorch.explain()
    assert "no captured function was called" in capsys.readouterr().out
    x = dtorch.ones(4, device_mesh=mesh)
    for _ in range(2):
        half_used(x)
        dtorch.explain()
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "half_used(%1) -> %2"
        assert lines[1] == "as recorded, 5 ops:"
        assert lines[2].startswith("  - %6 = aten::exp.default(%1) on [0, 1]")
        assert "test_explain.py" in lines[2]
        assert lines[2].endswith("in half_used: unused = x.exp()")
        ops = [line.split(" on ")[0].strip() for line in lines]
        assert ops[7:12] == [
            "without dead values, 4 ops:",
            "%3 = aten::mul.Tensor(%1, 2)",
            "%4 = aten::relu.default(%3)",
            "%5 = aten::mul.Tensor(%1, 2)",
            "%2 = aten::add.Tensor(%4, %5)",
        ]
        assert ops[12].startswith("after the passes dead, common,")
        assert ops[13:] == [
            "%3 = aten::mul.Tensor(%1, 2)",
            "%2 = aten::relu.default(%3)",
            "aten::add_.Tensor(%2, %3)",
        ]


def test_explain_keeps_no_tensor_alive(mesh: dtorch.DeviceMesh) -> None:
    def use() -> weakref.ref[Any]:
        w = dtorch.ones(4, device_mesh=mesh)
        scaled = dtorch.capture(lambda x: x * w)
        for _ in range(2):
            scaled(dtorch.ones(4, device_mesh=mesh))
        return weakref.ref(w)

    watched = use()
    gc.collect()
    assert watched() is None
    assert dtorch.Graph.default_graph().last_call is not None


def test_a_graph_shows_what_it_issued(mesh: dtorch.DeviceMesh, tmp_path: Path) -> None:
    with dtorch.Graph() as graph:
        x = dtorch.ones(4, device_mesh=mesh)
        y = x + 1
        graph.flush()
        z = y.sin()  # not sent yet
        lines = graph.dump().splitlines()
        text = graph.dump(tmp_path / "g.mmd")
    names = [line.split(" = ")[1].split("(")[0] for line in lines]
    assert names == ["aten::ones.default", "aten::add.Tensor", "aten::sin.default"]
    assert lines[2].endswith(": z = y.sin()  # not sent yet")
    assert (tmp_path / "g.mmd").read_text() == text
    assert torch.equal(z.to_torch(), torch.full((4,), 2.0).sin())


def test_a_graph_shows_only_the_last_ops(mesh: dtorch.DeviceMesh) -> None:
    with dtorch.Graph() as graph:
        x = dtorch.ones(4, device_mesh=mesh)
        for _ in range(40):
            x = x + 1
            graph.flush()
        assert 0 < len(graph.dump().splitlines()) < 20
        assert x.to_torch()[0] == 41


def test_captured_calls_in_a_graph_and_alone(mesh: dtorch.DeviceMesh, tmp_path: Path) -> None:
    @dtorch.capture
    def step(x: Any) -> Any:
        return x * 3 + 1

    with pytest.raises(dtorch.CaptureError, match="no recording to draw"):
        dtorch.capture.dump(step)
    x = dtorch.ones(4, device_mesh=mesh)
    step(x)
    step(x)
    assert [line.split(" on ")[0] for line in dtorch.capture.dump(step).splitlines()] == [
        "%3 = aten::mul.Tensor(%1, 3)",
        "%2 = aten::add.Tensor(%3, 1)",
    ]
    assert "step" in dtorch.Graph.default_graph().dump(tmp_path / "g.dot")
    assert "subgraph cluster_1" in (tmp_path / "g.dot").read_text()
    with pytest.raises(dtorch.CaptureError, match="is not captured"):
        dtorch.capture.dump(len)
