"""`kvtier chat`: lines in, answers out, and after each turn what was reused, what was computed, how long it took."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvtier.errors import ConfigError, FolderInUseError, KVTierError
from kvtier.fsck_words import counted
from kvtier.size import size_words
from kvtier.terminal import printable

if TYPE_CHECKING:
    from kvtier.chat import Chat, Turn
    from kvtier.model import TieredKV

HELP = """\
  /file PATH   put a text file in front of the next question
  /history     the conversation so far, as the model sees it
  /reset       delete the conversation, on disk too, and begin anew
  /sessions    the conversations of this folder (and salt)
  /stats       what lies on which tier
  /quit        leave; so does Ctrl-D. Ctrl-C ends an answer"""
_MAX_FILE_BYTES = 4 << 20


class _CtrlC(KeyboardInterrupt):
    """SIGINT. A SIGTERM is a KeyboardInterrupt too, but that one is not to be lived through."""


class _Interrupts:
    """Ctrl-C while a chat runs: it ends an answer that has begun after its next token, else what is going on."""

    def __init__(self) -> None:
        self.may_stop = self._is_wanted = False

    def stop(self) -> bool:
        """Whether the answer is to end here."""
        return self._is_wanted

    def begin(self) -> None:
        """A turn begins: until there is something to keep, Ctrl-C drops it."""
        self.may_stop = self._is_wanted = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.may_stop or self._is_wanted:  # twice: it hangs
            raise _CtrlC
        self._is_wanted = True

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, SIGINT is handled so."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def chat(
    session: Annotated[str, typer.Option(metavar="NAME", help="Of the conversation; the next run goes on with it.")],
    model: Annotated[str | None, typer.Option(help="A local model folder; the demo's SmolLM2 otherwise.")] = None,
    config: Annotated[str, typer.Option(help="A preset's name, or the path of a YAML file.")] = "chat",
    salt: Annotated[str, typer.Option(help="Whose it is: another salt has other conversations.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 256,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads; as torch chooses otherwise.")] = None,
) -> None:
    """Talk to a model, and see what was not computed again. /help lists what can be typed."""
    # Loading a model is the benchmarks', which stand above the library: looked up when asked for.
    models: Any = importlib.import_module("kvtier.benchmarks.models")
    with Console(stderr=True).status("Loading …"):
        loaded = models.load_model(model)
        import torch

        from kvtier import TieredKV
        from kvtier.chat import Chat

        if threads is not None:
            torch.set_num_threads(threads)
    interrupts = _Interrupts()
    with _wrapped(TieredKV, loaded.model, config) as tiered:
        talk = Chat(tiered, loaded.tokenizer, session, salt=salt, max_new_tokens=max_new_tokens)
        with interrupts.caught():
            _Talk(tiered, talk, salt, interrupts).run(loaded.name)


def _wrapped(wrap: type[TieredKV], model: Any, config: str) -> TieredKV:
    """As `wrap`; of a folder in use says what helps here: two chats may well want the same preset's."""
    try:
        return wrap(model, config)
    except FolderInUseError as error:
        raise FolderInUseError(
            error.fact,
            "end that one first if it is another kvtier chat, or give --config with a YAML file that has a "
            "tiers.nvme.path of its own; `kvtier sessions list` and show work meanwhile",
        ) from None


_ALONE = frozenset({"/help", "/quit", "/exit", "/history", "/reset", "/sessions", "/stats"})


class _Talk:
    """The loop."""

    def __init__(self, tiered: TieredKV, chat: Chat, salt: str, interrupts: _Interrupts) -> None:
        self._tiered, self._chat, self._salt, self._interrupts = tiered, chat, salt, interrupts
        self._text = ""
        """Of a file, for the next question."""

    def run(self, model: str) -> None:
        """Until there are no more lines, or one says so."""
        name, num_tokens = self._chat.name, self._chat.num_tokens
        held = f"{counted(num_tokens, 'token')} from an earlier run" if num_tokens else "new"
        _say(f"{model}, session {name}: {held}. /help lists what can be typed.")
        if self._tiered.config.tiers.nvme is None or self._tiered.config.tiers.nvme.path is None:
            _say("The config has no tiers.nvme.path: nothing of this is kept.")
        while (line := self._line()) is not None:
            words = line.strip()
            if words in ("/quit", "/exit"):
                return
            try:
                if words.startswith("/"):
                    self._command(*words.partition(" ")[::2])
                elif words:
                    self._turn(words)
            except KVTierError as error:  # the conversation is what it was before
                _say(f"kvtier: {' '.join(str(error).split())}")

    def _line(self) -> str | None:
        if sys.stdin is None:  # it was closed before this began
            return None
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                if is_terminal:
                    return input("> ")
                line = sys.stdin.readline()
                if not line:
                    return None
                line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no text
                _say(f"> {line.rstrip()}")  # a transcript of what was piped in reads like one that was typed
                return line
            except EOFError:
                _say("")
                return None
            except UnicodeDecodeError:
                _say("kvtier: that line is not text in the terminal's encoding")
            except _CtrlC:
                _say("\nCtrl-D or /quit leaves")

    def _turn(self, words: str) -> None:
        interrupts, text = self._interrupts, f"{self._text}\n\n{words}" if self._text else words
        interrupts.begin()

        def show(piece: str) -> None:
            interrupts.may_stop = True
            _write(piece)

        try:
            turn = self._chat.ask(text, show, interrupts.stop)
        except _CtrlC:
            _say("\nstopped; the turn is dropped")
            return
        finally:
            interrupts.begin()
        self._text = ""
        _say("")
        _say(told(turn))

    def _command(self, name: str, rest: str) -> None:
        if rest.strip() and name in _ALONE:
            _say(f"{name} stands alone in its line; nothing was done")
        elif name == "/help":
            _say(HELP)
        elif name == "/file":
            self._take_file(rest.strip())
        elif name == "/history":
            _say(self._chat.history() or "nothing yet")
        elif name == "/reset":
            self._chat.reset()
            _say(f"the conversation {self._chat.name} was deleted")
        elif name == "/sessions":
            for info in self._tiered.sessions(salt=self._salt):
                _say(f"  {info.name}: {counted(info.tokens, 'token')}, used {info.age_s:.0f} s ago")
        elif name == "/stats":
            for tier, values in self._tiered.stats()["tiers"].items():
                _say(f"  {tier}: {size_words(values['used_bytes'])} of {size_words(values['budget_bytes'])}")
        else:
            _say(f"{name} is not known; /help lists what is")

    def _take_file(self, path: str) -> None:
        if not path:
            raise ConfigError("/file: give the path of a text file behind it")
        try:
            with open(os.path.expanduser(path), encoding="utf-8", errors="replace") as file:
                text = file.read(_MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(f"/file {path}: {getattr(error, 'strerror', None) or error}") from error
        self._text = text
        _say(f"{len(text):,} characters, in front of the next question")


def told(turn: Turn) -> str:
    """A turn's cost, in a line."""
    reused = sum(turn.reused.values())
    tiers = " + ".join(f"{count} from {tier}" for tier, count in turn.reused.items() if count)
    whence = f" ({tiers})" if tiers else ""
    cut = ", cut short" if turn.is_cut else ""
    return (
        f"[{turn.prompt_tokens} tokens: {reused} reused{whence}, {turn.computed} computed · "
        f"first token {turn.first_token_s:.2f} s, {counted(turn.new_tokens, 'token')} in {turn.total_s:.2f} s{cut}]"
    )


def _write(text: str) -> None:
    sys.stdout.write("\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n")))
    sys.stdout.flush()


def _say(text: str) -> None:
    _write(text + "\n")
