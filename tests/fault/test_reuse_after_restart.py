"""Prompts whose blocks an earlier process left: all found by the same model, wherever and however it runs; none by
another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtier import TieredKV
from kvtier.hf import transformers_model
from tests.e2e.families import BLOCK, small_config, tokens
from tests.e2e.test_fingerprint import adapted, demote_all, llama
from tests.fault.test_upgrade import UPGRADES

ROOT = Path(__file__).parents[2]
LENGTH = 10 * BLOCK + 3
IDS = tokens(LENGTH)


def config(model: Any, folder: Path, **values: Any) -> dict[str, Any]:
    return small_config(transformers_model(model), folder, **{"prefix_cache": True, "nvme": 8 << 20, **values})


def computed(model: Any, folder: Path, **values: Any) -> int:
    """Tokens that a first request of a new wrapper on the folder computes."""
    with TieredKV(model, config(model, folder, **values)) as tiered:
        ours = tiered.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        plain = tiered.model(IDS, logits_to_keep=1).logits[0, -1]
        tolerance = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 0.2
        assert (ours.logits[0][0].float() - plain.float()).abs().max() <= tolerance
        tiered.check_integrity()
        return int(tiered.stats()["tokens"])


def leave(model: Any, folder: Path) -> None:
    """A process has computed the prompt, and all of it lies in files."""
    with TieredKV(model, config(model, folder)) as tiered:
        tiered.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1, do_sample=False)
        demote_all(tiered)


@dataclass
class Left:
    """What it left, and the checkpoint that it had loaded."""

    folder: Path
    checkpoint: Path

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.folder, to / "left")
        return to / "left"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    folder, checkpoint = tmp_path_factory.mktemp("left"), tmp_path_factory.mktemp("checkpoint")
    model = llama()
    model.save_pretrained(checkpoint)
    leave(model, folder)
    yield Left(folder, checkpoint)


def test_the_same_model_finds_all_of_it(left: Left, tmp_path: Path) -> None:
    assert computed(llama(), left.copy(tmp_path)) == 3
    assert computed(llama(), tmp_path / "left", mode="gathered") == 3, "attention plays no part in what is kept"


@pytest.mark.parametrize("change", UPGRADES)
def test_a_changed_model_finds_none_of_it_and_takes_none_of_it_away(change: str, left: Left, tmp_path: Path) -> None:
    folder = left.copy(tmp_path)
    assert computed(UPGRADES[change](), folder) == LENGTH
    assert computed(llama(), folder) == 3


def test_another_block_size_finds_none_of_it(left: Left, tmp_path: Path) -> None:
    assert computed(llama(), left.copy(tmp_path), block_tokens=2 * BLOCK) == LENGTH


def test_each_adapter_finds_its_own(tmp_path: Path) -> None:
    model = adapted()
    leave(model, tmp_path)
    assert computed(model, tmp_path) == 3
    model.set_adapter("other")
    assert computed(model, tmp_path) == LENGTH
    with model.disable_adapter():
        assert computed(model, tmp_path) == LENGTH
    model.set_adapter("default")
    assert computed(model, tmp_path) == 3


# -- other processes --------------------------------------------------------------------------------------------------


def in_another_process(left: Left, folder: Path, environment: dict[str, str], change: str = "none") -> dict[str, Any]:
    values = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-m", "tests.fault.test_reuse_after_restart", str(left.checkpoint), str(folder), change]
    where = environment.get("PYTHONPATH", str(ROOT))
    done = subprocess.run(command, cwd=where, env=values, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_another_hash_seed_finds_all_of_it(seed: str, left: Left, tmp_path: Path) -> None:
    told = in_another_process(left, left.copy(tmp_path), {"PYTHONHASHSEED": seed})
    assert told["computed"] == 3 and told["pid"] != os.getpid()


def test_another_process_with_a_changed_weight_finds_none(left: Left, tmp_path: Path) -> None:
    """The control."""
    assert in_another_process(left, left.copy(tmp_path), {}, "weight")["computed"] == LENGTH


def test_another_checkout_folder_finds_all_of_it(left: Left, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("kvtier", "policies", "configs", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    told = in_another_process(left, left.copy(tmp_path), {"PYTHONPATH": str(checkout)})
    assert Path(told["package"]).parent.parent == checkout.resolve()
    assert told["computed"] == 3


def main(checkpoint: str, folder: str, change: str) -> None:
    import kvtier

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    if change == "weight":
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[0, 0] += 0.5
    told = {"computed": computed(model, Path(folder)), "pid": os.getpid(), "package": str(kvtier.__file__)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
