"""Modules for models that are written for a mesh; on one device, or on a mesh without the axis, they are PyTorch's.

Everything of ``torch.nn`` works on meshes as it is. What is here cuts its own weights along an axis of the mesh, by
the schemes of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053), and brings activations to the placements it needs.
"""

from __future__ import annotations

from dtorch.nn.embedding import EmbeddingWithReplicateOutput, VocabParallelEmbedding
from dtorch.nn.hooks import redistribute_input, redistribute_output, reduce_gradients
from dtorch.nn.linear import (
    ColumnParallelLinear,
    ColumnParallelLinearWithReplicateOutput,
    ReplicateParallelLinear,
    RowParallelLinear,
    RowParallelLinearWithReplicateOutput,
)
from dtorch.nn.loss import VocabParallelCrossEntropyLoss, vocab_parallel_cross_entropy
from dtorch.nn.moe import MoE
from dtorch.nn.moe_router import Routing
from dtorch.nn.norm import SequenceParallelLayerNorm, SequenceParallelRMSNorm

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "EmbeddingWithReplicateOutput",
    "MoE",
    "ReplicateParallelLinear",
    "Routing",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "reduce_gradients",
    "redistribute_input",
    "redistribute_output",
    "vocab_parallel_cross_entropy",
]
