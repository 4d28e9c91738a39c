"""Pipeline parallelism: stages of a model on meshes of their own, micro-batches on their way through them.

One program issues the steps of all stages, and each device runs its own in that order: a schedule is no more than an
order, and each is a small file here.
"""

from __future__ import annotations

from dtorch.parallel.pipeline.assign import assign_layers_to_stages
from dtorch.parallel.pipeline.clip import clip_grad_norm_
from dtorch.parallel.pipeline.order import check_order, issue_order
from dtorch.parallel.pipeline.runner import Pipeline
from dtorch.parallel.pipeline.schedules import make_orders
from dtorch.parallel.pipeline.simulate import Span, Timeline, simulate
from dtorch.parallel.pipeline.steps import Step

__all__ = [
    "Pipeline",
    "Span",
    "Step",
    "Timeline",
    "assign_layers_to_stages",
    "check_order",
    "clip_grad_norm_",
    "issue_order",
    "make_orders",
    "simulate",
]
