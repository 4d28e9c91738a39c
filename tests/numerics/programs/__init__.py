"""Random programs on DTorch and on plain torch: ``python -m tests.numerics.programs --count 20000 --seed 0``."""
