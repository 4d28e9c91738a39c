"""Checkpoints: what a program keeps of its tensors in a folder, and takes back onto any mesh."""

from __future__ import annotations

from dtorch.checkpoint.loading import load
from dtorch.checkpoint.saving import save, save_async

__all__ = ["load", "save", "save_async"]
