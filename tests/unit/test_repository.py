"""Structure of the repository: what the documents promise about the tree, checked against the tree."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dtorch_runtime.settings import OTHER_VARIABLES, Settings

ROOT = Path(__file__).parents[2]
PACKAGES = {"dtorch": "dtorch", "dtorch_runtime": "dtorch_runtime", "dtorch_launcher": "launcher"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_LINES = 500


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def modules(package: str) -> dict[str, Path]:
    """Import name of every module of a package, with its file."""
    folder = ROOT / PACKAGES[package]
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def contract(name: str) -> dict[str, list[str]]:
    (found,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith(name)]
    return found


def markdown_section(text: str, title: str) -> str | None:
    match = re.search(rf"^##+ {title}\s*$(.*?)(?=^##? |\Z)", text, re.MULTILINE | re.DOTALL)
    return match and match[1]


# ------------------------------------------------------------------------------------------------------------- the tree


def test_no_file_is_too_long_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in tracked("*.py", "*.md", "Makefile")
        if (num_lines := len(path.read_text().splitlines())) >= MAX_LINES
    }
    assert long == {}


def test_nothing_is_left_for_later() -> None:
    word = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked("*.py", "*.md", "*.toml", "Makefile")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_is_one_and_ships_its_types(package: str) -> None:
    folder = ROOT / PACKAGES[package]
    assert (folder / "py.typed").is_file()
    plain = {p.parent for p in folder.rglob("*.py") if not (p.parent / "__init__.py").is_file()}
    assert plain == set(), "these folders lack __init__.py, and would be left out of the wheel"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_and_delays_annotations(package: str) -> None:
    bare = []
    for name, path in modules(package).items():
        tree = ast.parse(path.read_text())
        delays = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        is_docstring_only = len(tree.body) <= 1
        if ast.get_docstring(tree) is None or not (delays or is_docstring_only):
            bare.append(name)
    assert bare == []


# ------------------------------------------------------------------------------------------------------------ documents


def test_files_that_documents_name_are_there() -> None:
    folders = "|".join(sorted({path.relative_to(ROOT).parts[0] for path in tracked("*.py")}))
    named = re.compile(rf"`((?:{folders})/[\w/]*\.(?:py|toml|md))`")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked("*.md")
        for name in named.findall(path.read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_the_readme_lists_every_folder_and_nothing_else() -> None:
    readme = ROOT / "README.md"
    section = markdown_section(readme.read_text(), "Layout")
    assert section is not None, "README.md has a section 'Layout' with a line for each folder"
    listed = set(re.findall(r"^\| *`([\w./]+?)/?`", section, re.MULTILINE))
    top = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    top = {name for name in top if not name.startswith(".")}
    assert top <= listed, "folders that the README does not list"
    assert {name for name in listed if not (ROOT / name).exists()} == set(), "listed, and not in the tree"
    for folder in PACKAGES.values():
        children = {f"{folder}/{p.parent.name}" for p in (ROOT / folder).glob("*/__init__.py")}
        if listed & children:
            assert children <= listed, f"the README lists some folders of {folder}, and not these"


def test_every_setting_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `(DTORCH_\w+)` \| (\S+) \|", text, re.MULTILINE))
    defaults = {f"DTORCH_{field.name.upper()}": field.default for field in fields(Settings)}
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        if isinstance(default, bool):
            assert rows[name] == ("on" if default else "off"), name
        elif isinstance(default, str):
            assert rows[name] == default, name
        else:
            assert float(rows[name]) == default, name


def test_every_environment_variable_in_the_code_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    documented = set(re.findall(r"^\| `(DTORCH_[A-Z_]+)`", text, re.MULTILINE))
    files = [path for package in PACKAGES for path in modules(package).values()]
    used = {name for path in files for name in re.findall(r"\bDTORCH_[A-Z_]+[A-Z]\b", path.read_text())}
    assert used <= documented
    assert documented == {f"DTORCH_{field.name.upper()}" for field in fields(Settings)} | OTHER_VARIABLES


def test_links_in_documents_lead_somewhere() -> None:
    broken = []
    for document in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_make_targets_in_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        (document.name, target)
        for document in tracked("*.md")
        for target in re.findall(r"`make ([a-z-]+)", document.read_text())
    }
    assert {pair for pair in named if pair[1] not in targets} == set()


def test_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"(?<=m )make [a-z-]+", script) == ["make check", "make test"]


# -------------------------------------------------------------------------------------------------------------- imports


def test_contracts_name_every_module_that_they_are_about() -> None:
    control_plane = set(contract("The control plane")["source_modules"])
    runtime = {name for name in modules("dtorch_runtime") if name.count(".") == 1}
    assert runtime - {"dtorch_runtime.worker"} == control_plane - {"dtorch_launcher"}

    deciders = re.compile(r"dtorch_runtime\.(ir|wire)$|.*\.(state|membership|planning|placing|ledger)$")
    decisions = set(contract("Decisions never import")["source_modules"])
    named = {name for package in PACKAGES for name in modules(package)}
    expected = {name for name in named if deciders.match(name)}
    assert expected <= decisions, "state machines that the contract about I/O does not list"


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imported torch")
"""


def test_the_control_plane_starts_without_torch() -> None:
    names = ["dtorch", *modules("dtorch_launcher"), *modules("dtorch_runtime")]
    names = [
        name for name in names if not name.startswith("dtorch_runtime.worker") and "__main__" not in name
    ]
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *names], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


# -------------------------------------------------------------------------------------------------------------- package


def test_one_version() -> None:
    version = PROJECT["project"]["version"]
    assert importlib.metadata.version("dtorch") == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    for path in modules("dtorch").values():
        for stated in re.findall(r'^__version__ = "(.*)"', path.read_text(), re.MULTILINE):
            assert stated == version, path


def test_changelog_fragments_are_named_after_an_issue_and_a_kind() -> None:
    kinds = re.compile(r"\d+\.(added|changed|fixed|removed)\.md|README\.md")
    names = [path.name for path in tracked("changelog.d")]
    assert names
    assert [name for name in names if not kinds.fullmatch(name)] == []


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dtorch-launch")
    assert [script.value for script in scripts] == ["dtorch_launcher.cli:main"]


def test_a_clone_beside_a_script_is_not_taken_for_the_package(tmp_path: Path) -> None:
    """``git clone`` makes a folder dtorch without an __init__; a script beside it must get the installed package."""
    (tmp_path / "dtorch" / "dtorch").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text("import dtorch, dtorch_launcher; print(dtorch.DeviceMesh('cpu', [0, 1]))")
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=30
    )
    assert result.stdout.strip() == "DeviceMesh('cpu', [0, 1])", result.stderr
