"""The programs of the user guide's pages run as they stand, and print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dtorch

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["meshes_and_placements.md", "training.md"])
def test_programs_of_a_page(page: str, cluster: dtorch.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    printed = ""
    for number, (kind, text) in enumerate(BLOCK.findall((DOCS / page).read_text())):
        if kind == "python":
            exec(compile(text, f"docs/{page}, block {number}", "exec"), names)
            printed = capsys.readouterr().out
        elif not kind:
            assert text.strip("\n") == printed.strip("\n"), f"block {number} of {page}"


def test_what_is_no_tensor_of_the_cluster() -> None:
    with pytest.raises(dtorch.MixedTensorError, match="from_torch"):
        dtorch.visualize([1, 2])
