"""The place of an op in a backward pass is looked up on another thread, and nothing may be collected meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

import pytest

from dtorch import location


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_frames_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    seen: list[bool] = []
    frames = sys._current_frames

    def ask() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", ask)
    (gc.enable if enabled else gc.disable)()
    try:
        found = location._current_frame(threading.get_ident())
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert found is not None
    assert seen == [False]
