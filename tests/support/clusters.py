"""A cluster of its own for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import dtorch
from tests.support.leaks import LeakWatch


def cluster_of(leak_watch: LeakWatch, num_nodes: int, devices_per_node: int) -> Iterator[None]:
    """The body of a fixture: the current cluster, and no leak as long as the file is run."""
    before = leak_watch.snapshot()
    dtorch.init(num_nodes=num_nodes, devices_per_node=devices_per_node)
    dtorch.counters()  # before the baseline, as tests ask for them later
    leak_watch.declare_baseline(before)
    yield
    dtorch.shutdown()
