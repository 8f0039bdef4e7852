"""What cannot be honoured is one clear error that names the thing and the mend, and loses nothing."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from torch import nn

import kvtier.forward
import kvtier.generate
from kvtier import TieredKV
from kvtier.errors import (
    BudgetError,
    ConfigError,
    KVTierError,
    PromptMismatchError,
    UnsupportedError,
    UnsupportedModelError,
)
from tests.e2e.families import (
    FAMILIES,
    GREEDY,
    MODES,
    assert_same,
    plain_turns,
    small_config,
    tiny,
    tiny_from,
    tokens,
)

LLAMA = FAMILIES["llama"][1]

# -- calls that cannot be honoured -------------------------------------------------------------------------------------


class Chat:
    """A cache that holds one turn, and the turn that must still be exact after every refusal."""

    def __init__(self, tiered: TieredKV, mode: str) -> None:
        self.tiered, self.mode, self.model = tiered, mode, tiered.model
        (ids, first), (self.ids, self.expected) = plain_turns(self.model, turns=2, prompt=150)
        self.cache = tiered.new_cache()
        assert_same(tiered.generate(ids, cache=self.cache, **GREEDY), first, mode)
        self.held = first.sequences[:, :-1]

    def state(self) -> tuple[Any, ...]:
        """What a refused call must leave alone."""
        gc.collect()  # caches of refused calls go by themselves
        self.tiered.check_integrity()
        while (stats := self.tiered.stats())["moves_in_flight"]:  # a block that was let go lives until its move ends
            time.sleep(0.001)
        return self.cache.get_seq_length(), self.cache.token_ids, stats["blocks"], stats["sequences"], stats["tokens"]

    def generate(self, ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The next turn's generate, with something changed."""
        ids = self.ids if ids is None else ids
        return self.tiered.generate(ids, **{"cache": self.cache, "max_new_tokens": 3, "do_sample": False, **kwargs})

    @torch.no_grad()
    def call(self, ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """A forward of eight new tokens, with something changed."""
        return self.tiered(tokens(8) if ids is None else ids, **{"cache": self.cache, **kwargs})


@pytest.fixture(scope="module", params=MODES)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    model = tiny_from(hf.LlamaConfig, **LLAMA)
    with TieredKV(model, small_config(model, tmp_path_factory.mktemp("chat"), request.param)) as tiered:
        yield Chat(tiered, request.param)


Case = tuple[Callable[[Chat], Any], type[KVTierError], str]


def generation(**values: Any) -> Any:
    return hf.GenerationConfig(max_new_tokens=3, **values)


def with_grad(chat: Chat) -> None:
    with torch.enable_grad():
        chat.tiered(tokens(8), cache=chat.cache)


CALLS: dict[str, Case] = {
    "another conversation": (lambda c: c.generate(tokens(200, 99)), PromptMismatchError, "token 0.*new cache"),
    "an edited prompt": (
        lambda c: c.generate(c.ids.index_fill(1, torch.tensor([77]), int(c.ids[0, 77]) ^ 1)),
        PromptMismatchError,
        r"at token 77.*crop\(-92\)",
    ),
    "a shorter prompt": (
        lambda c: c.generate(c.ids[:, :50]), PromptMismatchError, r"169 tokens.*50.*whole transcript.*crop\(-120\)",
    ),
    "an equal prompt": (lambda c: c.generate(c.held), PromptMismatchError, "169 tokens.*new tokens"),
    "a mask of other length": (
        lambda c: c.generate(tokens(200, 99), attention_mask=torch.ones(1, 199, dtype=torch.long)),
        UnsupportedError,
        "position_ids|mask|prompt",
    ),
    "a 4D mask": (lambda c: c.call(attention_mask=torch.ones(1, 1, 8, 177)), UnsupportedError, "4D.*pass a 2D"),
    "a 4D mask to generate": (
        lambda c: c.generate(attention_mask=torch.ones(1, 1, 8, 177)), UnsupportedError, "4D.*pass a 2D",
    ),
    "a padded mask": (
        lambda c: c.generate(attention_mask=torch.ones_like(c.ids).index_fill(1, torch.tensor([0]), 0)),
        UnsupportedError, "hides token 0.*pass",
    ),
    "a mask with a hole in what is held": (
        lambda c: c.call(attention_mask=torch.ones(1, 177).index_fill(1, torch.tensor([3]), 0)),
        UnsupportedError, "hides token 3.*later ones.*pass",
    ),
    "a short mask": (
        lambda c: c.call(attention_mask=torch.ones(1, 8)), UnsupportedError, r"\(1, 8\).*\(1, 177\).*pass",
    ),
    "a mask of too many rows": (
        lambda c: c.call(attention_mask=torch.ones(2, 177)), UnsupportedError, r"\(2, 177\).*\(1, 177\)",
    ),
    "too few positions": (
        lambda c: c.call(position_ids=torch.arange(7)[None]), UnsupportedError, r"position_ids.*\(1, 7\).*\[1, 8\]",
    ),
    "positions of three axes": (
        lambda c: c.call(position_ids=torch.arange(8).repeat(3, 1, 1)), UnsupportedError, r"position_ids.*\(3, 1, 8\)",
    ),
    "no tokens": (lambda c: c.call(torch.empty(1, 0, dtype=torch.long)), UnsupportedError, "no new tokens"),
    "ids and embeddings": (lambda c: c.call(inputs_embeds=torch.zeros(1, 8, 96)), UnsupportedError, "exactly one"),
    "ids without rows": (lambda c: c.generate(c.ids[0]), UnsupportedError, r"\(\d+,\).*rows.*ids\[None\]"),
    "ids of three axes": (
        lambda c: c.generate(c.ids[None]), UnsupportedError, r"generate: .*\(1, 1, \d+\).*\[rows, tokens\]",
    ),
    "ids that are no whole numbers": (lambda c: c.generate(c.ids.float()), UnsupportedError, r"float32.*torch\.long"),
    "ids without rows to forward": (lambda c: c.call(tokens(8)[0]), UnsupportedError, r"\(8,\).*rows"),
    "ids that are no whole numbers to forward": (lambda c: c.call(tokens(8).float()), UnsupportedError, "float32"),
    "text to forward": (lambda c: c.call("Hello"), UnsupportedError, "token ids.*not a str"),
    "a short mask to generate": (
        lambda c: c.generate(cache=c.tiered.new_cache(), attention_mask=torch.ones(1, 3)),
        UnsupportedError, r"attention_mask has the shape \(1, 3\), input_ids \(1, \d+\): give one of \d+ columns$",
    ),
    "text": (lambda c: c.generate("Hello"), UnsupportedError, r"token ids, not a str.*\*\*tokenizer"),
    "what a tokenizer gives, whole": (
        lambda c: c.generate(hf.BatchEncoding({"input_ids": c.ids})), UnsupportedError, "not a BatchEncoding",
    ),
    "two rows": (
        lambda c: c.generate(c.ids.repeat(2, 1)), UnsupportedError, "holds 1 rows.*has 2.*batch_repeat_interleave",
    ),
    "two rows to forward": (lambda c: c.call(tokens(8).repeat(2, 1)), UnsupportedError, "holds 1 rows.*has 2"),
    "a cache of no rows": (lambda c: c.tiered.new_cache(batch_size=0), UnsupportedError, "batch_size=0.*one row"),
    "a cache made for two rows": (
        lambda c: c.generate(cache=c.tiered.new_cache(batch_size=2)), UnsupportedError, "batch_size=2.*has 1 rows",
    ),
    "beams": (lambda c: c.generate(num_beams=2), UnsupportedError, "holds 1 rows.*has 2.*batch_repeat_interleave"),
    "beams in a config": (
        lambda c: c.generate(generation_config=generation(num_beams=2)), UnsupportedError, "holds 1 rows.*has 2",
    ),
    "return sequences": (
        lambda c: c.generate(num_return_sequences=2, do_sample=True), UnsupportedError, "holds 1 rows.*has 2",
    ),
    "an early exit": (
        lambda c: c.generate(assistant_early_exit=1), UnsupportedError, "assistant_early_exit=1.*skipped",
    ),
    "contrastive search": (lambda c: c.generate(penalty_alpha=0.6), UnsupportedError, "penalty_alpha=0.6"),
    "DoLa": (lambda c: c.generate(dola_layers="low"), UnsupportedError, "dola_layers='low'"),
    "custom code": (lambda c: c.generate(custom_generate="x/y"), UnsupportedError, "custom_generate='x/y'"),
    "rows that are not there": (
        lambda c: c.cache.batch_select_indices(torch.tensor([1])), UnsupportedError, r"rows \[1\] of a cache of 1",
    ),
    "a beam that is not there": (
        lambda c: c.cache.reorder_cache(torch.tensor([0, 2])), UnsupportedError, r"reorder_cache: rows \[0, 2\]",
    ),
    "no row at all": (lambda c: c.cache.batch_repeat_interleave(0), UnsupportedError, "batch_repeat_interleave"),
    "attentions": (lambda c: c.generate(output_attentions=True), UnsupportedError, "output_attentions"),
    "attentions in a config": (
        lambda c: c.generate(generation_config=generation(output_attentions=True, return_dict_in_generate=True)),
        UnsupportedError, "output_attentions",
    ),
    "attentions of forward": (lambda c: c.call(output_attentions=True), UnsupportedError, "output_attentions.*without"),
    "labels": (lambda c: c.call(labels=tokens(8)), UnsupportedError, "labels.*without"),
    "no cache in generate": (lambda c: c.generate(use_cache=False), UnsupportedError, "use_cache=False.*call"),
    "no cache in a config": (
        lambda c: c.generate(generation_config=generation(use_cache=False)), UnsupportedError, "use_cache=False",
    ),
    "no cache in forward": (lambda c: c.call(use_cache=False), UnsupportedError, "use_cache=False.*leave"),
    "a plain cache": (
        lambda c: c.generate(cache=hf.DynamicCache(config=c.model.config)), UnsupportedError, "DynamicCache.*new_cache",
    ),
    "a cache's kind": (
        lambda c: c.generate(cache=None, cache_implementation="static"), UnsupportedError, "cache_implementation",
    ),
    "an attention keyword": (lambda c: c.call(sliding_window=4), UnsupportedError, "sliding_window=4"),
    "an unknown keyword": (lambda c: c.call(softmax_flavour="mild"), UnsupportedError, "softmax_flavour='mild'"),
    "an id beyond the vocabulary": (
        lambda c: c.generate(c.ids.index_fill(1, torch.tensor([180]), 256)),
        UnsupportedError, "generate: token id 256, number 180 of row 0.*0 to 255.*resize_token_embeddings",
    ),
    "a negative id": (
        lambda c: c.generate(c.ids.index_fill(1, torch.tensor([180]), -1)), UnsupportedError, "token id -1, number 180",
    ),
    "an id beyond the vocabulary to forward": (
        lambda c: c.call(tokens(8).index_fill(1, torch.tensor([7]), 256)), UnsupportedError,
        "a call: token id 256, number 7 of row 0",
    ),
    "a negative id to forward": (
        lambda c: c.call(torch.tensor([[-1]])), UnsupportedError, "a call: token id -1, number 0",
    ),
    "gradients": (with_grad, UnsupportedError, "require grad.*no_grad"),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_honoured(name: str, chat: Chat) -> None:
    call, error, message = CALLS[name]
    before = chat.state()
    with pytest.raises(error, match=message):
        call(chat)
    assert chat.state() == before
    assert_same(chat.tiered.generate(chat.ids, cache=chat.cache.fork(), **GREEDY), chat.expected, chat.mode)


@pytest.mark.parametrize("bad", [256, -1])
def test_an_id_of_no_token_in_a_later_chunk_leaves_the_cache_as_it_was(chat: Chat, bad: int) -> None:
    """The embedding's own IndexError came out, of a call whose first chunks were computed already."""
    length, held = chat.cache.get_seq_length(), chat.cache.token_ids
    ids = tokens(300, 5).index_fill(1, torch.tensor([299]), bad)
    for given in ({"cache": chat.cache}, {"cache": chat.tiered.new_cache()}):
        with pytest.raises(UnsupportedError, match=f"a call: token id {bad}, number 299") as caught, torch.no_grad():
            chat.tiered(ids, **given)
        assert isinstance(caught.value.__context__, IndexError)
    chat.state()
    assert (chat.cache.get_seq_length(), chat.cache.token_ids) == (length, held)
    assert_same(chat.tiered.generate(chat.ids, cache=chat.cache.fork(), **GREEDY), chat.expected, chat.mode)


def test_other_index_errors_of_a_model_are_its_own(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("a layer's own")

    monkeypatch.setattr(chat.model.model.layers[1], "forward", broken)
    with pytest.raises(IndexError, match="a layer's own"):
        chat.call()


@pytest.mark.parametrize("bad", [256, -1])
def test_an_id_of_no_token_leaves_a_session_whole(tmp_path: Path, bad: int) -> None:
    """Also where the transcript was edited: the session does not go back for a call that is refused."""
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        session = tiered.session("alice")
        out = session.generate(tokens(100), max_new_tokens=4, do_sample=False)
        held = session.token_ids
        wrong = torch.cat([out[:, :50], tokens(60, 7)], dim=1).index_fill(1, torch.tensor([80]), bad)
        with pytest.raises(UnsupportedError, match=f"session.generate: token id {bad}, number 80"):
            session.generate(wrong, max_new_tokens=4)
        assert session.token_ids == held and session.cache.get_seq_length() == len(held)
        ids, before = torch.cat([out, tokens(5, 8)], dim=1), tiered.stats()["tokens"]
        again = session.generate(ids, max_new_tokens=4, do_sample=False)
        assert tiered.stats()["tokens"] - before == ids.shape[1] - len(held) + 3
        assert torch.equal(again, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_steps_of_decoding_do_not_look_at_the_vocabulary(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (kvtier.generate, kvtier.forward):
        monkeypatch.setattr(module, "check_vocabulary", lambda ids, caller, model: calls.append(caller))
    chat.tiered.generate(tokens(40), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert calls == ["generate"]


def test_a_cache_of_another_wrapper(chat: Chat, tmp_path: Path) -> None:
    model, before = tiny("qwen2"), chat.state()
    with TieredKV(model, small_config(model, tmp_path)) as other:
        for call in (other.generate, other):
            with pytest.raises(UnsupportedError, match="another TieredKV"):
                call(chat.ids, cache=chat.cache)
    assert chat.state() == before


def test_dropout_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_from(hf.LlamaConfig, **LLAMA, attention_dropout=0.3)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        model.train()
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"dropout 0\.3.*model\.eval\(\)"):
            tiered(tokens(8))
        model.eval()
        assert tiered.generate(tokens(8), max_new_tokens=2).shape == (1, 10)


# -- models ------------------------------------------------------------------------------------------------------------

_SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
_LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8)
_MOE = dict(moe_intermediate_size=16, n_routed_experts=2, first_k_dense_replace=2)
_T5 = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral": (
        lambda: tiny_from(hf.MistralConfig, **_SMALL, sliding_window=64), "Mistral.*SlidingWindow.*nothing to tier",
    ),
    "qwen2": (
        lambda: tiny_from(hf.Qwen2Config, **_SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0),
        "Qwen2.*SlidingWindow.*nothing to tier",
    ),
    "falcon": (lambda: tiny_from(hf.FalconConfig, **_SMALL), "Falcon.*not verified.*verified: llama"),
    "bloom": (
        lambda: tiny_from(hf.BloomConfig, attention="eager", vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        "Bloom.*not verified",
    ),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)), "encoder-decoder"),
    "deepseek": (
        lambda: tiny_from(hf.DeepseekV3Config, **_SMALL, num_key_value_heads=2, **_MOE, **_LATENT), "Deepseek.*latent",
    ),
    "dynamic rope": (lambda: tiny_from(hf.LlamaConfig, **LLAMA, rope_parameters=_DYNAMIC), "RoPE.*dynamic"),
    "flex": (lambda: tiny_from(hf.LlamaConfig, attention="flex_attention", **LLAMA), "flex_attention.*'sdpa'"),
    "a classifier": (lambda: hf.LlamaForSequenceClassification(tiny().config), "LlamaForSequenceClassification"),
    "not transformers": (lambda: nn.Linear(3, 3), "Linear.*wrap the model itself"),
    "compiled": (lambda: torch.compile(tiny_from(hf.LlamaConfig, **LLAMA)), "compile.*before compiling"),
    "nothing": (lambda: None, "NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    build, message = MODELS[name]
    model = build()
    before = sorted(vars(model)) if isinstance(model, nn.Module) else []
    with pytest.raises(UnsupportedModelError, match=message):
        TieredKV(model, small_config(tiny(), tmp_path))
    assert before == (sorted(vars(model)) if isinstance(model, nn.Module) else [])
    assert not list(tmp_path.glob("nvme/*"))


# -- configs -----------------------------------------------------------------------------------------------------------


def bad(tmp_path: Path, error: type[KVTierError], message: str, **changes: Any) -> None:
    """The config with these keys changed is refused, and the model can then be wrapped with the good one."""
    model = tiny()
    config = small_config(model, tmp_path)
    tiers = {name: {**config["tiers"][name], **changes.pop(name, {})} for name in config["tiers"]}
    with pytest.raises(error, match=message):
        TieredKV(model, {**config, "tiers": tiers, **changes})
    assert not hasattr(model.forward, "__kvtier__") and model.config._attn_implementation == "sdpa"
    with TieredKV(model, config):
        pass


def test_budgets_below_their_minimum_show_the_sum(tmp_path: Path) -> None:
    the_sum = r"gpu.budget is 1000 bytes.*2 blocks of 12288 bytes \+ a ring of 8192 \+ scratch of \d+"
    bad(tmp_path, BudgetError, the_sum, gpu={"budget": 1000})
    bad(tmp_path, BudgetError, "as much again for the layer", gpu={"budget": 30000}, attention="gathered")
    bad(tmp_path, BudgetError, "cpu.budget is 100 bytes, its minimum is", cpu={"budget": 100})
    bad(tmp_path, BudgetError, "nvme.* 100 bytes.*minimum is", nvme={"budget": 100})
    bad(tmp_path, BudgetError, r"gpu.budget is 16KiB \(16384 bytes\), its minimum is", gpu={"budget": "16KiB"})


def test_a_refused_nvme_budget_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a new user: the folder of a process without a path stayed until the next one came."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny()
    config = small_config(model, tmp_path)
    for nvme in ({"budget": 100}, {"budget": "1MiB", "max_writes": "1KiB/day"}):
        with pytest.raises(BudgetError):
            TieredKV(model, {**config, "tiers": {**config["tiers"], "nvme": nvme}})
    assert not [each for each in (tmp_path / "cache").rglob("*") if each.name.startswith(("run-", "new-"))]
    with TieredKV(model, {**config, "tiers": {**config["tiers"], "nvme": {"budget": "4MiB"}}}):
        assert len(list((tmp_path / "cache").rglob("run-*"))) == 1, "where they would have been"


def yaml_file(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config, default=str))))
    return path


