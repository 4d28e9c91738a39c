from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client import Controller, scripted_session


@pytest.fixture
def controller() -> Iterator[Controller]:
    """The test's side of the current session. Its batches leave when asked for, never by age."""
    with scripted_session(batch_age_s=3600.0) as controller:
        yield controller
