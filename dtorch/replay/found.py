"""What ``dtorch.capture.explain`` says of a graph: the runs of ops in it that were found to repeat."""

from __future__ import annotations

from collections.abc import Iterator

from dtorch.graph import Graph
from dtorch.location import describe
from dtorch.replay.runs import Run


def explain_runs(graph: Graph) -> str:
    """The runs that are known, how often each was replayed, and why it was broken off."""
    with graph.lock:
        return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
    replayer = graph.replayer
    if replayer is None:
        yield f"graph {graph.graph_id}: finds no runs. Write dtorch.Graph(auto_capture=True)"
        return
    yield (
        f"graph {graph.graph_id}: {replayer.num_replayed_ops} of {replayer.num_ops} ops were sent as "
        f"{replayer.num_replays} runs, for which {replayer.num_templates} templates were made"
    )
    for run in sorted(replayer.runs, key=lambda run: -run.num_replays * run.num_ops):
        yield from _lines_of(run)


def _lines_of(run: Run) -> Iterator[str]:
    if run.layout is None:
        yield f"  {run.num_ops} ops, found and not seen again"
    else:
        record = run.layout.record
        yield (
            f"  {run.num_ops} ops, {record.num_inputs} inputs and {record.num_outputs} outputs: "
            f"sent as one {run.num_replays} times"
        )
    first, last = describe(run.heads[1]), describe(run.heads[-1])
    yield f"    {first}" if first == last else f"    from {first}\n    to {last}"
    for why, count in run.broken.items():
        yield f"    began {count} times and was not sent as one: {why}"
