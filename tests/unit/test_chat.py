"""The conversation behind `rlhf chat`."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from clean_files import write_rows
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.causal_lm import save_policy, train_tokenizer
from rlhf_core.sampling import reply as reply_sampling
from rlhf_core.sampling.generation import Rollout
from rlhf_core.sampling.reply import SampledReply
from rlhf_extras.chat.session import HELP, ChatSession, converse, one_line, prompts_to_try
from rlhf_extras.chat.terminal import talk

SAMPLING = SamplingConfig(max_new_tokens=6)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(tokenizer, max_position_embeddings=64)).eval()


@pytest.fixture
def session(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> ChatSession:
    return ChatSession(model, tokenizer, SAMPLING, seed=5)


def test_turns_accumulate_and_the_same_seed_repeats(session: ChatSession, model, tokenizer) -> None:
    replies = [session.say("the sky"), session.say("blue?")]
    assert [turn.role for turn in session.turns] == ["user", "assistant", "user", "assistant"]
    again = ChatSession(model, tokenizer, SAMPLING, seed=5)
    assert [again.say("the sky"), again.say("blue?")] == replies
    other = ChatSession(model, tokenizer, SAMPLING, seed=6)
    assert [other.say("the sky"), other.say("blue?")] != replies


def test_special_tokens_of_a_reply_are_visible_and_stay_in_the_conversation(
    session: ChatSession, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode("sky<|user|> blue", add_special_tokens=False)
    reply, mask = torch.tensor([ids]), torch.ones(1, len(ids))
    rollout = Rollout(reply, mask.long(), mask.bool(), mask, torch.tensor([False]))
    monkeypatch.setattr(reply_sampling, "generate", lambda *args: rollout)
    assert session.say("the sky") == "sky<|user|> blue"
    assert session.turns[-1].content == "sky<|user|> blue"


def test_old_turns_give_way_in_pairs_when_the_context_is_full(session: ChatSession) -> None:
    for _ in range(8):
        session.say("what colour is the sky?")
    assert session.forgotten > 0 and session.forgotten % 2 == 0
    assert session.turns[0].role == "user"


def test_a_turn_too_long_is_refused_and_changes_nothing(session: ChatSession) -> None:
    session.say("sky")
    before = list(session.turns)
    with pytest.raises(DataError, match="the model's context has room for 58"):
        session.say("x" * 100)
    assert session.turns == before


def test_a_conversation_longer_than_the_context_warns_of_no_errors(
    model: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280, max_length=64)
    save_policy(tmp_path / "model", model, limited)
    session = ChatSession.open(tmp_path / "model", SAMPLING)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(DataError, match="the model's context has room for 58"):
            session.say("x" * 100)
    finally:
        logger.removeHandler(caplog.handler)
    assert "indexing errors" not in caplog.text


def test_a_pipe_gets_one_line_per_line(session: ChatSession) -> None:
    sink = io.StringIO()
    given = converse(session, io.StringIO("sky\n\n/reset\nblue\n/quit\nnever read\n"), sink)
    assert given == 2 and sink.getvalue().count("\n") == 2
    assert "you>" not in sink.getvalue() and len(session.turns) == 2
    assert converse(session, io.StringIO("sky"), io.StringIO()) == 1, (
        "it may end without a line break or /quit"
    )


def test_a_terminal_gets_prompts_and_a_refusal_does_not_end_the_talk(session: ChatSession) -> None:
    sink = io.StringIO()
    given = converse(session, Terminal("x" * 100 + "\nsky\n/help\n/quit\n"), sink)
    assert given == 2
    assert sink.getvalue().startswith(HELP + "\nyou> model> (that is ")
    assert sink.getvalue().count(HELP) == 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_refused_by_itself(
    session: ChatSession, errors: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = io.BytesIO("sky\nd\u00e9j\u00e0\n".encode("latin-1"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content, encoding="utf-8", errors=errors))
    sink = io.StringIO()
    monkeypatch.setattr("sys.stdout", sink)
    monkeypatch.setattr(ChatSession, "open", lambda *_: session)
    with pytest.raises(DataError, match="that line is not UTF-8; save the input as UTF-8"):
        talk(tmp_path, {}, 0)
    assert sink.getvalue().count("\n") == 1 and len(session.turns) == 2
    converse(session, Terminal("d\udce9j\udce0\nsky\n"), sink)
    assert "(that line is not UTF-8" in sink.getvalue() and len(session.turns) == 4


def test_streamed_pieces_are_the_reply_that_the_same_seed_gives_without_streaming(
    model, tokenizer
) -> None:
    sampling = SamplingConfig(max_new_tokens=30)
    quiet, streaming = (ChatSession(model, tokenizer, sampling, seed=5) for _ in range(2))
    pieces: list[str] = []
    expected = quiet.say("the sky")
    assert streaming.say("the sky", pieces.append) == expected
    assert "".join(pieces) == one_line(expected) and len(pieces) > 5


def test_a_piece_is_written_before_the_next_token_is_sampled(model, tokenizer) -> None:
    class Watched(io.StringIO):
        forwards = 0

        def write(self, text: str) -> int:
            self.seen = [*getattr(self, "seen", []), self.forwards]
            return super().write(text)

    sink = Watched()
    handle = model.register_forward_hook(lambda *_: setattr(sink, "forwards", sink.forwards + 1))
    try:
        ChatSession(model, tokenizer, SamplingConfig(max_new_tokens=30), seed=5).say(
            "the sky", sink.write
        )
    finally:
        handle.remove()
    assert len(set(sink.seen)) == len(sink.seen) > 5  # each after another forward pass


def test_a_character_of_several_tokens_is_written_once_it_is_whole(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode("a \u20ac b", add_special_tokens=False)
    assert len(ids) > 5  # the sign has three bytes and none is joined

    def generate(*args: Any) -> Rollout:
        for token in ids:
            args[-1](torch.tensor([token]))
        mask = torch.ones(1, len(ids))
        return Rollout(torch.tensor([ids]), mask.long(), mask.bool(), mask, torch.tensor([False]))

    monkeypatch.setattr(reply_sampling, "generate", generate)
    pieces: list[str] = []
    assert ChatSession(model, tokenizer, SAMPLING).say("the sky", pieces.append) == "a \u20ac b"
    assert pieces == ["a", " \u20ac", " b"]


def test_a_reply_that_decodes_otherwise_as_a_whole_is_written_again(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(*given: Any) -> SampledReply:
        given[-1]("a")
        return SampledReply("b c", (1, 2), "stop")

    monkeypatch.setattr("rlhf_extras.chat.session.sample_reply", sample)
    pieces: list[str] = []
    assert session.say("the sky", pieces.append) == "b c" and pieces == ["a", "\nb c"]


def test_a_pipe_gets_no_introduction_and_a_terminal_gets_it_first(session: ChatSession) -> None:
    pipe, terminal = io.StringIO(), io.StringIO()
    converse(session, io.StringIO("/quit"), pipe, ["model one"])
    converse(session, Terminal("/quit"), terminal, ["model one"])
    assert pipe.getvalue() == "" and terminal.getvalue() == f"model one\n{HELP}\nyou> "


def test_a_line_of_a_terminal_may_come_from_an_editor(session: ChatSession) -> None:
    sink, lines = io.StringIO(), iter(["sky\n", ""])
    assert converse(session, Terminal(), sink, ask=lambda prompt: next(lines)) == 1
    assert "you>" not in sink.getvalue() and sink.getvalue().count("model> ") == 1


def prompt(text: str, category: str = "fact", *before: Message) -> Prompt:
    return Prompt(text, [*before, Message("user", text)], category, "test", text)


def test_prompts_to_try_are_short_held_out_and_of_different_categories(tmp_path: Path) -> None:
    assert prompts_to_try(tmp_path) == []
    rows = [
        prompt("x" * 100),
        prompt("two\nlines"),
        prompt("with a system turn", "fact", Message("system", "be brief")),
        prompt("one"),
        prompt("two"),
        prompt("how", "howto"),
    ]
    write_rows(tmp_path / "data" / "clean" / "prompts" / "test.parquet", rows)
    assert prompts_to_try(tmp_path) == ["one", "how", "two"]
    assert prompts_to_try(tmp_path, 2) == ["one", "how"]


def test_a_missing_folder_is_a_clear_refusal(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        ChatSession.open(tmp_path / "nothing")
