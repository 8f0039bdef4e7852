"""Prompts that begin alike: a system prompt with many questions, and a chat that sends its whole transcript each turn.

- `questions`: `--system` tokens that 20 different questions begin with. Ways: `plain` computes all of it each time;
  `copied cache` is what transformers recommends, a DynamicCache that holds the system prompt, deep-copied for each
  question; `kvtier` is `tiered.generate`, told nothing of what the prompts share, with blocks of 256 and of 64 tokens.
- `chat`: `--turns` turns, each the whole transcript so far with one more question. Ways: `plain`; `kept cache`, one
  DynamicCache that the caller keeps and passes on; `kvtier`, which is told nothing.

The ways take turns, each in its own place of the order every time. Times are of a whole call with 8 new tokens (24 in
the chat), and medians leave the first call out, which has nothing to find: it is shown apart. What is computed is
counted, not timed: from the second turn on a chat on kvtier may compute its new tokens and at most one block; the
document says so in `only_new_computed`, and where that is false the exit status is 1.

Run as `python -m kvtier.benchmarks.prefix`. Cost: about 6 minutes (one thread, SmolLM2); `--quick` one.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.command import encode, fill, finish, parse
from kvtier.benchmarks.documents import load_text, make_session_plan
from kvtier.benchmarks.models import LoadedModel, load_model, twin
from kvtier.benchmarks.spent import Spent, spent
from kvtier.hf import cache_keyword, describe

BLOCKS = (256, 64)
NUM_ANSWERED, NUM_CHAT_ANSWERED = 8, 24


class Way:
    """One way to answer prompts: what each call took, and what of it had to be computed."""

    def __init__(self, name: str, generate: Callable[..., Any], num_computed: Callable[[], int], block_tokens: int = 0):
        """`num_computed`: tokens that were computed so far, in all."""
        self.name, self.block_tokens = name, block_tokens
        self._generate, self._num_computed = generate, num_computed
        self.calls: list[Spent] = []
        self.computed: list[int] = []
        """Tokens of each prompt that were computed; those of the answer are the same for all."""

    def ask(self, ids: Sequence[int], num_new: int) -> list[int]:
        """Prompt and answer."""
        before = self._num_computed()
        call = spent(self._generate, torch.tensor([list(ids)]), num_new)
        self.calls.append(call)
        # Of the answer all but the last token were computed.
        self.computed.append(self._num_computed() - before - (len(call.sequence) - len(ids) - 1))
        return list(call.sequence)


class _Counting:
    """Counts the tokens that the plain model's forwards compute."""

    def __init__(self, model: Any) -> None:
        self.num_tokens = 0
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.num_tokens += ids.shape[1]

    def close(self) -> None:
        self._handle.remove()


def _kvtier_way(stack: ExitStack, model: Any, block_tokens: int, room_tokens: int) -> Way:
    """On the gpu tier alone, with room for everything."""
    config = {"block_tokens": block_tokens, "prefill_chunk": 512, "prefix_cache": True}
    token_bytes = describe(model, block_tokens).shape.token_bytes
    own = twin(model)  # which has the same weights: several wrappers cannot have one model
    tiers = {"gpu": {"budget": 2 * room_tokens * token_bytes + (256 << 20)}}
    tiered = stack.enter_context(TieredKV(own, {**config, "tiers": tiers}))
    name = f"kvtier, blocks of {block_tokens}"
    return Way(name, tiered.generate, lambda: int(tiered.stats()["tokens"]), block_tokens)


def _plain_ways(stack: ExitStack, model: Any, second: tuple[str, Callable[..., Any]]) -> list[Way]:
    """After those of kvtier: twins would take over the hook, under which nothing is found."""
    counting = _Counting(model)
    stack.callback(counting.close)
    return [Way(name, generate, lambda: counting.num_tokens) for name, generate in (("plain", model.generate), second)]


def questions(loaded: LoadedModel, num_system: int, num_questions: int) -> dict[str, Any]:
    """The part `questions` of the document."""
    from transformers import DynamicCache

    model, keyword = loaded.model, cache_keyword(loaded.model.forward)
    system = encode(loaded, num_system)[0].tolist()
    prompts = [system + ids for ids in ask_about_topics(loaded, num_questions)]
    filled = DynamicCache(config=model.config)

    def on_a_copy(ids: torch.Tensor, **kwargs: Any) -> Any:
        if not filled.get_seq_length():
            with torch.no_grad():
                model(ids[:, :num_system], **{keyword: filled}, use_cache=True, logits_to_keep=1)
        return model.generate(ids, **{keyword: copy.deepcopy(filled)}, **kwargs)

    room = num_system + num_questions * (len(max(prompts, key=len)) - num_system + NUM_ANSWERED + max(BLOCKS))
    with ExitStack() as stack:
        ours = [_kvtier_way(stack, model, each, room) for each in BLOCKS]
        ways = [*_plain_ways(stack, model, ("copied cache", on_a_copy)), *ours]
        for number, prompt in enumerate(prompts):
            for way in _in_turn(ways, number):
                way.ask(prompt, NUM_ANSWERED)
        rows = [to_row(way, ways[0]) for way in ways]
    return {"system_tokens": num_system, "questions": num_questions, "rows": rows}


