"""Meshes on the cluster that the tests of the client share."""

from __future__ import annotations

import pytest

import dtorch


@pytest.fixture
def mesh(cluster: dtorch.Cluster) -> dtorch.DeviceMesh:
    """Two devices."""
    return dtorch.DeviceMesh("cpu", [0, 1])


@pytest.fixture
def grid(cluster: dtorch.Cluster) -> dtorch.DeviceMesh:
    """Two by two devices."""
    return dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
