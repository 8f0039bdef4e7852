"""What happens inside, beside and against a step: nothing of it may give wrong tokens or leave anything behind."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import ClosedError, KVTierError, UnsupportedError
from tests.e2e.families import FAMILIES, MODES, small_config, tiny_from, tokens

IDS = tokens(420, 3)


@pytest.fixture
def model() -> Any:
    return tiny_from(FAMILIES["llama"][0], **FAMILIES["llama"][1])


@pytest.fixture(params=MODES)
def tiered(request: pytest.FixtureRequest, model: Any, tmp_path: Path) -> Iterator[TieredKV]:
    """Around a model of its own: these tests change it."""
    with TieredKV(model, small_config(model, tmp_path, request.param)) as wrapper, torch.no_grad():
        yield wrapper


@pytest.fixture
def expected(model: Any) -> torch.Tensor:
    """The plain model's logits of every token."""
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


def check(logits: torch.Tensor, expected: torch.Tensor, first: int) -> None:
    assert (logits - expected[:, first : first + logits.shape[1]]).abs().max() < 1e-4


def test_stats_from_a_hook_move_nothing_under_the_step(tiered: TieredKV, model: Any, expected: torch.Tensor) -> None:
    cache, others = tiered.new_cache(), [tiered.new_cache() for _ in range(2)]
    hook = model.model.layers[1].register_forward_hook(lambda *_: tiered.stats() and None)
    for start in range(0, 400, 50):
        check(tiered(IDS[:, start : start + 50], cache=cache).logits, expected, start)
        tiered(IDS[:, start : start + 50], cache=others[start // 50 % 2])
        check(cache_tail(tiered, cache, start + 50), expected, start + 50)
    hook.remove()
    tiered.check_integrity()


def cache_tail(tiered: TieredKV, cache: Any, length: int) -> torch.Tensor:
    """The next token's logits, and the cache as it was."""
    logits: torch.Tensor = tiered(IDS[:, length : length + 1], cache=cache).logits
    cache.crop(-1)
    return logits


def test_the_model_called_plainly_from_a_hook_is_not_part_of_the_step(
    tiered: TieredKV, model: Any, expected: torch.Tensor
) -> None:
    seen: list[torch.Tensor] = []

    def hook(*_: Any) -> None:
        if not seen:
            seen.append(torch.empty(0))
            seen[0] = model(IDS[:, :30]).logits

    handle = model.model.layers[1].register_forward_hook(hook)
    cache = tiered.new_cache()
    logits = tiered(IDS[:, :100], cache=cache).logits
    handle.remove()
    check(logits, expected, 0)
    assert torch.equal(seen[0], model(IDS[:, :30]).logits)


def test_an_inner_module_called_from_a_hook_does_not_attend_over_the_cache(tiered: TieredKV, model: Any) -> None:
    cache = tiered.new_cache()
    tiered(IDS[:, :50], cache=cache)
    handle = model.lm_head.register_forward_hook(lambda *_: model.model(IDS[:, :8]) and None)
    with pytest.raises(UnsupportedError, match="did not append"):
        tiered(IDS[:, 50:58], cache=cache)
    handle.remove()
    assert cache.get_seq_length() == 50


def test_a_step_inside_a_step_is_refused(tiered: TieredKV, model: Any, expected: torch.Tensor) -> None:
    cache, other = tiered.new_cache(), tiered.new_cache()
    handle = model.lm_head.register_forward_hook(lambda *_: tiered(IDS[:, :8], cache=other) and None)
    with pytest.raises(UnsupportedError, match="step of this TieredKV is open"):
        tiered(IDS[:, :50], cache=cache)
    handle.remove()
    check(tiered(IDS[:, :50], cache=cache).logits, expected, 0)


def test_closing_inside_a_step_is_refused_and_closes_nothing(tiered: TieredKV, model: Any) -> None:
    cache = tiered.new_cache()
    handle = model.lm_head.register_forward_hook(lambda *_: tiered.close())
    with pytest.raises(UnsupportedError, match="close"):
        tiered(IDS[:, :50], cache=cache)
    handle.remove()
    assert tiered(IDS[:, :50], cache=cache).logits.shape[1] == 50


@pytest.mark.parametrize("num_new", [1, 20])
def test_attention_that_was_changed_after_wrapping_is_noticed(tiered: TieredKV, model: Any, num_new: int) -> None:
    cache = tiered.new_cache()
    tiered(IDS[:, :50], cache=cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises((UnsupportedError, RuntimeError)):
        tiered(IDS[:, 50 : 50 + num_new], cache=cache)
    assert cache.get_seq_length() == 50
    model.set_attn_implementation("kvtier")


def test_a_wrapped_model_cannot_be_copied_or_pickled_and_a_closed_one_can(tiered: TieredKV, model: Any) -> None:
    with pytest.raises(UnsupportedError, match="close"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="close"):
        pickle.dumps(model)
    tiered.close()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_kv_of_old_weights_is_never_served(tiered: TieredKV, model: Any, change: str) -> None:
    cache = tiered.new_cache()
    tiered(IDS[:, :50], cache=cache)
    weight = model.model.layers[0].self_attn.k_proj.weight
    if change == "in place":
        weight.mul_(1.5)
    else:
        model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(weight * 1.5)
    with pytest.raises(UnsupportedError, match="weights changed"):
        tiered(IDS[:, 50:60], cache=cache)
    with pytest.raises(UnsupportedError, match="weights changed"):
        tiered(IDS[:, 50:60], cache=cache.fork())
    cache.reset()
    assert (tiered(IDS[:, :60], cache=cache).logits - model(IDS[:, :60]).logits).abs().max() < 1e-4


def test_two_threads_on_one_cache_append_one_after_the_other_or_are_refused(
    tiered: TieredKV, expected: torch.Tensor
) -> None:
    cache = tiered.new_cache()
    tiered(IDS[:, :64], cache=cache)
    for _ in range(20):
        answers: list[torch.Tensor] = []

        def work(answers: list[torch.Tensor] = answers) -> None:
            with torch.no_grad():
                try:
                    mask = torch.ones(1, 65)
                    answers.append(tiered(IDS[:, 64:65], attention_mask=mask, cache=cache).logits)
                except KVTierError:
                    pass

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 1
        check(answers[0], expected, 64)
        cache.crop(-1)
    tiered.check_integrity()


def test_close_on_another_thread_waits_for_the_running_step(
    tiered: TieredKV, model: Any, expected: torch.Tensor
) -> None:
    cache, started, answers = tiered.new_cache(), threading.Event(), []
    tiered(IDS[:, :48], cache=cache)

    def hook(*_: Any) -> None:
        started.set()
        time.sleep(0.05)

    handle = model.model.layers[0].register_forward_hook(hook)

    def work() -> None:
        with torch.no_grad():
            answers.append(tiered(IDS[:, 48:60], cache=cache).logits)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    tiered.close()
    thread.join(30)
    handle.remove()
    check(answers[0], expected, 48)
    with pytest.raises(ClosedError):
        tiered(IDS[:, 60:61], cache=cache)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_at_any_moment_leaves_every_cache_exact(tiered: TieredKV, expected: torch.Tensor) -> None:
    caches = [tiered.new_cache() for _ in range(3)]
    for number, cache in enumerate(caches):
        tiered(IDS[:, : 100 + 60 * number], cache=cache)
    hits = 0
    for attempt in range(120):
        cache = caches[attempt % 3]
        if cache.get_seq_length() > 380:
            cache.crop(-250)
        held = cache.get_seq_length()
        timer = threading.Timer(attempt * 37 % 120 * 1e-4, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            tiered(IDS[:, held : held + (1, 30)[attempt % 2]], cache=cache)
            timer.join()
            time.sleep(0.001)  # one that came late is delivered here
        except KeyboardInterrupt:
            hits += 1
        timer.join()
        held = cache.get_seq_length()
        assert cache.token_ids == IDS[0, :held].tolist()
        check(tiered(IDS[:, held : held + 3], cache=cache).logits, expected, held)
        tiered.check_integrity()
    assert hits > 60
    del caches, cache
    while tiered.stats()["blocks"]:
        time.sleep(0.001)
    tiered.check_integrity()


def test_a_forked_child_is_refused_and_takes_nothing_from_the_parent(
    tiered: TieredKV, expected: torch.Tensor, tmp_path: Path
) -> None:
    cache = tiered.new_cache()
    tiered(IDS[:, :300], cache=cache)
    child = os.fork()
    if child == 0:
        status = 3
        try:
            tiered(IDS[:, 300:301], cache=cache)
        except UnsupportedError:
            status = 0
        finally:
            tiered.close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(tiered(IDS[:, 300:310], cache=cache).logits, expected, 300)
    assert (tmp_path / "nvme" / "kv" / "lock").exists()