def ask_about_topics(loaded: LoadedModel, num_questions: int) -> list[list[int]]:
    """The ids of so many different questions about Python."""
    from pydoc_data.topics import topics

    texts = (f"\n\nQuestion: What is said about {name}?\nAnswer:" for name in sorted(topics)[:num_questions])
    return [list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def chat(loaded: LoadedModel, num_context: int, num_turns: int) -> dict[str, Any]:
    """The part `chat` of the document: each way goes on with its own answers."""
    from transformers import DynamicCache

    model, keyword = loaded.model, cache_keyword(loaded.model.forward)
    plan = make_session_plan(
        loaded.tokenizer, load_text(None), index=0, seed=0, context_tokens=num_context, num_turns=num_turns
    )
    kept = DynamicCache(config=model.config)

    def on_the_same(ids: torch.Tensor, **kwargs: Any) -> Any:
        return model.generate(ids, **{keyword: kept}, **kwargs)

    num_asked = sum(len(turn.ids) + len(plan.closing_ids) for turn in plan.turns)
    with ExitStack() as stack:
        room = num_asked + num_turns * NUM_CHAT_ANSWERED + max(BLOCKS)
        ours = [_kvtier_way(stack, model, each, room) for each in BLOCKS]
        ways = [*_plain_ways(stack, model, ("kept cache", on_the_same)), *ours]
        transcripts: dict[str, list[int]] = {way.name: [] for way in ways}
        new: dict[str, list[int]] = {way.name: [] for way in ways}
        for turn in range(num_turns):
            for way in _in_turn(ways, turn):
                before = transcripts[way.name]
                ids = plan.continued(before, turn)
                new[way.name].append(len(ids) - len(before))
                transcripts[way.name] = way.ask(ids, NUM_CHAT_ANSWERED)
        rows = [
            to_row(way, ways[0]) | {"new_tokens": new[way.name], "only_new_computed": only_new(way, new[way.name])}
            for way in ways
        ]
    return {"context_tokens": num_context, "turns": num_turns, "rows": rows}


def only_new(way: Way, num_new: Sequence[int]) -> bool:
    """Whether from the second call on nothing was computed but new tokens and at most one block.

    `num_new`: tokens of each prompt that neither the prompt before nor its answer had. For ways without blocks one
    token stands for the block: the answer's last, which nobody has computed yet.
    """
    most = max(1, way.block_tokens)
    return all(computed <= new + most for computed, new in list(zip(way.computed, num_new, strict=True))[1:])


def _in_turn(ways: list[Way], number: int) -> list[Way]:
    """Nobody always follows the same one."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


def to_row(way: Way, plain: Way) -> dict[str, Any]:
    """Medians leave the first call out. Ratios are of each call to the plain model's of the same prompt."""
    later = list(zip(way.calls, plain.calls, strict=True))[1:]
    return {
        "way": way.name,
        "block_tokens": way.block_tokens,
        "first_call_s": way.calls[0].seconds,
        "seconds": statistics.median(call.seconds for call, _ in later),
        "first_token_s": statistics.median(call.first_token_s for call, _ in later),
        "cpu_seconds": statistics.median(call.cpu_seconds for call, _ in later),
        "ratio_to_plain": statistics.median(base.seconds / call.seconds for call, base in later),
        "first_token_ratio_to_plain": statistics.median(
            base.first_token_s / call.first_token_s for call, base in later
        ),
        "cpu_ratio_to_plain": statistics.median(base.cpu_seconds / call.cpu_seconds for call, base in later),
        "total_s": sum(call.seconds for call in way.calls),
        "computed": way.computed,
        "same_answers": sum(call.sequence == base.sequence for call, base in zip(way.calls, plain.calls, strict=True)),
        "calls": len(way.calls),
    }


def tables(document: dict[str, Any]) -> list[Table]:
    """Both parts for people."""
    asked, chatted = document["questions"], document["chat"]
    titles = {
        "questions": f"{asked['questions']} questions on {asked['system_tokens']:,} tokens",
        "chat": f"{chatted['turns']} turns, the whole transcript each time, from {chatted['context_tokens']:,} tokens",
    }
    made = []
    for part, title in titles.items():
        rows = [
            (
                row["way"],
                f"{row['first_call_s']:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['first_token_s']:.2f}",
                f"{row['ratio_to_plain']:.1f}",
                f"{row['first_token_ratio_to_plain']:.1f}",
                f"{row['cpu_ratio_to_plain']:.1f}",
                f"{row['computed'][0]:,} + {sum(row['computed'][1:]):,}",
                f"{row['same_answers']} of {row['calls']}",
                "" if row.get("only_new_computed", True) or not row["block_tokens"] else "MORE THAN NEW TOKENS",
            )
            for row in document[part]["rows"]
        ]
        columns = ("way", "first call s", "then s", "to 1st token s", "times faster", "to 1st token", "cpu times",
                   "prompt tokens computed", "same answers", "")  # fmt: skip
        made.append(fill(Table(title=f"{document['model']}: {title}"), columns, rows))
    return made


def main() -> int:
    """Measure, print two tables, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", type=int, default=1000, help="tokens of the shared system prompt")
    parser.add_argument("--questions", type=int, default=20, help="at least 6")
    parser.add_argument("--context", type=int, default=600, help="tokens of the chat's document")
    parser.add_argument("--turns", type=int, default=8, help="at least 6")
    parser.add_argument("--quick", action="store_true", help="300 tokens, 6 questions, 6 turns")
    options = parse(parser)
    if options.quick:
        options.system, options.questions, options.context, options.turns = 300, 6, 200, 6
    if min(options.questions, options.turns) < 6:
        parser.error("--questions, --turns: a median of fewer than 5 beside the first one is noise")
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    with console.status("questions"):
        asked = questions(loaded, options.system, options.questions)
    with console.status("chat"):
        chatted = chat(loaded, options.context, options.turns)
    holds = all(row["only_new_computed"] for row in chatted["rows"] if row["block_tokens"])
    document = {"benchmark": "prefix", "model": loaded.name, "questions": asked, "chat": chatted}
    document["only_new_computed"] = holds
    finish(document, tables(document), options, load_before)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
