"""README's own examples run as they stand, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from kvtier import TieredKV, cli
from kvtier.config import load_config
from kvtier.config_files import preset_names
from tests.e2e.families import tiny

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_python_example_runs(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(1, 200, (1, 40))
    model = tiny("llama")
    names = {
        "model": model,
        "torch": torch,
        "TieredKV": TieredKV,
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "alice_ids": ids,
        "bob_ids": torch.randint(1, 200, (1, 30)),
        "folder": str(tmp_path),
        "system_and_question_ids": torch.cat([ids.repeat(1, 20), ids[:, :10]], dim=1),
        "system_and_other_question_ids": torch.cat([ids.repeat(1, 20), ids[:, 10:20]], dim=1),
        "next_question_ids": torch.randint(1, 200, (1, 10)),
        "padded_batch": {"input_ids": ids.repeat(2, 1), "attention_mask": torch.ones(2, 40).tril(30)},
    }
    exec(compile(PYTHON[number], f"README python example {number}", "exec"), names)
    assert "forward" not in vars(model), "the example closed its wrapper"
    if "reused_tokens" in PYTHON[number]:  # two full blocks of the system prompt, by the second call and the session
        assert "{'gpu': 1536, 'cpu': 0, 'nvme': 0}" in capsys.readouterr().out
    if number == 0:
        assert names["out"].shape == (1, 240)
        assert "nvme_to_gpu" in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2 and len(YAML) >= 1


@pytest.mark.parametrize("text", YAML)
def test_each_yaml_example_loads(text: str) -> None:
    load_config(yaml.safe_load(text))


def test_every_preset_and_make_target_and_link_that_readme_names_exists() -> None:
    for name in preset_names():
        assert f"`{name}`" in README
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", README)) <= targets
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_soak_command_in_readme_is_understood(tmp_path: Path) -> None:
    line = next(line for line in README.splitlines() if line.startswith("kvtier soak --config"))
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0
    # And for real: it stops at the first thing that does not exist here, the model's folder.
    assert cli.main(words) == 2
