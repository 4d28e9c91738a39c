"""The checker of op streams: every input was made before it is used and was not freed, no id is made twice.

Runs in tests and under ``DTORCH_CHECK=1``; it costs a set operation for each value, so not on every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from dtorch_runtime.ir.graph import GraphError
from dtorch_runtime.ir.stream import FREE, WidthsOf, walk
from dtorch_runtime.wire.records import TemplateRecord


def verify_ops(words: Sequence[int], templates: Mapping[int, TemplateRecord], live: Container[int]) -> None:
    """Check a batch before it is added.

    Args:
        words: the batch (see ``dtorch_runtime.ir.stream``).
        templates: those defined so far.
        live: ids of values that exist before the batch.

    Raises:
        GraphError: a record breaks a rule; the message names the op and the value.
    """
    made: set[int] = set()
    freed: set[int] = set()
    widths = WidthsOf(templates)

    def exists(value_id: int) -> bool:
        return value_id in made or (value_id in live and value_id not in freed)

    try:
        for start, stop in walk(words, widths):
            if words[start] == FREE:
                ids = words[start + 2 : stop]
                _check_used(ids, exists, "FREE")
                if len(set(ids)) != len(ids):
                    raise GraphError(f"FREE names a value twice: {list(ids)}")
                freed.update(ids)
                made.difference_update(ids)
                continue
            record = templates[words[start]]
            first_output = start + 2 + record.num_inputs
            outputs = [v for v in words[first_output : first_output + record.num_outputs] if v]
            _check_used(words[start + 2 : first_output], exists, record.op)
            for value_id in outputs:
                if value_id < 0 or value_id in made or value_id in live:
                    raise GraphError(f"{record.op} makes value {value_id}, which exists already or cannot be")
                made.add(value_id)
    except GraphError:
        raise
    except ValueError as error:
        raise GraphError(str(error)) from None


def _check_used(value_ids: Sequence[int], exists: Callable[[int], bool], op: str) -> None:
    for value_id in value_ids:
        if not exists(value_id):
            raise GraphError(f"{op} uses value {value_id}, which was not made before it or was freed")
