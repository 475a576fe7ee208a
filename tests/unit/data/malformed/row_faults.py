"""Rows that are JSON and of a known format, and still cannot be learned from."""

from __future__ import annotations

from typing import Any

from unit.data.malformed.case import OddFile, Row, RowsRead, jsonl, pair, pairs, quarantined


def bad_row(label: str, row: Any, reason: str) -> OddFile:
    """Return a file of good pairs and one that the reader refuses."""
    return jsonl(label, [*pairs(label, 12), row], RowsRead(12, {reason: 1}))


def noted(label: str, row: Row, *unused: str) -> OddFile:
    """Return a file of good pairs and one that is used, though not all of its columns are."""
    return jsonl(label, [*pairs(label, 12), row], RowsRead(13, unused=unused))


def turn(role: Any, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content} | more


def part(text: str, **more: Any) -> Row:
    return {"type": "text", "text": text} | more


def dialogue(label: str, *prompt: Row, **changes: Any) -> Row:
    row = {
        "prompt": list(prompt),
        "chosen": [turn("assistant", f"good {label}")],
        "rejected": [turn("assistant", f"bad {label}")],
    }
    return row | changes


def dialogues(label: str, row: Row, expected: RowsRead) -> OddFile:
    """Return a file of conversational pairs, the last of which is ``row``."""
    rows = [dialogue(f"{label} {n}", turn("user", f"{label} {n}?")) for n in range(12)]
    return jsonl(label, [*rows, row], expected)


def bad_dialogue(label: str, row: Row, reason: str) -> OddFile:
    return dialogues(label, row, RowsRead(12, {reason: 1}))


def alpaca(label: str, **changes: Any) -> Row:
    return {"instruction": f"{label}?", "input": "", "chosen": f"good {label}", "rejected": f"bad {label}"} | changes


def bad_alpaca(label: str, reason: str, **changes: Any) -> OddFile:
    rows = [alpaca(f"{label} {n}") for n in range(12)]
    return jsonl(label, [*rows, alpaca(label, **changes)], RowsRead(12, {reason: 1}))


