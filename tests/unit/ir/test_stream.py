"""The op stream: words to bytes and back, and where each record starts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dtorch_runtime.ir.stream import FREE, WORD_BYTES, pack, unpack, walk


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_words_survive_packing(words):
    frame = pack(words)
    assert len(frame) == len(words) * WORD_BYTES
    assert unpack(frame) == words
    assert unpack(memoryview(frame)) == words


def test_half_a_word_is_refused():
    with pytest.raises(ValueError, match="got 12 bytes"):
        unpack(bytes(12))


def test_records_are_as_wide_as_their_templates():
    words = [1, 0, 5, FREE, 2, 5, 6, 2, 0, FREE, 0]
    assert list(walk(words, {1: 3, 2: 2})) == [(0, 3), (3, 7), (7, 9), (9, 11)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([3, 0, 5], "template 3, which was not defined"),
        ([1, 0], "ends inside a record at word 0 of 2"),
        ([FREE, 3, 1, 2], "ends inside"),
        ([FREE, -1], "ends inside"),
        ([FREE], "ends inside"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        list(walk(words, {1: 3}))
