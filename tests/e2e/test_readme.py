"""README's own examples run as they stand, and what it names exists."""

from __future__ import annotations

import re
import shlex
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import BatchEncoding
from typer.testing import CliRunner

from kvtier import cli
from kvtier.benchmarks import models
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


class Words:
    """A token a word, in place of the demo's tokenizer."""

    def __call__(self, text: str | list[str], return_tensors: str, **padding: Any) -> BatchEncoding:
        texts = [text] if isinstance(text, str) else text
        assert return_tensors == "pt" and (len(texts) == 1 or padding == {"padding": True, "padding_side": "left"})
        rows = [[7 + zlib.crc32(word.encode()) % 190 for word in each.split()] for each in texts]
        most = max(map(len, rows))
        ids = torch.tensor([[1] * (most - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def decode(self, ids: torch.Tensor) -> str:
        return " ".join(map(str, ids.tolist()))


def test_the_python_examples_run_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand: what one uses, it or one above it has defined. Only the model is another, which loads at once."""
    model = tiny("llama")
    monkeypatch.setattr(models, "load_model", lambda: models.LoadedModel(model, Words(), "tiny"))
    names: dict[str, Any] = {}
    printed = []
    for number, text in enumerate(PYTHON):
        exec(compile(text, f"README python example {number}", "exec"), names)
        assert "forward" not in vars(model), "the example closed its wrapper"
        printed.append(capsys.readouterr().out)
    assert names["out"].shape == (1, 3 + 20) and "nvme_to_gpu" in printed[0]
    # Two full blocks of the 600 tokens of the system prompt, by the second call and the session.
    assert "{'gpu': 1024, 'cpu': 0, 'nvme': 0}" in printed[1] and "('alice', " in printed[1]
    assert names["said"].shape == (1, 603 + 20 + 2 + 20)
    assert names["beams"].shape[0] == names["answers"].shape[0] == 2
    assert not list((tmp_path / "kvtier-example" / "kv").glob("session-*")), "deleted"


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
