"""Figures, always beside what a user would use instead, in the same run. ``python -m benchmarks.<name>``."""
