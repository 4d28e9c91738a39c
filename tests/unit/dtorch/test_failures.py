"""What a user reads about failures that arrive from the cluster."""

from __future__ import annotations

import sys

from dtorch.failures import error_of
from dtorch.location import capture
from dtorch_runtime.errors import RemoteOpError
from dtorch_runtime.wire.records import FailureRecord


def test_a_failure_of_two_ops_names_the_lines_of_both():
    first = capture(sys._getframe())  # the first line
    second = capture(sys._getframe())  # the second line
    record = FailureRecord(
        *("op", "1", "aten::fill_", second, 0, "n0", "DataRace", "it races", ""), other_location_id=first
    )
    error = error_of(record)
    assert isinstance(error, RemoteOpError)
    text = str(error)
    assert "# the second line" in text
    assert "it races\nThe other op was issued at" in text
    assert "# the first line" in text.split("The other op")[1]