def test_what_is_wrong_with_a_config_names_the_file_it_came_from(tmp_path: Path) -> None:
    """Found when the model is wrapped, when the folder is tried, or in the middle of a call."""
    model = tiny()
    (tmp_path / "file").touch()
    good = small_config(model, tmp_path / "kv")
    for tier, key, value, error in (
        ("gpu", "budget", 1000, BudgetError),
        ("cpu", "budget", 100, BudgetError),
        ("nvme", "budget", "40KiB", BudgetError),
        ("nvme", "path", str(tmp_path / "file"), ConfigError),
    ):
        tiers = {**good["tiers"], tier: {**good["tiers"][tier], key: value}}
        file = yaml_file(tmp_path / "mine.yaml", {**good, "tiers": tiers})
        for source in (file, str(file)):
            with pytest.raises(error) as caught:
                TieredKV(model, source)
            assert str(caught.value).startswith(f"{file}: tiers.{tier}.{key}")
            assert caught.value.mistakes == tuple(str(caught.value).split("\n"))
    file = yaml_file(tmp_path / "mine.yaml", {**good, "eviction": {"gpu": "nobody"}})
    with pytest.raises(ConfigError, match=re.escape(f"{file}: eviction.gpu: ")):
        TieredKV(model, file)
    gathered = small_config(model, tmp_path / "kv", "gathered")
    gathered["tiers"]["gpu"]["budget"] = "120KiB"
    file = yaml_file(tmp_path / "mine.yaml", gathered)
    with TieredKV(model, file) as tiered:
        message = rf"^{re.escape(str(file))}: attention: gathered assembles .* leaves room for [\d.]+KiB \("
        with pytest.raises(BudgetError, match=message):
            tiered.generate(tokens(400), max_new_tokens=1)