USER = turn("user", "which?")
TOOL = turn("assistant", "text", tool_calls=[{"function": {"name": "f"}}])
ODD_ROLES = quarantined(13, "roles do not alternate")
FILES = [
    *(
        bad_alpaca(f"history-{n}", "history is not a list of [question, answer]", history=value)
        for n, value in enumerate((5, "no", {"a": "b"}, [5], [["a"]], [["a", "b", "c"]]))
    ),
    bad_alpaca("history-null-question", "history is missing", history=[[None, "b"]]),
    bad_alpaca("instruction-number", "does not match the format", instruction=5),
    bad_row("reply-null", pair("reply-null", chosen=None), "chosen is missing"),
    bad_row("reply-number", pair("reply-number", chosen=5), "chosen is not text but int"),
    bad_row("reply-missing", {"prompt": "a?", "chosen": "b"}, "does not match the format"),
    bad_row("reply-misspelt", {"prompt": "a?", "choosen": "b", "rejected": "c"}, "does not match the format"),
    bad_row("no-columns", {}, "does not match the format"),
    bad_row("other-columns", {"title": "a", "score": 1}, "does not match the format"),
    bad_row("system-number", pair("system-number", system=5), "system is not text"),
    noted("extra-columns", pair("extra-columns", model="m", turns=3), "model", "turns"),
    noted("margin-misspelt", pair("margin-misspelt", margn=3.0), "margn"),
    noted("system-misspelt", pair("system-misspelt", System="Be brief."), "System"),
    bad_dialogue("chosen-of-user", dialogue("cu", USER, chosen=[turn("user", "b")]), "chosen is a turn of the user"),
    bad_dialogue("chosen-two-turns", dialogue("c2", USER, chosen=[turn("assistant", "a")] * 2), "chosen has 2 turns"),
    bad_dialogue("chosen-no-turns", dialogue("c0", USER, chosen=[]), "chosen has 0 turns"),
    bad_dialogue("tool-calls", dialogue("tc", USER, chosen=[TOOL]), "has tool_calls beside its text"),
    bad_dialogue(
        "function-call", dialogue("fc", USER, turn("assistant", "a", function_call=[{}]), USER), "function_call"
    ),
    *(
        bad_dialogue(
            f"turn-{name}", dialogue(name, USER, chosen=[turn("assistant", "a", **{name: "b"})]), f"has {name} beside"
        )
        for name in ("thinking", "reasoning", "reasoning_content")
    ),
    dialogues(
        "turn-keys",
        dialogue("tk", turn("user", "tk?", name="Bob", thinking=None), rejected=[turn("assistant", "z", weight=0)]),
        RowsRead(13, unused=["prompt[].name", "rejected[].weight"]),
    ),
    noted("category-number", pair("category-number", category=5), "category"),
    noted("category-list", pair("category-list", category=["a"]), "category"),
    noted("source-number", pair("source-number", source=7), "source"),
    bad_dialogue("tool-role", dialogue("tr", USER, turn("tool", "{}"), USER), "unknown role 'tool'"),
    bad_dialogue("role-number", dialogue("rn", turn(1, "a")), "unknown role 1"),
    bad_dialogue("no-role", dialogue("no", {"content": "a"}), "unknown role None"),
    bad_dialogue("no-content", dialogue("nc", {"role": "user"}), "the user turn is missing"),
    bad_dialogue("content-number", dialogue("cn", turn("user", 5)), "the user turn is not text but int"),
    bad_dialogue("turn-text", dialogue("tt", USER) | {"prompt": ["which?"]}, "a turn is not an object but str"),
    bad_dialogue("image-part", dialogue("ip", turn("user", [{"type": "image", "url": "x"}])), "a part of type 'image'"),
    bad_dialogue("part-image", dialogue("itp", turn("user", [part("a", image="x.png")])), "has image beside"),
    *(
        bad_dialogue(f"turn-{name}", dialogue(name, turn("user", "a", **{name: "x"})), f"has {name} beside")
        for name in ("image", "audio", "video", "file")
    ),
    dialogues(
        "part-keys",
        dialogue("pk", turn("user", [part("pk?", a={"b": 1})])),
        RowsRead(13, unused=["prompt[].content[].a"]),
    ),
    bad_dialogue("no-turns", dialogue("nt"), "the list of turns is empty"),
    bad_dialogue("part-text", dialogue("pt", turn("user", ["pt?"])), "a part of type 'str'"),
    bad_dialogue("no-parts", dialogue("np", turn("user", [])), "the user turn has no parts"),
    bad_dialogue("two-roles", dialogue("2r", {"role": "user", "from": "gpt", "content": "a"}), "from is 'gpt'"),
    bad_dialogue("two-contents", dialogue("2c", {"role": "user", "content": "a", "value": "b"}), "content and value"),
    dialogues("text-parts", dialogue("tp", turn("user", [part("a "), part("tp?")])), RowsRead(13)),
    dialogues("empty-tool-calls", dialogue("et", turn("user", "et?", tool_calls=[])), RowsRead(13)),
    dialogues("empty-system", dialogue("es", turn("system", ""), turn("user", "es?")), RowsRead(13)),
    dialogues("system-twice", dialogue("st", turn("system", "a"), turn("user", "st?"), system="b"), ODD_ROLES),
    dialogues("roles", dialogue("ro", USER, USER), ODD_ROLES),
    dialogues("roles-capital", dialogue("rc", turn("USER", "rc?")), RowsRead(13)),
    jsonl("prompt-object", [*[pair("po", prompt=USER)] * 2], "prompt (dict)"),
    jsonl("keys-capital", [{"Prompt": "a", "Chosen": "b", "Rejected": "c"}], "keys Prompt"),
    jsonl("keys-misspelt", [{"prompt": 1, "choosen": "b", "rejected": "c"}], "choosen"),
]
