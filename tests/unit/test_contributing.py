"""CONTRIBUTING.md's policy passes the contract suite, as the page promises, and loads as its YAML line says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from kvtier.config import load_config

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_policy_passes_its_contract(tmp_path: Path) -> None:
    for block in blocks("python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_it_has_thirty_lines() -> None:
    assert len(blocks("python")[0].splitlines()) <= 32


def test_the_yaml_line_is_a_config() -> None:
    (line,) = blocks("yaml")
    assert load_config(yaml.safe_load(line)).eviction.cpu == "least_often:LeastOften"