def test_nvme_paths_that_are_no_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    bad(tmp_path, ConfigError, "tiers.nvme.path.*file is not a folder.*Mend", nvme={"path": str(file)})
    bad(tmp_path, ConfigError, "tiers.nvme.path.*file is not a folder.*Mend", nvme={"path": str(file / "below")})
    assert file.read_text() == "mine"


POLICIES = """
from kvtier.policies.lru import LRU as Lru

class Mine(Lru):
    pass

class NamesNonsense(Lru):
    def victims(self, num_blocks, evictable):
        return [10**9, *super().victims(num_blocks, evictable)]

class Fails(Lru):
    def __init__(self):
        raise RuntimeError("no licence found")

class Lacks:
    def inserted(self, block, sequence, index): ...

def function(): ...
"""


def test_policies_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in {
        "lruu": r"no eviction policy 'lruu' \(did you mean lru\?\); known: fifo, lru, mru, recency",
        "my_policies:Missing": "my_policies:Missing cannot be imported",
        "no_such_module:Lru": "no_such_module",
        "my_policies:Fails": "no licence found",
        "my_policies:Lacks": "is no eviction policy: it lacks touched, removed, victims",
        "my_policies:function": "not a class",
        "next_layers": "is no eviction policy",
    }.items():
        bad(tmp_path, ConfigError, f"eviction.cpu: .*{message}", eviction={"cpu": name})
    bad(tmp_path, ConfigError, "prefetch.policy: .*lruu", prefetch={"policy": "lruu"})
    bad(tmp_path, ConfigError, "prefetch.policy: .*depth", prefetch={"policy": "no_prefetch", "depth": 3})
    model, (turn,) = tiny(), plain_turns(tiny(), turns=1)
    for name in ("Mine", "NamesNonsense"):
        own = f"my_policies:{name}"
        with TieredKV(model, small_config(model, tmp_path, eviction={"gpu": own, "cpu": own, "nvme": own})) as tiered:
            assert_same(tiered.generate(turn[0], **GREEDY), turn[1], "blockwise")
            tiered.check_integrity()
