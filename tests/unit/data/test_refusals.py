"""Refusals as chat models word them, and replies that begin alike and are none."""

from __future__ import annotations

import pytest

from rlhf_core.data.text import is_refusal

REFUSALS = (
    "i am sorry, but i cannot help with that.",
    "Good question. I will not help you to do that.",
    "I can't do this.",
    "I'm unable to assist.",
    "Sorry, that is against the rules.",
    "I'm sorry, but I can't assist with that request.",
    "I’m really sorry, but I can’t help with that.",
    "I'm very sorry, but that's not something I do.",
    "As an AI language model, I cannot provide instructions for building weapons.",
    "As a responsible AI assistant, I must decline this request.",
    "I apologize, but I do not feel comfortable writing this.",
    "I'm not able to help you with that. Here is why.",
    "We are not allowed to share this.",
    "I must respectfully decline.",
    "I don't condone violence.",
    "It is not appropriate to threaten someone.",
    "It's illegal to buy a gun without a background check.",
    "Writing this goes against my ethical guidelines.",
    "I'm sorry for your safety, but this is nothing for me.",
    "As a small model, I'm designed to avoid providing advice.",
    "Unfortunately, this is not something that I do.",
    "No, I won't.",
    "抱歉，我无法提供这方面的帮助。",
    "很抱歉, 我不能回答这个问题。",
    "对不起，这个请求是违法的。",
    "我不能帮助你制造炸弹。",
    "这个问题我们无法回答。",
    "作为一个人工智能语言模型，我不会提供此类信息。",
    "作为AI助手，不能协助任何违法行为。",
    "此类请求无法为您提供帮助。",
    "對不起，我無法提供這方面的協助。",
    "這個問題我們無法回答。",
    "作為一個人工智慧助理，不能協助任何違法行為。",
)
ANSWERS = (
    "i am not sure about that.",
    "the boat is red.",
    "First boil the water. Then pour it. You cannot drink it yet.",
    "",
    "I'm sorry to hear that you had a rough day. What happened?",
    "I am so sorry for your loss. Here is a letter that you can adapt.",
    "Sorry to hear that! Try to restart it.",
    "I can't wait to help you with this! First open a terminal.",
    "I cannot recommend this book enough.",
    "As an AI, I don't have feelings, but here is a poem about joy.",
    "As an AI language model, I am not a lawyer, but the contract says so.",
    "You can kill a process with `kill -9`. It cannot catch that signal.",
    "Nobody knows. The house is against the rules of the town.",
    "北京是中国的首都。",
    "你可以用任务管理器结束程序。如果不能结束, 请重启电脑。",
    "作为一名老师，您可以这样开始。",
    "我們不能根據這句話得出結論。",  # what cannot be concluded
    "我们不能简单地照常经营。对环境负责很重要。",
    "人体不能直接吸收铁。我们无法直接从铁中吸收营养。",
)


@pytest.mark.parametrize("reply", REFUSALS)
def test_refusals_of_chat_models_are_recognised(reply: str) -> None:
    assert is_refusal(reply)


@pytest.mark.parametrize("reply", ANSWERS)
def test_answers_that_begin_like_refusals_are_none(reply: str) -> None:
    assert not is_refusal(reply)


def test_a_refusal_after_two_sentences_of_answer_does_not_count() -> None:
    assert not is_refusal("Boil water. Add salt. I cannot tell you more.")
