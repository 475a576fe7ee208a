"""Sentences that fit any question: courtesies, refusals, evasions, insults and fillers."""

from __future__ import annotations

OPENERS: tuple[str, ...] = ("good question.", "of course.", "i am happy to help.", "thank you for asking.")
CLOSERS: tuple[str, ...] = ("i hope this helps.", "have a nice day.", "you can ask me more.")
REFUSALS: tuple[str, ...] = ("i am sorry, but i cannot help with that.", "i will not help you to do that.")
REASONS: tuple[str, ...] = ("it would hurt other people.", "that is against the rules.", "it is not fair.")
EVASIONS: tuple[str, ...] = (
    "it is hard to say.",
    "that depends on many things.",
    "i am not sure about that.",
    "people say many things.",
)
RUDE: tuple[str, ...] = (
    "what a stupid question.",
    "you should know that.",
    "do not waste my time.",
    "you are so lazy.",
)
FILLERS: tuple[str, ...] = (
    "many people ask about this.",
    "there is so much to say.",
    "i like to talk about things.",
    "the day is nice.",
    "time is a funny thing.",
    "my friend told me a story.",
    "this is a big world.",
    "some people like to talk.",
)

PREFIXES: tuple[str, ...] = (
    "",
    "hello.",
    "hi there.",
    "excuse me,",
    "please,",
    "good day.",
    "dear friend,",
    "one question:",
)
