"""Which sessions the plain model checks, and the check itself, which may be interrupted and go on later."""

from __future__ import annotations

import random
from collections.abc import Callable

from rich.console import Console

from kvtier.benchmarks.conversations import Run
from kvtier.benchmarks.monitor import bar
from kvtier.benchmarks.verify import Verification, Verified, judge_answer, replay_tokens, verify


def prove(run: Run, chunk: int, verified: Verified, console: Console, finished: Callable[[], None]) -> bool:
    """Verify what the options ask for, adding to `verified`; True if Ctrl-C ended it early.

    Args:
        chunk: most tokens of one prefill forward, as in the tiered run.
        finished: called after each session.
    """
    facts = {conversation.plan.name: conversation.plan.facts for conversation in run.conversations}
    all_facts = [fact for own in facts.values() for fact in own]
    records = [conversation.record for conversation in run.conversations if conversation.record.turns]
    chosen = {"all": len(records), "sample": -(-len(records) // 4), "none": 0}[run.options.verify]
    picked = random.Random(run.options.seed).sample(records, chosen)
    checked = [record for record in records if record in picked]
    left = [record for record in checked if record.name not in verified.finished]
    # The first session is read twice more, for the tolerance.
    twice_more = checked[:1] * 2 if verified.plain_chunk_diff is None else []
    total = sum(replay_tokens(record) for record in [*left, *twice_more])
    try:
        with bar(console, "Verifying with the plain model", max(total, 1)) as advance:
            verify(
                run.loaded.model,
                checked,
                chunk=chunk,
                tokenizer=run.loaded.tokenizer,
                all_facts=all_facts,
                own_facts=facts.__getitem__,
                result=verified,
                advance=advance,
                finished=finished,
            )
    except KeyboardInterrupt:
        return True
    for record in records:
        if record not in checked:
            own = verified.sessions[record.name] = Verification()
            foreign = [fact.value for fact in all_facts if fact not in facts[record.name]]
            for turn in record.turns:
                if turn.fact:
                    answer = run.loaded.tokenizer.decode(list(turn.answer))
                    judge_answer(own, turn.fact, answer, foreign, None)
    return False
