"""What programs may rely on, written out: a name that comes or goes shows in a diff of this file."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import torch

import dtorch
from dtorch_runtime.settings import Settings

PUBLIC = """
    init shutdown connect Cluster
    DeviceMesh init_device_mesh Placement Replicate Shard Partial
    empty zeros ones full rand randn randint randperm arange linspace eye tensor from_torch
    empty_like zeros_like ones_like full_like rand_like randn_like
    manual_seed get_rng_state set_rng_state fork_rng Generator Tensor TensorFuture Graph
    parallelize plan assign_layers_to_stages load prefetch Settings
    call_async capture profile counters explain visualize memory_stats reset_peak_memory_stats
    auto_redistribute explain_redistributions
    DTorchError
    UserError PlacementError MeshError MixedTensorError UnsupportedError CaptureError SettingError StateDictError
    ForkError
    RemoteOpError
    InfrastructureError NodeLost ControllerLost ClusterTimeout TransportError HandshakeError SecurityError
    SessionClosed InternalError
"""

SETTINGS = """
    wait_timeout_s start_timeout_s stop_timeout_s heartbeat_interval_s heartbeat_timeout_s collective_timeout_s
    max_outstanding_ops shared_window_ops max_outstanding_bytes batch_ops batch_age_s relay_min_nodes relay_fanout
    chunk_bytes num_threads beside_bytes keep_memory passes compile auto_capture device_memory_bytes
    check
"""


NN = """
    ColumnParallelLinear ColumnParallelLinearWithReplicateOutput RowParallelLinear RowParallelLinearWithReplicateOutput
    ReplicateParallelLinear VocabParallelEmbedding EmbeddingWithReplicateOutput
    SequenceParallelLayerNorm SequenceParallelRMSNorm MoE Routing
    vocab_parallel_cross_entropy VocabParallelCrossEntropyLoss reduce_gradients redistribute_input redistribute_output
"""


PARALLEL = """
    ClusterCosts Found LayerRow LinkCosts ModelPlan PlanRow Report
    describe parallelize pipeline plan reduce_once static_cache zero
"""


def test_the_names_of_dtorch_parallel() -> None:
    assert set(dtorch.parallel.__all__) == set(PARALLEL.split())
    assert [name for name in PARALLEL.split() if not getattr(dtorch.parallel, name).__doc__] == []


def test_the_names_of_dtorch_checkpoint() -> None:
    assert set(dtorch.checkpoint.__all__) == {"load", "save", "save_async"}
    assert [name for name in dtorch.checkpoint.__all__ if not getattr(dtorch.checkpoint, name).__doc__] == []


PIPELINE = """
    Pipeline clip_grad_norm_ assign_layers_to_stages make_orders issue_order check_order simulate Step Span Timeline
"""


def test_the_names_of_dtorch_parallel_pipeline() -> None:
    pipeline = dtorch.parallel.pipeline
    assert set(pipeline.__all__) == set(PIPELINE.split())
    assert [name for name in PIPELINE.split() if not getattr(pipeline, name).__doc__] == []


def test_the_names_of_dtorch_nn() -> None:
    assert set(dtorch.nn.__all__) == set(NN.split())
    assert [name for name in NN.split() if not getattr(dtorch.nn, name).__doc__] == []


def test_the_names_of_dtorch() -> None:
    assert len(dtorch.__all__) == len(set(dtorch.__all__))
    assert set(dtorch.__all__) == set(PUBLIC.split())
    assert set(dir(dtorch)) >= set(PUBLIC.split())


def test_type_checkers_see_every_name() -> None:
    tree = ast.parse(Path(dtorch.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert exported == set(PUBLIC.split()), "`from ... import name as name` under TYPE_CHECKING"


def test_every_name_leads_to_something_that_is_documented() -> None:
    undocumented = [name for name in PUBLIC.split() if not getattr(dtorch, name).__doc__]
    assert undocumented == []


def test_the_errors_are_one_tree() -> None:
    errors = [getattr(dtorch, name) for name in PUBLIC.split() if isinstance(getattr(dtorch, name), type)]
    exceptions = {error for error in errors if issubclass(error, BaseException)}
    assert {error for error in exceptions if not issubclass(error, dtorch.DTorchError)} == set()
    defined = {error for error in _descendants(dtorch.DTorchError) if error.__module__.endswith(".errors")}
    assert defined - exceptions == set(), "errors that a program cannot name"


def test_the_settings() -> None:
    assert {field.name for field in fields(Settings)} == set(SETTINGS.split())


def test_the_device_is_one_of_torchs() -> None:
    assert torch.device("dtorch").type == "dtorch"


def _descendants(cls: type) -> set[type]:
    found = {cls}
    child: type
    for child in cls.__subclasses__():
        found |= _descendants(child)
    return found
