"""`kvtier sessions`: the conversations in an nvme folder, without a model: list, show, delete, export, import.

Shows names with escapes, and never what was said: `show --tokens` prints ids.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.errors import ConfigError
from kvtier.fsck_words import ago, counted, iso, shown_name
from kvtier.session_record import salt_digest
from kvtier.size import size_words
from kvtier.terminal import page_console, print_table, printable

if TYPE_CHECKING:
    from kvtier.folder_session import FolderSession
    from kvtier.session_folder import SessionFolder

app = typer.Typer(no_args_is_help=True, help="The conversations in an nvme folder: list, show, delete, export, import.")

_SHORT_DIGITS = 12
_PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="What tiers.nvme.path says, or the folder kv in it.")
]
_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The session's.")]
_KeyOption = Annotated[
    str, typer.Option(metavar="DIGITS", help="Of several sessions of that name: the first digits of one's key.")
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.command("list")
def list_(path: _PathArgument, json_: _JsonOption = False) -> None:
    """Name the sessions in a folder, last used first. Writes nothing; the folder may be in use."""
    from kvtier.session_folder import SessionFolder  # numpy: not for the other commands to wait for

    with SessionFolder(path) as folder:
        now_s = time.time()
        documents = [_document(each, now_s) for each in folder.sessions]
        if json_:
            document = {
                "path": str(folder.path),
                "in_use_by": folder.owner,
                "sessions": documents,
                "unusable": folder.num_unusable,
            }
            _print_json(document)
            return
        console = page_console()
        if documents:
            print_table(_table(folder.sessions, now_s), console)
        else:
            _say(console, f"no sessions in {folder.path}")
        _notices(console, folder)


@app.command()
def show(
    path: _PathArgument,
    name: _NameArgument,
    key: _KeyOption = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print its token ids too.")] = False,
    json_: _JsonOption = False,
) -> None:
    """Tell all of one session but what was said. Writes nothing; the folder may be in use."""
    from kvtier.session_folder import SessionFolder

    with SessionFolder(path) as folder:
        session = folder.find(name, key)
        document = _document(session, time.time())
        document["missing_blocks"] = [number for number, places in enumerate(session.places) if not places]
        if tokens:
            document["token_ids"] = session.record.token_ids.tolist()
        if json_:
            _print_json(document)
            return
        console = page_console()
        for field, value in document.items():
            words = "-" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
            _say(console, f"{field:<17} {words or '-'}")
        _notices(console, folder)


@app.command()
def delete(
    path: _PathArgument,
    name: _NameArgument,
    key: _KeyOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a session: its record, and those of its blocks that no other session has. Nobody may use the folder."""
    from kvtier.session_folder import SessionFolder

    with SessionFolder(path, owned=True) as folder:
        session = folder.find(name, key)
        what = f"session {printable(name)} of {counted(len(session.record.token_ids), 'token')}"
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"{what}: nobody is there to be asked; give --yes to delete it")
            typer.confirm(f"delete {what}?", abort=True, err=True)
        num_erased = folder.delete(session)
    shared = session.num_found - num_erased
    kept = f", {counted(shared, 'block')} of other sessions too kept" if shared else ""
    _say(page_console(), f"deleted: {what}, {counted(num_erased, 'block')} erased{kept}")


@app.command()
def export(
    path: _PathArgument,
    name: _NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To be made; it holds what can be made out as text.")],
    key: _KeyOption = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Where blocks are missing: those before them.")] = False,
) -> None:
    """Write a session to a file that another folder or machine can take in. The folder may be in use."""
    from kvtier.session_export import export_session
    from kvtier.session_folder import SessionFolder

    with SessionFolder(path) as folder:
        session = folder.find(name, key)
        num_tokens, num_bytes = export_session(folder, session, file, overwrite=overwrite, partial=partial)
    _say(
        page_console(),
        f"exported: session {printable(name)}, {counted(num_tokens, 'token')}, {size_words(num_bytes)} to {file}",
    )


