"""docs/configuration.md is what `make docs` makes of the config's models, and those say what each key means."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import load_config
from kvtier.errors import ConfigError

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate.py"))
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
KEYS = list(GENERATOR["keys"]())


def test_the_page_is_up_to_date() -> None:
    assert GENERATOR["page"]() == PAGE, "docs/configuration.md is not what the models say: run `make docs`"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_key_has_a_description_and_says_what_to_give(key: Any) -> None:
    field = key.field
    assert field.description and field.description.endswith("."), "give the key a docstring in kvtier/config*.py"
    assert field.title, "give the key a title: it ends error messages"


@pytest.mark.parametrize("key", [key for key in KEYS if key.limits()], ids=lambda key: key.path)
def test_bounds_are_told_in_error_messages_as_they_are_checked(key: Any) -> None:
    field, limits = key.field, key.limits()
    told = set(map(float, re.findall(r"\d+(?:\.\d+)?", field.title)))
    assert set(limits.values()) <= told, f"the title {field.title!r} does not say {limits}"


def nested(path: str, value: object) -> dict[str, Any]:
    """The smallest config with this key. A tier needs its budget, and `tiers` its gpu."""
    config: dict[str, Any] = {"tiers": {"gpu": {"budget": "1GiB"}}}
    inner = config
    *parents, last = path.split(".")
    for name in parents:
        inner = inner.setdefault(name, {"budget": "1GiB"} if "tiers" in path and name != "tiers" else {})
    inner[last] = value
    return config


@pytest.mark.parametrize("key", [key for key in KEYS if key.mapping is None], ids=lambda key: key.path)
def test_what_the_page_says_of_a_key_is_what_is_taken(key: Any) -> None:
    path, limits, choices = key.path, key.limits(), key.choices
    text = PAGE.split(f"### `{path}`\n")[1].split("\n### ")[0]
    kind = text.splitlines()[1]
    for word in choices:
        assert f"`{word}`" in kind
        load_config(nested(path, word))
    refused: list[object] = [7 if bool in key.types else True, [1], {}]
    if "ge" in limits:
        refused.append(limits["ge"] - 1)
    if "gt" in limits:
        refused.append(limits["gt"])
    if "le" in limits:
        refused.append(limits["le"] * 2)
    if "more than 0" in kind:
        refused.append(0)
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^config: {re.escape(path)}: "):
            load_config(nested(path, value))


def test_the_example_and_the_sizes_on_the_page_load() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = yaml.safe_load(example)
    del config["tiers"]["nvme"]["path"]  # not a folder here
    load_config(config)
    sizes = PAGE.split("## Sizes")[1].split("\n## ")[0]
    for good in ("512MiB", "1.5 GiB", "4096", "0%", "100%"):
        assert f"`{good}`" in sizes
        load_config({"tiers": {"gpu": {"budget": "1GiB"}, "cpu": {"budget": good}}})
    for bad in ("8G", "8gib"):
        assert f"`{bad}`" in sizes
        with pytest.raises(ConfigError, match="unknown unit"):
            load_config({"tiers": {"gpu": {"budget": bad}}})
