"""Models that were written for one device, on a mesh."""

from __future__ import annotations

from dtorch.parallel import pipeline
from dtorch.parallel.cache import static_cache
from dtorch.parallel.costs import ClusterCosts, LinkCosts
from dtorch.parallel.distribute import parallelize
from dtorch.parallel.found import Found
from dtorch.parallel.preview import ModelPlan, PlanRow, plan
from dtorch.parallel.reduction import reduce_once
from dtorch.parallel.report import LayerRow, Report, describe
from dtorch.parallel.zero import zero

__all__ = [
    "ClusterCosts",
    "Found",
    "LayerRow",
    "LinkCosts",
    "ModelPlan",
    "PlanRow",
    "Report",
    "describe",
    "parallelize",
    "pipeline",
    "plan",
    "reduce_once",
    "static_cache",
    "zero",
]