@app.command("import")
def import_(
    path: _PathArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An exported session, from somebody you trust.")],
    name: Annotated[str | None, typer.Option(help="Another name than the one it was exported under.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="As tiers.nvme.budget. Without it the folder's files do not grow."),
    ] = None,
    max_writes: Annotated[
        str | None, typer.Option(metavar="RATE", help="As tiers.nvme.max_writes, where the config has it.")
    ] = None,
) -> None:
    """Take an exported session into a folder that its model has used. Nobody may use the folder."""
    from kvtier.rate import Rate
    from kvtier.session_import import import_session
    from kvtier.size import Size, SizeUnit

    budget_bytes, limit = None, None
    try:
        if budget is not None:
            size = Size.parse(budget)
            if size.unit is not SizeUnit.BYTES:
                raise ValueError("is a percentage: give bytes, such as 64GiB")
            budget_bytes = int(size.amount)
    except ValueError as error:
        raise ConfigError(f"--budget {budget} {error}") from None
    try:
        limit = None if max_writes is None else Rate.parse(max_writes)
    except ValueError as error:
        raise ConfigError(f"--max-writes {max_writes} {error}") from None
    if name is not None and not name.isprintable():
        raise ConfigError(f"--name {printable(name)}: a session's name is any printable text")
    done = import_session(path, file, name=name, budget_bytes=budget_bytes, max_writes=limit)
    shared = f", {done.num_shared} were there" if done.num_shared else ""
    _say(
        page_console(),
        f"imported: session {printable(done.name)}, {counted(done.num_tokens, 'token')}, "
        f"{counted(done.num_written, 'block')} written{shared}; budget {size_words(done.budget_bytes)}",
    )


def _document(session: FolderSession, now_s: float) -> dict[str, Any]:
    record = session.record
    return {
        "name": printable(record.name),
        "key": record.key().hex(),
        "namespace": record.namespace.hex(),
        "salted": record.salt != salt_digest(b""),
        "tokens": len(record.token_ids),
        "block_tokens": record.block_tokens,
        "blocks": len(session.labels),
        "blocks_found": session.num_found,
        "resumable_tokens": session.num_resumable,
        "bytes": session.used_bytes,
        "created": iso(record.created_s),
        "last_used": iso(record.used_s),
        "ttl_s": None if math.isinf(record.ttl_s) else record.ttl_s,
        "pinned": record.is_pinned,
        "expired": record.is_expired(now_s),
    }


def _table(sessions: list[FolderSession], now_s: float) -> Table:
    table = Table("session", box=None, pad_edge=False)
    heads = ("resumable\ntokens", "blocks\nfound", "bytes", "last used", "kept", "namespace")
    for head in heads:
        table.add_column(head, no_wrap=head in (heads[0], "bytes", "namespace"))
    names = [each.record.name for each in sessions]
    for each in sessions:
        record = each.record
        name = shown_name(record.name) + (" (salted)" if record.salt != salt_digest(b"") else "")
        if names.count(record.name) > 1:
            name += f" (key {record.key().hex()[:_SHORT_DIGITS]})"
        kept = "pinned" if record.is_pinned else "expired" if record.is_expired(now_s) else _ttl(record.ttl_s)
        found = f"{each.num_found} of {len(each.labels)}"
        tokens = f"{each.num_resumable} of {len(record.token_ids)}"
        row = (name, tokens, found, size_words(each.used_bytes), ago(record.used_s, now_s), kept)
        table.add_row(*(Text(cell) for cell in (*row, record.namespace.hex()[:_SHORT_DIGITS])))
    return table


def _ttl(ttl_s: float) -> str:
    if math.isinf(ttl_s):
        return ""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if ttl_s >= 2 * unit_s:
            return f"{ttl_s / unit_s:.0f} {unit} unused"
    return f"{ttl_s:.0f} s unused"


def _notices(console: Console, folder: SessionFolder) -> None:
    if folder.num_unusable:
        _say(console, f"{counted(folder.num_unusable, 'record')} cannot be used: `kvtier fsck` names them")
    if folder.owner is not None:
        _say(console, f"in use by process {folder.owner}: what it does meanwhile may be missing here")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, soft_wrap=True)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
