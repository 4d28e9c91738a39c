"""Ops as a picture: mermaid or dot text, or what the program ``dot`` makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtorch.insight.ops import ShownOp
from dtorch_runtime.errors import SettingError

#: The longest that ``dot`` may take for one picture.
_DOT_TIMEOUT_S = 120.0
_SUFFIXES = (".mmd", ".dot", ".svg")


def dump(ops: Sequence[ShownOp], path: str | os.PathLike[str] | None) -> str:
    """Write ops as the suffix of ``path`` says, and return the text; with None only return a line for each.

    Raises:
        SettingError: the suffix is another, or the picture needs ``dot`` and there is none or it fails.
    """
    if path is None:
        return "\n".join(map(str, ops))
    if not isinstance(path, str | os.PathLike) or Path(path).suffix not in _SUFFIXES:
        raise SettingError(
            f"dump takes a path that ends in {', '.join(_SUFFIXES)}, or None for text, got {path!r}; write 'g.mmd'"
        )
    target = Path(path)
    if not target.parent.is_dir():
        raise SettingError(f"dump writes a file in a folder that exists, got {str(target)!r}")
    text = mermaid(ops) if target.suffix == ".mmd" else dot(ops)
    target.write_bytes(_svg(text, target) if target.suffix == ".svg" else text.encode())
    return text


def _svg(text: str, target: Path) -> bytes:
    program = shutil.which("dot")
    write = f"write {target.with_suffix('.mmd').name!r} or {target.with_suffix('.dot').name!r} for text"
    if program is None:
        raise SettingError(
            f"{target.name!r} is drawn by the program dot, which is not installed: install graphviz (apt install "
            f"graphviz, brew install graphviz), or {write}"
        )
    try:
        result = subprocess.run(
            [program, "-Tsvg"], input=text.encode(), capture_output=True, timeout=_DOT_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise SettingError(f"dot did not draw {target.name!r} within {_DOT_TIMEOUT_S:g} s; {write}") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise SettingError(f"dot could not draw {target.name!r}: {said}; {write}") from None
    return result.stdout


class _Edges:
    """Who makes what: lines from op to op, and the values that were there before."""

    def __init__(self, ops: Sequence[ShownOp]) -> None:
        #: (maker, reader, value); a maker that is a value was there before.
        self.all: list[tuple[str, str, str]] = []
        #: Values that were there before, in the order of their first use.
        self.given: dict[str, None] = {}
        maker: dict[str, str] = {}
        for index, op in enumerate(ops):
            for value in dict.fromkeys(op.inputs):
                if value not in maker:
                    self.given[value] = None
                self.all.append((maker.get(value, given_name(value)), op_name(index), value))
            maker.update(dict.fromkeys(op.outputs, op_name(index)))


def op_name(index: int) -> str:
    """The vertex of an op."""
    return f"op{index}"


def given_name(value: str) -> str:
    """The vertex of a value that was there before."""
    return f"v{value.removeprefix('%')}"


def _groups(ops: Sequence[ShownOp]) -> Iterator[tuple[tuple[int, str] | None, list[int]]]:
    """Runs of ops of one captured call, and of none."""
    run: list[int] = []
    for index, op in enumerate(ops):
        if run and ops[run[-1]].group != op.group:
            yield ops[run[-1]].group, run
            run = []
        run.append(index)
    if run:
        yield ops[run[-1]].group, run


def _label(op: ShownOp) -> list[str]:
    made = f"{', '.join(op.outputs)} = " if op.outputs else ""
    return [f"{made}{op.call}", f"on {op.devices}", *([op.place] if op.location_id else [])]


def mermaid(ops: Sequence[ShownOp]) -> str:
    """Text that mermaid draws, as many viewers of Markdown do."""
    edges = _Edges(ops)
    lines = ["flowchart TD"]
    lines += [f'  {given_name(value)}(["{value}"])' for value in edges.given]
    for group, indices in _groups(ops):
        if group is not None:
            lines.append(f'  subgraph call{group[0]} ["{_escaped(group[1])}"]')
        for index in indices:
            label = "<br/>".join(_escaped(text) for text in _label(ops[index]))
            lines.append(f'  {op_name(index)}["{label}"]')
        if group is not None:
            lines.append("  end")
    lines += [f'  {maker} -->|"{value}"| {reader}' for maker, reader, value in edges.all]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Mermaid takes entities in quoted labels."""
    replaced = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "#": "&num;"}
    return "".join(replaced.get(letter, letter) for letter in text)


def dot(ops: Sequence[ShownOp]) -> str:
    """Text that graphviz draws."""
    edges = _Edges(ops)
    lines = ["digraph dtorch {", '  node [shape=box, fontname="Helvetica", fontsize=10];']
    lines += [f"  {given_name(value)} [shape=ellipse, label={_quoted(value)}];" for value in edges.given]
    for group, indices in _groups(ops):
        if group is not None:
            lines += [f"  subgraph cluster_{group[0]} {{", f"    label={_quoted(group[1])};"]
        lines += [f"  {op_name(index)} [label={_quoted(*_label(ops[index]))}];" for index in indices]
        if group is not None:
            lines.append("  }")
    lines += [f"  {maker} -> {reader} [label={_quoted(value)}];" for maker, reader, value in edges.all]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(*texts: str) -> str:
    escaped = [text.replace("\\", "\\\\").replace('"', '\\"') for text in texts]
    return '"' + "\\n".join(escaped) + '"'
