"""Every transport, for the suites that say what all of them promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.transports import KINDS, PrivateFolder, Transport, make_transport


@pytest.fixture
def folder() -> Iterator[Path]:
    with PrivateFolder() as path:
        yield path


@pytest.fixture(params=KINDS)
async def transport(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Transport]:
    made = make_transport(request.param, folder)
    yield made
    await made.close()
