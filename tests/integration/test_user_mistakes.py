"""Every mistake of the table is told at the user's line: class, what was given, what is allowed, what to write.

The controller is the test's own and answers nothing: whatever waited for it would not end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

import dtorch
from dtorch_runtime.errors import InternalError, RemoteOpError
from tests.integration.more_user_mistakes import ALL as KNOWN
from tests.integration.newcomer_mistakes import NEWCOMERS
from tests.integration.user_mistakes import Mistake, x
from tests.support.client import Controller, scripted_session

ALL = [*KNOWN, *NEWCOMERS]


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with scripted_session() as scripted:
        yield scripted


def test_the_table_is_long_enough() -> None:
    assert len({mistake.what for mistake in ALL}) == len(ALL) >= 60


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize_per")
@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: re.sub(r"\W+", "_", mistake.what))
def test_the_message_teaches(controller: Controller, mistake: Mistake) -> None:
    with pytest.raises(mistake.error) as raised:
        mistake.program()
    assert not isinstance(raised.value, InternalError | RemoteOpError)
    message = str(raised.value)
    for text in (mistake.given, mistake.allowed, mistake.write):
        assert text in message, message


def test_a_tensor_of_a_closed_session() -> None:
    with scripted_session():
        kept = x(3)
    uses: list[Any] = [
        lambda: kept + 1,
        lambda: kept.add_(1),
        lambda: kept.to_torch(),
        lambda: kept.tolist(),
        lambda: asyncio.run(_value(kept)),
    ]
    for use in uses:
        with pytest.raises(
            dtorch.SessionClosed, match=r"closed by dtorch\.shutdown\(\).*fetch values before"
        ):
            use()


async def _value(tensor: Any) -> Any:
    return await tensor.value()


def test_tensors_of_two_sessions(controller: Controller) -> None:
    one = x(3)
    with scripted_session():
        other = x(3)
        with pytest.raises(dtorch.SessionClosed, match=r"two sessions.*\.to_torch\(\)"):
            one + other
