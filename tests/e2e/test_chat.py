"""`kvtier chat`: what was said is reused to the token, in the next run too, and the line after it is true."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvtier import TieredKV, cli, cli_chat
from kvtier.benchmarks import models
from kvtier.chat import Chat, Turn
from kvtier.errors import KVTierError, UnsupportedError
from tests.e2e.families import small_config, tiny


class Bytes:
    """A token a byte, with a chat template like ChatML."""

    chat_template = "toy"
    eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens, "the template has its own"
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        words = "[system: be brief]\n" + "".join(f"<{each['role']}>{each['content']}</>\n" for each in messages)
        return words + ("<assistant>" if add_generation_prompt else "")


HEAD, NEXT, CLOSING = "[system: be brief]\n<user>", "<user>", "</>\n"


def turn_text(words: str) -> str:
    return f"{words}</>\n<assistant>"


def config_at(folder: Path) -> dict[str, Any]:
    return small_config(tiny(), folder, nvme="4MiB", prefix_cache=True)


def plain(ids: list[int], num_tokens: int) -> list[int]:
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    out: torch.Tensor = tiny().generate(prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    return out[0].tolist()[len(ids) :]


def said(chat: Chat, words: str) -> tuple[str, Turn]:
    pieces: list[str] = []
    turn = chat.ask(words, pieces.append)
    return "".join(pieces), turn


def test_each_turn_computes_what_is_new_and_the_next_run_goes_on(tmp_path: Path) -> None:
    config, transcript = config_at(tmp_path), b""
    runs = (("Hello!", "And then?"), ("Where were we?", "I see."))
    for run, questions in enumerate(runs):
        with TieredKV(tiny(), config) as tiered:
            chat = Chat(tiered, Bytes(), "alice", max_new_tokens=9)
            assert chat.num_tokens == len(transcript) and chat.history() == transcript.decode(errors="replace")
            for number, words in enumerate(questions):
                asked = ((NEXT if transcript else HEAD) + turn_text(words)).encode()
                answer = bytes(plain([*transcript, *asked], 9))
                text, turn = said(chat, words)
                assert text == answer.decode(errors="replace"), "the plain model's, of the very same ids"
                assert turn.prompt_tokens == len(transcript) + len(asked) and turn.new_tokens == 9 and turn.is_cut
                # All before was held, the last token's KV too: a cut answer is finished when it is cut.
                assert turn.computed == len(asked) and sum(turn.reused.values()) == len(transcript)
                assert 0 <= turn.first_token_s <= turn.total_s
                if run and not number:
                    assert turn.reused["nvme"] == len(transcript)
                transcript += asked + answer + CLOSING.encode()
            tiered.check_integrity()


def test_an_answer_that_the_model_ends_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token has no KV yet, so the next run does not find it: it is put back with the rest of what ends it."""
    asked = list((HEAD + turn_text("Hello!")).encode())
    free = plain(asked, 9)
    at = next(n for n in range(3, 9) if free[n] not in free[:n])
    end, answer = free[at], free[: at + 1]
    monkeypatch.setattr(tiny().generation_config, "eos_token_id", end)

    class Ending(Bytes):
        """Its template ends an answer, and nothing else, with the model's own token."""

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            text = super().apply_chat_template(messages, tokenize, False)
            for each in messages:
                if each["role"] == "assistant":
                    text = text.replace(f"<assistant>{each['content']}</>", f"<assistant>{each['content']}\x02")
            return text + ("<assistant>" if add_generation_prompt else "")

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [end if each == 2 else each for each in text.encode()]}

    config = config_at(tmp_path)
    with TieredKV(tiny(), config) as tiered:
        chat = Chat(tiered, Ending(), "alice", max_new_tokens=9)
        text, turn = said(chat, "Hello!")
        assert not turn.is_cut and turn.new_tokens == len(answer)
        assert text == bytes(answer[:-1]).decode(errors="replace")
        question = list((NEXT + turn_text("More")).encode())
        _, turn = said(chat, "More")
        assert turn.prompt_tokens == len([*asked, *answer, ord("\n"), *question])
    monkeypatch.undo()
    with TieredKV(tiny(), config_at(tmp_path / "other")) as tiered:
        monkeypatch.setattr(tiny().generation_config, "eos_token_id", end)
        said(Chat(tiered, Ending(), "alice", max_new_tokens=9), "Hello!")
    with TieredKV(tiny(), config_at(tmp_path / "other")) as tiered:
        chat = Chat(tiered, Ending(), "alice", max_new_tokens=9)
        assert chat.num_tokens == len(asked) + len(answer) - 1
        _, turn = said(chat, "More")
        assert turn.prompt_tokens == len([*asked, *answer, ord("\n"), *question])
        assert turn.computed == len([end, ord("\n"), *question])


def test_conversations_share_their_beginning_and_salts_keep_them_apart(tmp_path: Path) -> None:
    words = "a question of some length, so that it has full blocks"
    with TieredKV(tiny(), config_at(tmp_path)) as tiered:
        _, first = said(Chat(tiered, Bytes(), "alice", max_new_tokens=4), words)
        _, shared = said(Chat(tiered, Bytes(), "bob", max_new_tokens=4), words)
        _, salted = said(Chat(tiered, Bytes(), "bob", salt="secret", max_new_tokens=4), words)
    assert sum(first.reused.values()) == sum(salted.reused.values()) == 0
    assert sum(shared.reused.values()) == shared.prompt_tokens // 16 * 16
    assert shared.computed == shared.prompt_tokens - sum(shared.reused.values())


