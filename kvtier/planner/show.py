"""A plan for people: the formula, the tiers, the table over users, the predictions, the notes."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.bound import Bound
from kvtier.planner.bound import rows_at_once
from kvtier.planner.expected import Expected, Term
from kvtier.planner.report import Plan
from kvtier.size import size_words, speed_words
from kvtier.terminal import print_page, printable


def print_plan(plan: Plan, console: Console) -> None:
    """The whole plan."""
    print_page(_parts(plan), console)


def _parts(plan: Plan) -> Iterator[RenderableType]:
    layout, card = plan.layout, plan.layout.card
    yield Text(printable(f"{card.name}: {card.num_parameters:,} parameters ({card.dtype}), {plan.source}"))
    yield Text(printable(_device(plan)))
    yield Text(f"weights: {size_words(card.weights_bytes)}")
    yield Text(f"KV of one user with {layout.context_tokens:,} tokens:")
    for line in card.formulas(layout.context_tokens):
        yield Text(f"  {line}")
    yield Text(
        f"{plan.wishes.users:,} users: {size_words(plan.wishes.users * card.kv_bytes(layout.context_tokens))} of KV, "
        f"in blocks of {layout.shape.block_tokens} tokens, {size_words(layout.shape.block_bytes)} each, "
        f"{layout.blocks_per_user:,} a user"
    )
    yield _tiers(plan)
    yield Text(_gpu_parts(plan))
    yield _users(plan)
    without, kept = layout.max_users_without + 1, layout.max_users + 1
    tightest = layout.limits[0]
    yield Text(
        f"first count that fails without kvtier: {without:,} (weights and all KV in {size_words(layout.device_bytes)})"
    )
    yield Text(printable(f"first count that fails with kvtier: {kept:,} ({tightest.name}: {tightest.words})"))
    if plan.rates is not None and plan.first_break is None:
        yield _predictions(plan)
        yield Text(printable(f"rates: {plan.rates.source}, of the machine where the doctor measured them"))
        yield from _expectation(plan)
    for note in plan.notes:
        yield Text(printable(f"note: {note}"))
    broken = plan.first_break
    if broken is not None:
        yield Text(printable(f"{plan.wishes.users:,} users do not fit: {broken.name}"), style="bold red")


def _device(plan: Plan) -> str:
    """What this is about: nothing here is of the machine that the plan is made on, unless its rates were given."""
    kind = "a CUDA device" if plan.layout.device == "cuda" else "no CUDA device: host memory"
    memory = size_words(plan.layout.device_bytes)
    if plan.rates is None:
        by = "" if plan.device_bytes_source == "assumed" else f", its memory by {plan.device_bytes_source}"
        return f"device: {kind} of {memory}, assumed{by}; not this machine's: see the notes"
    by = "" if plan.device_bytes_source == plan.device_source else f", its memory by {plan.device_bytes_source}"
    return f"device: {kind} of {memory}, by {plan.device_source}{by}"


def _tiers(plan: Plan) -> Table:
    layout = plan.layout
    placed = layout.place(plan.wishes.users)
    table = _table(printable(f"Tiers of {plan.wishes.config}, {plan.wishes.users:,} users"))
    for name in ("tier", "budget", "blocks", "used", "KV there"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    for room in layout.rooms:
        used = placed.blocks[room.tier]
        table.add_row(
            room.tier.label,
            size_words(room.budget_bytes),
            f"{room.num_slots:,}",
            f"{used:,}",
            size_words(used * layout.shape.block_bytes),
        )
    if placed.missing:
        table.add_row("none", "", "", f"{placed.missing:,}", size_words(placed.missing * layout.shape.block_bytes))
    return table


def _gpu_parts(plan: Plan) -> str:
    gpu = plan.layout.gpu
    if gpu is None:
        return "the gpu budget is below its minimum\n"
    parts = {
        f"ring of {gpu.ring_slices} slices": gpu.ring_slices * gpu.slice_bytes,
        f"scratch for chunks of {gpu.max_chunk} tokens": gpu.scratch_bytes,
        "gathered layer": gpu.gather_bytes,
        "layers that are not tiered": gpu.untiered_bytes,
    }
    words = ", ".join(f"{name} {size_words(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    return f"of the gpu budget: {words}\n"


def _users(plan: Plan) -> Table:
    layout = plan.layout
    table = _table("Users")
    heads = ["users", "weights", "KV", "free\nwithout", "with\nkvtier"]
    if plan.rates is not None:
        heads += ["tokens\n/s*", "/s of\na user*", "first\ntoken*"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in plan.rows:
        free = plan.free_without(row.users)
        cells = [
            f"{row.users:,}",
            size_words(layout.card.weights_bytes),
            size_words(row.users * layout.card.kv_bytes(layout.context_tokens)),
            size_words(free),
            "fits" if row.limit is None else "fails",
        ]
        if plan.rates is not None:
            cells += _figures(row.decode, row.first_token, row.users)
        table.add_row(*cells)
    table.caption = "free without: what the device has beside weights and all KV, without kvtier; below 0 it fails"
    if plan.rates is not None:
        table.caption += "\n*: predictions"
    return table


def _figures(decode: Bound | None, first: Bound | None, users: int) -> list[str]:
    seconds = None if decode is None else decode.seconds
    start = None if first is None else first.seconds
    speeds = ["–", "–"] if seconds is None else [f"{users / seconds:,.4g}", f"{1 / seconds:,.3g}"]
    return [*speeds, "–" if start is None else f"{start:,.3g} s"]


def _predictions(plan: Plan) -> Table:
    users, row = plan.wishes.users, plan.rows[-1]
    table = _table(f"Predicted for {users:,} users: nothing here was run")
    for name in ("what", "edge", "to do", "rate", "time"):
        table.add_column(name, justify="left" if name in ("what", "edge") else "right", no_wrap=True)
    for what, bound in (("decode", row.decode), ("1st token", row.first_token)):
        if bound is None:
            continue
        for edge in bound.edges:
            counts = edge.name == "compute"
            table.add_row(
                what,
                edge.name + ": binds" * (edge.name == bound.binding),
                _flop(edge.amount) if counts else size_words(int(edge.amount)),
                "not measured" if edge.per_s is None else _per_s(edge.per_s, counts),
                "–" if edge.seconds is None else _time(edge.seconds),
            )
            what = ""
        table.add_section()
    for term, beside in _terms(row.expected):
        name = f"{term.name}{' (beside)' * beside}"
        table.add_row("expected", name, "", "", _time(term.seconds or 0.0))
    table.caption = (
        f"decode: a token for each user, {rows_at_once(plan.layout, users):,} a step; 1st token: of one user, of "
        "whose context nothing is found"
    )
    return table


def _flop(amount: float) -> str:
    return f"{amount / 1e9:,.4g} GFLOP" if amount < 1e13 else f"{amount / 1e12:,.4g} TFLOP"


def _per_s(rate: float, counts_flop: bool) -> str:
    return f"{_flop(rate)}/s" if counts_flop else speed_words(rate)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _terms(expected: Expected | None) -> Iterator[tuple[Term, bool]]:
    """Those that take time, and whether they go on beside the computing; none where one is not known."""
    if expected is None or expected.seconds is None:
        return
    for terms, beside in ((expected.computing, False), (expected.beside, True)):
        yield from ((term, beside) for term in terms if term.seconds)


def _expectation(plan: Plan) -> Iterator[Text]:
    row = plan.rows[-1]
    bound, expected = row.decode, row.expected
    if expected is None or expected.seconds is None or bound is None or bound.seconds is None:
        return
    yield Text(
        f"expected: {row.users / expected.seconds:,.4g} tokens/s, {expected.seconds * 1e3:,.4g} ms a round; no run "
        f"beats the bound of {bound.seconds * 1e3:,.4g} ms\n"
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
