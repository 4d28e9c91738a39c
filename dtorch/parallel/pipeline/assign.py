"""Which stage has which layer."""

from __future__ import annotations

from dtorch_runtime.errors import SettingError
from dtorch_runtime.ir.placement import split


def assign_layers_to_stages(num_layers: int, num_stages: int) -> list[int]:
    """The stage of each layer: neighbours stay together, and no stage has more than one layer more than another.

    Layers that are left over go to the first stages, as in any uneven cut. ``assign_layers_to_stages(5, 2)`` is
    ``[0, 0, 0, 1, 1]``.

    Raises:
        SettingError: a number that is none, or a stage that would have no layer.
    """
    for name, number in (("num_layers", num_layers), ("num_stages", num_stages)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SettingError(f"{name} takes a number, 1 or more, got {number!r}")
    if num_layers < num_stages:
        raise SettingError(
            f"{num_layers} layers are too few for {num_stages} stages: each stage has one at least; write "
            f"num_stages={num_layers}, and a mesh whose 'pp' axis has as many"
        )
    return [
        stage for stage, (start, stop) in enumerate(split(num_layers, num_stages)) for _ in range(start, stop)
    ]
