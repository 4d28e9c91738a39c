"""Print what an extra of pyproject.toml asks for and this interpreter's environment lacks, one requirement a line.

Usage: python .ci/missing.py EXTRA. Nothing printed means nothing to install, this checkout included.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # the one library that every venv has

ROOT = Path(__file__).resolve().parent.parent


def requirements(extra: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            for name in requirement.extras:
                found += requirements(name)
        else:
            found.append(requirement)
    return found


def is_satisfied(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def is_this_checkout_installed() -> bool:
    try:
        text = importlib.metadata.distribution("dtorch").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return text is not None and json.loads(text)["url"] == ROOT.as_uri()


missing = {str(r): None for r in requirements(sys.argv[1]) if not is_satisfied(r)}
if not is_this_checkout_installed():
    missing["dtorch (this checkout)"] = None
if missing:
    print("\n".join(missing))
