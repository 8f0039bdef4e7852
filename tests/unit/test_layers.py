"""Import rules that import-linter cannot see, and the promise that the pure modules import without torch.

import-linter (pyproject.toml) checks the folder kvtier/. The folders policies/, configs/ and benchmarks/ are installed
as kvtier.policies and so on; by those names grimp does not know them, so imports of them are read from the source here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
PURE = next(
    contract["source_modules"]
    for contract in PYPROJECT["tool"]["importlinter"]["contracts"]
    if contract["name"].startswith("Pure modules")
)
PURE_FILES = [name for name in PURE if name.startswith("kvtier.") and (REPO / f"{name.replace('.', '/')}.py").exists()]


def imported(file: Path) -> Iterator[str]:
    """Every module, or module and name, that the file imports as a library, at any depth and also for typing only."""
    for node in ast.walk(without_main_block(ast.parse(file.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def without_main_block(tree: ast.Module) -> ast.Module:
    """The tree less `if __name__ == "__main__":`, which is a command line of its own."""
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    return tree


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("file", sorted((REPO / "policies").glob("*.py")), ids=lambda file: file.name)
def test_policies_import_only_the_shared_words(file: Path) -> None:
    for name in imported(file):
        assert under(name, "kvtier.types") or name.split(".")[0] in sys.stdlib_module_names, f"{file.name}: {name}"


@pytest.mark.parametrize("file", sorted((REPO / "kvtier").rglob("*.py")), ids=lambda file: file.name)
def test_the_package_imports_no_policy_and_only_the_cli_a_benchmark(file: Path) -> None:
    for name in imported(file):
        assert not name.startswith("."), f"{file.name}: {name}: imports are absolute here"
        assert not under(name, "kvtier.policies", "kvtier.configs", "policies", "configs", "benchmarks", "tests"), name
        assert file.name == "cli.py" or not under(name, "kvtier.benchmarks"), name


@pytest.mark.parametrize("file", sorted((REPO / "benchmarks").glob("*.py")), ids=lambda file: file.name)
def test_benchmarks_do_not_import_the_command_line(file: Path) -> None:
    above = ["kvtier.cli", "tests"]
    # `soak --faults` is the injector of kvtier.testing, and its only door; scale.py needs an engine without tensors.
    if file.name not in ("faults.py", "scale_house.py"):
        above.append("kvtier.testing")
    assert not [name for name in imported(file) if under(name, *above)]


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "transformers"}:
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Blocker())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def run_blocked(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKER, *modules]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)


def test_pure_modules_and_policies_import_with_torch_absent() -> None:
    policies = [f"kvtier.policies.{file.stem}" for file in (REPO / "policies").glob("[!_]*.py")]
    done = run_blocked("kvtier", *PURE_FILES, *policies)
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks() -> None:
    assert "blocked: torch" in run_blocked("kvtier.stores.base").stderr


def test_every_package_on_disk_is_in_the_wheel() -> None:
    packages = set(PYPROJECT["tool"]["setuptools"]["packages"])
    folders = {file.parent.relative_to(REPO) for file in (REPO / "kvtier").rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} <= packages