def test_a_turn_that_is_stopped_or_fails(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with TieredKV(tiny(), config) as tiered:
        chat = Chat(tiered, Bytes(), "alice", max_new_tokens=50)
        pieces: list[str] = []
        turn = chat.ask("Hello!", pieces.append, stop=lambda: len(pieces) >= 3)  # a piece a token, maybe empty
        assert turn.is_cut and turn.new_tokens in (3, 4)  # newer transformers look after the next one
        held = chat.num_tokens

        def fail(piece: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            chat.ask("And then?", fail)
        assert chat.num_tokens == held, "a turn is there whole or not at all"
        with pytest.raises(UnsupportedError, match="the model's limit is 2048"):
            chat.ask("x" * 2000, pieces.append)
        assert chat.num_tokens == held
        _, turn = said(chat, "Still there?")
        assert turn.computed == len(turn_text("Still there?")), "what begins both turns, <user>, is still held"
        chat.reset()
        assert chat.num_tokens == 0 and chat.history() == ""
        tiered.check_integrity()
    with TieredKV(tiny(), config) as tiered:
        assert Chat(tiered, Bytes(), "alice").num_tokens == 0


# --- the command


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `kvtier chat` prints for these lines, of the tiny model."""
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(config_at(tmp_path)))
    loaded = models.LoadedModel(tiny(), Bytes(), "tiny")
    monkeypatch.setattr(models, "load_model", lambda path: loaded)

    def run(*lines: str, options: tuple[str, ...] = ()) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = ["chat", "--session", "alice", "--config", str(file), "--max-new-tokens", "4", *options]
        assert cli.main(words) == 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out

    return run


def test_two_runs_of_the_command(typed: Any, tmp_path: Path) -> None:
    out = typed("Hello!", "/stats", "/sessions", "/nonsense", "/quit", "never read")
    num_first = len((HEAD + turn_text("Hello!")).encode())
    assert "session alice: new" in out and "> Hello!" in out and "never read" not in out
    assert f"[{num_first} tokens: 0 reused, {num_first} computed · first token " in out and ", 4 tokens in " in out
    assert "  nvme: " in out and "  alice: " in out and "/nonsense is not known" in out

    (tmp_path / "facts.txt").write_text("The code is 48213.\x1b[31m")
    out = typed(f"/file {tmp_path / 'facts.txt'}", "/file nowhere", "What is it?", "/history", "/help")
    held = num_first + 4 + len(CLOSING)
    assert f"session alice: {held} tokens from an earlier run" in out
    asked = len((NEXT + turn_text("The code is 48213.\x1b[31m\n\nWhat is it?")).encode())
    assert f"[{held + asked} tokens: {held} reused ({held} from nvme), {asked} computed" in out
    assert "kvtier: /file nowhere: No such file" in out and "Ctrl-D" in out
    assert "\x1b" not in out and "\\x1b[31m" in out, "a terminal obeys nothing of what was said"

    assert "the conversation alice was deleted" in typed("/reset")
    assert "session alice: new" in typed()
    assert "session alice: new" in typed("Hello!", options=("--salt", "secret"))


def test_lines_that_are_no_text_or_say_too_much_lose_nothing(typed: Any) -> None:
    """A byte that is not UTF-8 ended the program with a traceback, and `/reset now` deleted the conversation."""
    out = typed("Hello \udcff!", "/reset now", "/quit now", "/file", "And then?", "/reset")
    assert "> Hello \ufffd!" in out and out.count(", 4 tokens in ") == 2
    assert "/reset stands alone" in out and "/quit stands alone" in out and "kvtier: /file: give the path" in out
    assert "the conversation alice was deleted" in out


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_answer_and_not_the_program(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sent = Chat.ask, list[signal.Signals]()

    def interrupted(self: Chat, text: str, show: Any, stop: Any) -> Turn:
        def first(piece: str) -> None:
            show(piece)
            if not sent:
                sent.append(signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        return original(self, text, first, stop)

    monkeypatch.setattr(Chat, "ask", interrupted)
    out = typed("Hello!", "And then?")
    assert re.search(r", (1 token|2 tokens) in .*, cut short", out) and ", 4 tokens in " in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_before_the_answer_drops_the_turn(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sent = Chat.ask, list[signal.Signals]()

    def interrupted(self: Chat, *args: Any) -> Turn:
        if not sent:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Chat, "ask", interrupted)
    out = typed("Hello!", "Hello!")
    assert "stopped; the turn is dropped" in out and ", 4 tokens in " in out


def test_an_error_ends_the_turn_alone_and_bad_options_the_command(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*args: Any) -> Turn:
        raise KVTierError("no room\nfor it")

    with monkeypatch.context() as patch:
        patch.setattr(cli_chat.importlib.import_module("kvtier.chat").Chat, "ask", failing)
        assert "kvtier: no room for it\n" in typed("Hello!")
    assert cli.main(["chat"]) == 2
    assert cli.main(["chat", "--session", "a\x1bb"]) == 2
    assert capsys.readouterr().err.count("kvtier: ") == 2


def test_without_a_path_it_says_that_nothing_is_kept(typed: Any, tmp_path: Path) -> None:
    file = tmp_path / "memory.yaml"
    config = config_at(tmp_path)
    del config["tiers"]["nvme"]
    config["tiers"]["cpu"]["budget"] = "16MiB"
    file.write_text(yaml.safe_dump(config))
    assert "nothing of this is kept" in typed("Hello!", options=("--config", str(file)))


def test_a_second_chat_in_one_folder_hears_what_helps_there(
    tmp_path: Path, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told to set tiers.nvme.path, in a preset."""
    typed()
    with TieredKV(copy.deepcopy(tiny()), config_at(tmp_path)):
        words = ["chat", "--session", "alice", "--config", str(tmp_path / "chat.yaml")]
        assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and f"belongs to process {os.getpid()}, which is alive: end that one" in err
    assert "give --config" in err and "on_locked" not in err
