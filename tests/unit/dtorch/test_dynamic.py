"""A result of unknown shape: what is sent for it, and what a client does when no answer comes."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch_runtime.wire.messages import Fetch
from dtorch_runtime.worker.dynamic_kernels import DESCRIPTION_BYTES, describe, described, read_description
from tests.support.client import scripted_session


def test_only_the_shape_is_awaited() -> None:
    with scripted_session(wait_timeout_s=0.05) as controller:
        mask = dtorch.ones(3, dtype=torch.bool)
        with pytest.raises(
            dtorch.ClusterTimeout, match=r"waited 0\.05 s for the shape of nonzero issued at .*nonzero"
        ):
            torch.nonzero(mask)
        _, (template, _, given, rows, description) = controller.records()
        assert controller.templates[template].op == "dtorch::described"
        assert [fetch.value_id for fetch in controller.messages(Fetch)] == [description]
        assert given == mask._handle.value_id
        mask.graph.flush()
        assert rows in controller.freed()


def test_a_closed_session_is_said_at_once() -> None:
    with scripted_session() as controller:
        mask = dtorch.ones(3, dtype=torch.bool)
        controller.session.close()
        with pytest.raises(dtorch.SessionClosed):
            torch.nonzero(mask)


def test_a_description_says_what_results_are() -> None:
    rows = torch.ones(2, 3, dtype=torch.bool).nonzero()
    scalar = torch.tensor(1.0, dtype=torch.bfloat16)
    text = describe([rows, None, scalar])
    assert text.shape == (DESCRIPTION_BYTES,)
    found = read_description(text)
    assert [None if r is None else (r.dtype, tuple(r.shape), tuple(r.stride)) for r in found] == [
        ("int64", (6, 2), rows.stride()),
        None,
        ("bfloat16", (), ()),
    ]


def test_a_kernel_is_described() -> None:
    (values, inverse, counts), description = described(
        "aten::_unique2.default", [torch.tensor([3, 1, 3]), True, False, True]
    )
    assert values.tolist() == [1, 3]
    assert counts.tolist() == [1, 2]
    assert inverse.shape == (0,)
    assert [r.shape for r in read_description(description) if r is not None] == [[2], [0], [2]]
