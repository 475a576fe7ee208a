"""Rows that cannot be learned from, and sources whose path or options do not fit."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from unit.data.malformed.case import OddFile, Row, RowsRead, jsonl, lines, pair, pairs, quarantined


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
    return {
        "instruction": f"{label}?",
        "input": "",
        "chosen": f"good {label}",
        "rejected": f"bad {label}",
    } | changes


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
    bad_row(
        "reply-misspelt",
        {"prompt": "a?", "choosen": "b", "rejected": "c"},
        "does not match the format",
    ),
    bad_row("no-columns", {}, "does not match the format"),
    bad_row("other-columns", {"title": "a", "score": 1}, "does not match the format"),
    bad_row("system-number", pair("system-number", system=5), "system is not text"),
    noted("extra-columns", pair("extra-columns", model="m", turns=3), "model", "turns"),
    noted("margin-misspelt", pair("margin-misspelt", margn=3.0), "margn"),
    noted("system-misspelt", pair("system-misspelt", System="Be brief."), "System"),
    bad_dialogue(
        "chosen-of-user",
        dialogue("cu", USER, chosen=[turn("user", "b")]),
        "chosen is a turn of the user",
    ),
    bad_dialogue(
        "chosen-two-turns",
        dialogue("c2", USER, chosen=[turn("assistant", "a")] * 2),
        "chosen has 2 turns",
    ),
    bad_dialogue("chosen-no-turns", dialogue("c0", USER, chosen=[]), "chosen has 0 turns"),
    bad_dialogue(
        "tool-calls", dialogue("tc", USER, chosen=[TOOL]), "has tool_calls beside its text"
    ),
    bad_dialogue(
        "function-call",
        dialogue("fc", USER, turn("assistant", "a", function_call=[{}]), USER),
        "function_call",
    ),
    *(
        bad_dialogue(
            f"turn-{name}",
            dialogue(name, USER, chosen=[turn("assistant", "a", **{name: "b"})]),
            f"has {name} beside",
        )
        for name in ("thinking", "reasoning", "reasoning_content")
    ),
    dialogues(
        "turn-keys",
        dialogue(
            "tk",
            turn("user", "tk?", name="Bob", thinking=None),
            rejected=[turn("assistant", "z", weight=0)],
        ),
        RowsRead(13, unused=["prompt[].name", "rejected[].weight"]),
    ),
    noted("category-number", pair("category-number", category=5), "category"),
    noted("category-list", pair("category-list", category=["a"]), "category"),
    noted("source-number", pair("source-number", source=7), "source"),
    bad_dialogue(
        "tool-role", dialogue("tr", USER, turn("tool", "{}"), USER), "unknown role 'tool'"
    ),
    bad_dialogue("role-number", dialogue("rn", turn(1, "a")), "unknown role 1"),
    bad_dialogue("no-role", dialogue("no", {"content": "a"}), "unknown role None"),
    bad_dialogue("no-content", dialogue("nc", {"role": "user"}), "the user turn is missing"),
    bad_dialogue(
        "content-number", dialogue("cn", turn("user", 5)), "the user turn is not text but int"
    ),
    bad_dialogue(
        "turn-text",
        dialogue("tt", USER) | {"prompt": ["which?"]},
        "a turn is not an object but str",
    ),
    bad_dialogue(
        "image-part",
        dialogue("ip", turn("user", [{"type": "image", "url": "x"}])),
        "a part of type 'image'",
    ),
    bad_dialogue(
        "part-image", dialogue("itp", turn("user", [part("a", image="x.png")])), "has image beside"
    ),
    *(
        bad_dialogue(
            f"turn-{name}", dialogue(name, turn("user", "a", **{name: "x"})), f"has {name} beside"
        )
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
    bad_dialogue(
        "two-roles",
        dialogue("2r", {"role": "user", "from": "gpt", "content": "a"}),
        "from is 'gpt'",
    ),
    bad_dialogue(
        "two-contents",
        dialogue("2c", {"role": "user", "content": "a", "value": "b"}),
        "content and value",
    ),
    dialogues("text-parts", dialogue("tp", turn("user", [part("a "), part("tp?")])), RowsRead(13)),
    dialogues("empty-tool-calls", dialogue("et", turn("user", "et?", tool_calls=[])), RowsRead(13)),
    dialogues(
        "empty-system", dialogue("es", turn("system", ""), turn("user", "es?")), RowsRead(13)
    ),
    dialogues(
        "system-twice",
        dialogue("st", turn("system", "a"), turn("user", "st?"), system="b"),
        ODD_ROLES,
    ),
    dialogues("roles", dialogue("ro", USER, USER), ODD_ROLES),
    dialogues("roles-capital", dialogue("rc", turn("USER", "rc?")), RowsRead(13)),
    jsonl("prompt-object", [*[pair("po", prompt=USER)] * 2], "prompt (dict)"),
    jsonl("keys-capital", [{"Prompt": "a", "Chosen": "b", "Rejected": "c"}], "keys Prompt"),
    jsonl("keys-misspelt", [{"prompt": 1, "choosen": "b", "rejected": "c"}], "choosen"),
]


AS_TEXT, RENDERED = "is a dialogue written out as text", "is rendered by a chat template"
UNEQUAL = "the prompts of the two replies differ"


def hh(label: str, chosen: str | None = None, rejected: str | None = None, **more: Any) -> Row:
    start = f"\n\nHuman: {label}?\n\nAssistant:"
    return {"chosen": chosen or f"{start} good", "rejected": rejected or f"{start} bad"} | more


def hh_at(start: str, label: str, line: str) -> Row:
    """Return a row of transcripts with other white space before the first turn, or other ends."""
    begin = (
        f"{start}Human: {label}?{line * 2}Assistant: who?{line * 2}Human: you{line * 2}Assistant:"
    )
    return {"chosen": f"{begin} good", "rejected": f"{begin} bad"}


def pku(label: str, better: Any = 0, safer: Any = 0) -> Row:
    replies = {"response_0": f"{label} a", "response_1": f"{label} b"}
    return (
        {"prompt": f"{label}?"}
        | replies
        | {"better_response_id": better, "safer_response_id": safer}
    )


def helpsteer(label: str, strength: Any = 2) -> Row:
    return {
        "prompt": f"{label}?",
        "response_1": f"{label} a",
        "response_2": f"{label} b",
        "preference_strength": strength,
    }


def shp(label: str, best: Any = 1) -> Row:
    return {
        "history": f"{label}?",
        "human_ref_A": f"{label} a",
        "human_ref_B": f"{label} b",
        "labels": best,
    }


def ranking(label: str, scores: Any = (3, 1), name: str = "scores", replies: int = 2) -> Row:
    return {
        "prompt": f"{label}?",
        "responses": [f"{label} {n}" for n in range(replies)],
        name: list(scores),
    }


def ultrafeedback(label: str, *scores: Any) -> Row:
    replies = [
        {"response": f"{label} {n}", "overall_score": score} for n, score in enumerate(scores)
    ]
    return {"instruction": f"{label}?", "completions": replies}


def binarized(label: str, chosen: Any = 8, rejected: Any = 5) -> Row:
    return pair(label, score_chosen=chosen, score_rejected=rejected)


def orca(label: str, **more: Any) -> Row:
    return {"question": f"{label}?", "chosen": f"{label} good", "rejected": f"{label} bad"} | more


def kto(label: str, value: Any = True, name: str = "label") -> Row:
    return {"prompt": f"{label}?", "completion": f"reply {label}", name: value}


def implicit(label: str, prompt: str = "which", other: str | None = None) -> Row:
    def turns(question: str, reply: str) -> list[Row]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]

    return {
        "chosen": turns(f"{label} {prompt}?", "good"),
        "rejected": turns(f"{label} {other or prompt}?", "bad"),
    }


def after(make: Any, label: str, row: Any, expected: RowsRead | str, **more: Any) -> OddFile:
    """Return a file of twelve good rows by ``make`` and an odd one.

    An expected text is why the odd row is refused.
    """
    if isinstance(expected, str):
        expected = RowsRead(12, {expected: 1})
    rows = [make(f"{label} {n}") for n in range(12)]
    return jsonl(label, [*rows, row], expected, **more)


def alone(label: str, row: Row, reason: str, **more: Any) -> OddFile:
    """Return a file of one row, which is refused."""
    return jsonl(label, [row], RowsRead(0, {reason: 1}), **more)


def dropped(reason: str) -> RowsRead:
    return RowsRead(12, dropped={reason: 1})


def scored(label: str) -> Row:
    return ultrafeedback(label, 8, 3)


def turn_list(label: str) -> list[str]:
    return [label, "reply"]


def moss(label: str) -> Row:
    return {"chosen": [label, "a"], "rejected": [label, "b"]}


def said(text: str) -> Row:
    return {"role": "assistant", "text": text}


def tree(label: str, **changes: Any) -> Row:
    replies = [{"role": "assistant", "text": f"{label} {n}", "rank": n} for n in range(2)]
    root = {"role": "prompter", "text": f"{label}?", "replies": replies}
    return {"message_tree_id": label, "prompt": root | changes}


HI = "\n\nHuman: hi?\n\n"
TURN = {"from": "human", "value": "a?"}
MESSAGE = {"message_id": "a", "parent_id": None, "role": "prompter", "text": "a?"}
UNPAIRED = [kto(f"unpaired {n}") for n in range(3)]
HELPFUL = {"dimension": "helpful"}
DEMONSTRATIONS, PROMPTS, PRETRAIN = (
    {"kind": kind} for kind in ("demonstrations", "prompts", "pretrain")
)
FILES += [
    after(hh, "hh-other-prompt", hh("a", rejected="\n\nHuman: other?\n\nAssistant: bad"), UNEQUAL),
    after(
        hh, "hh-ends-with-human", hh("c", f"{HI}Assistant: x\n\nHuman: y"), "ends with a human turn"
    ),
    after(hh, "hh-prompt-space", hh("hps", rejected="\n\nHuman: hps? \n\nAssistant: bad"), UNEQUAL),
    after(
        hh, "hh-no-assistant", hh("d", rejected="\n\nHuman: d?"), "rejected has no assistant's turn"
    ),
    after(
        hh,
        "hh-with-other-prompt",
        hh("e", prompt="something else?"),
        "the prompt is not that of the transcripts",
    ),
    after(
        hh,
        "hh-no-human",
        hh("f", "\n\nAssistant: good", "\n\nAssistant: bad"),
        "the transcript has no turns",
    ),
    after(
        pku,
        "pku-index-2",
        pku("a", better=2),
        "better_response_id is 2, not 0 or 1",
        options=HELPFUL,
    ),
    after(
        pku,
        "pku-index-true",
        pku("a", better=True),
        "better_response_id is not a number",
        options=HELPFUL,
    ),
    after(
        helpsteer, "helpsteer-5", helpsteer("a", 5), "preference_strength is 5, not from -3 to 3"
    ),
    after(
        helpsteer,
        "helpsteer-nan",
        helpsteer("a", float("nan")),
        "preference_strength is not a number",
    ),
    after(shp, "shp-label-2", shp("a", 2), "labels is 2, not 0 or 1"),
    after(ranking, "ranking-ties", ranking("rt", (3, 1, 1), replies=3), RowsRead(14, expanded=1)),
    after(
        ranking, "ranking-too-few-scores", ranking("a", (3,)), "there are 2 responses but 1 scores"
    ),
    after(
        ranking, "ranking-nan", ranking("a", (float("nan"), 1)), "score of reply 1 is not a number"
    ),
    after(
        ranking,
        "ranking-nothing",
        ranking("a", (), replies=0),
        dropped("no reply is better than another"),
    ),
    after(
        ranking,
        "ranking-one",
        ranking("a", (1,), replies=1),
        dropped("no reply is better than another"),
    ),
    after(ranking, "ranks-ties", ranking("rk", (1, 1, 2), "ranks", 3), RowsRead(14, expanded=1)),
    after(
        scored,
        "ultrafeedback-no-score",
        ultrafeedback("a", 8, None),
        "overall_score of completion 2 is not a number",
    ),
    after(scored, "ultrafeedback-empty", ultrafeedback("a"), "does not match"),
    after(binarized, "scores-one-missing", binarized("om", 5, None), RowsRead(13)),
    after(binarized, "scores-text", binarized("a", "high", 5), "score_chosen is not a number"),
    after(implicit, "implicit-other-prompt", implicit("a", "which", "what"), UNEQUAL),
    after(tree, "tree-no-role", tree("a", role=None), "a message of the tree has no role"),
    after(
        tree,
        "tree-replies-text",
        tree("a", replies="none"),
        "the replies of a message are not a list",
    ),
    after(tree, "tree-deleted", tree("a", deleted=True), dropped("no two ranked replies")),
    after(
        tree,
        "tree-rank-text",
        tree("a", replies=[said("b") | {"rank": "first"}]),
        "rank is not a number",
    ),
    *(
        jsonl(f"hh-start-{n}", [*(hh_at(start, f"hs{n} {i}", line) for i in range(3))], RowsRead(3))
        for n, (start, line) in enumerate(
            (("", "\n"), (" \n\n", "\n"), ("\n", "\n"), ("\r\n\r\n", "\r\n"), ("", "\r\n"))
        )
    ),
    after(hh, "hh-one-stripped", hh("hos", chosen="Human: hos?\n\nAssistant: good"), RowsRead(13)),
    after(pair, "prompt-stripped", pair("ps", prompt="Human: ps?\n\nAssistant:"), RowsRead(13)),
    after(
        pair, "prompt-CRLF", pair("pc", prompt="\r\n\r\nHuman: pc?\r\n\r\nAssistant:"), RowsRead(13)
    ),
    after(
        pair,
        "prompt-dense",
        pair("pd", prompt="Human: pd?\nAssistant:"),
        "without empty lines between its turns",
    ),
    after(
        pair,
        "reply-CRLF",
        pair("rc", chosen="\r\n\r\nHuman: a?\r\n\r\nAssistant: b"),
        "is a whole transcript",
    ),
    after(
        pair,
        "rendered",
        pair("r", chosen="<|im_start|>assistant\nyes<|im_end|>"),
        f"chosen {RENDERED}",
    ),
    after(
        pair, "prompt-as-JSON", pair("pj", prompt='[{"role": "user", "content": "hi"}]'), AS_TEXT
    ),
    after(pair, "reply-as-JSON", pair("rj", rejected='[{"from": "gpt", "value": "hi"}]'), AS_TEXT),
    after(
        pair, "reply-of-JSON", pair("roj", chosen='[{"role": "admin", "value": 3}]'), RowsRead(13)
    ),
    after(pair, "margin-negative", pair("mn", margin=-2), "the margin prefers the other reply"),
    after(
        pair,
        "margin-against-scores",
        binarized("mas", 1, 5) | {"margin": 1},
        "the scores prefer the other reply",
    ),
    after(
        pair,
        "margin-against-itself",
        binarized("mai", 5, 1) | {"margin": -4},
        "the margin prefers the other reply",
    ),
    after(pair, "margin-of-equal-scores", binarized("mes", 5, 5) | {"margin": 1}, RowsRead(13)),
    after(
        pair,
        "margin-negative-imitated",
        pair("mni", margin=-2),
        "the margin prefers",
        **DEMONSTRATIONS,
    ),
    after(pair, "scores-against-imitated", binarized("mni", 1, 5), "the scores prefer", **PRETRAIN),
    after(pair, "label-beside-pair", pair("lbp") | {"label": 0}, RowsRead(13, unused=["label"])),
    alone(
        "pku-safer-missing",
        pku("psm", safer=None),
        "safer_response_id is not a number: None",
        options=HELPFUL,
    ),
    alone(
        "nectar-rank",
        {"prompt": "a?", "answers": [{"answer": "a", "rank": "nan"}]},
        "answer 1 is not a number",
    ),
    alone(
        "implicit-and-prompt",
        implicit("iap") | {"prompt": "Another?"},
        "is not that of the transcripts",
    ),
    alone(
        "texts-apart", {"chosen": "Blue.", "rejected": "Green."}, "do not begin with the same words"
    ),
    alone("texts-equal", {"chosen": "Blue.", "rejected": "Blue."}, "both texts are the same"),
    alone(
        "sharegpt-of-human",
        {"conversations": [TURN], "chosen": TURN, "rejected": TURN},
        "is a turn of the user",
    ),
    jsonl("kto-as-pairs", [kto("a"), kto("b", False)], "is no pair: put a better or worse reply"),
    jsonl(
        "more-than-the-format",
        [*({"prompt": f"more {n}?"} for n in range(30)), {"prompt": "more?", "reply": "a"}],
        RowsRead(30, {"is of format prompt-reply, the file of format prompt": 1}),
        **PROMPTS,
    ),
    jsonl("prompts-as-pairs", [{"prompt": "a?"}], "holds no preferences"),
    jsonl("texts-as-prompts", [{"text": "a"}], "holds no prompts", **PROMPTS),
    jsonl(
        "stepwise-as-pairs", [{"prompt": "a?", "completions": ["b"], "labels": [True]}], "not steps"
    ),
    jsonl(
        "oasst-messages", [MESSAGE], RowsRead(0, dropped={"the tree has no two ranked replies": 1})
    ),
    jsonl(
        "mixed-formats",
        [*pairs("mixed", 3), *UNPAIRED],
        "are of several formats (3 standard, 3 prompt-reply); split the file, or name one of them (--format, or",
    ),
    jsonl(
        "mixed-formats-named",
        [*pairs("mn", 3), *UNPAIRED],
        RowsRead(3, {"does not match": 3}),
        options={"format": "standard"},
    ),
    *(
        jsonl(
            f"implicit-prompt-{name}",
            [
                *(
                    {"prompt": value, "chosen": f"a b {n} c", "rejected": f"a b {n} d"}
                    for n in range(2)
                )
            ],
            f"keys prompt ({name})",
        )
        for name, value in (("int", 5), ("NoneType", None), ("bool", True))
    ),
    after(orca, "orca-tie", orca("ot", status="tie"), dropped("is not to be learned")),
    after(
        orca,
        "orca-tie-imitated",
        orca("oti", status="tie"),
        dropped("is not to be learned"),
        **DEMONSTRATIONS,
    ),
    after(orca, "orca-tie-prompt", orca("otp", status="tie"), RowsRead(13), **PROMPTS),
    after(orca, "orca-swapped", orca("os", status="swapped"), RowsRead(13)),
    after(turn_list, "turn-list-number", ["a", 5], "does not match", **DEMONSTRATIONS),
    after(turn_list, "turn-list-open", ["a", "b", "c"], "there is no reply", **DEMONSTRATIONS),
    after(moss, "moss-pair-short", {"chosen": ["a"], "rejected": ["b"]}, "a reply but no prompt"),
    after(moss, "moss-pair-other-prompt", {"chosen": ["c", "a"], "rejected": ["d", "b"]}, UNEQUAL),
]


def special(label: str, make: Any, message: str, name: str = "x.jsonl") -> OddFile:
    return OddFile(label, name, make, 0, message)


def loop(path: Path) -> None:
    path.symlink_to(path.with_name("y.jsonl"))
    path.with_name("y.jsonl").symlink_to(path)


def listening(path: Path) -> None:
    os.chdir(path.parent)  # the path of a socket is at most 108 bytes long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def questions(label: str, *changes: dict[str, Any]) -> bytes:
    """Return rows of columns that no known format has."""
    rows = [
        {"title": f"{label} {n}", "body": "text", "best": f"good {n}", "worst": f"bad {n}"}
        for n in range(12)
    ]
    return lines(
        *rows,
        *(
            {"title": f"{label} x", "body": "text", "best": "good x", "worst": "bad x"} | c
            for c in changes
        ),
    )


def mapped(
    label: str, expected: str | RowsRead, *changes: dict[str, Any], **options: Any
) -> OddFile:
    return OddFile(
        label, ".jsonl", questions(label, *changes), 12 + len(changes), expected, options=options
    )


COLUMNS = {"prompt": "title", "chosen": "best", "rejected": "worst"}
REPLIES = {"chosen": "best", "rejected": "worst"}
FILES += [
    special("folder", Path.mkdir, "x.jsonl holds no file of data"),
    special("symlink-loop", loop, "is no file that can be read"),
    special(
        "dangling-symlink",
        lambda path: path.symlink_to("gone.jsonl"),
        "is no file that can be read",
    ),
    special("fifo", os.mkfifo, "is no file that can be read"),
    special("missing", lambda path: None, "no file matches"),
    special("glob-of-nothing", lambda path: None, "no file matches", "*.parquet"),
    OddFile(
        "bytes-in-name",
        os.fsdecode(b"bytes-in-name\xff.jsonl"),
        lines(*pairs("b")),
        2,
        "is not UTF-8",
    ),
    special(
        "no-suffix",
        lambda path: path.write_bytes(lines(*pairs("a"))),
        "unknown kind of file",
        "pairs",
    ),
    special(
        "text-suffix", lambda path: path.write_bytes(b"a\n"), "unknown kind of file '.txt'", "x.txt"
    ),
    special(
        "bz2", lambda path: path.write_bytes(b"BZh9"), "unknown kind of file '.bz2'", "x.jsonl.bz2"
    ),
    special(
        "only-compression",
        lambda path: path.write_bytes(b"a"),
        "unknown kind of file '.gz'",
        "x.gz",
    ),
    OddFile("brackets", "x[1].jsonl", lines(*pairs("brackets")), 2, RowsRead(2)),
    OddFile("tilde", "~x~.jsonl", lines(*pairs("tilde")), 2, RowsRead(2)),
    OddFile("line-break-in-name", "x\ny.jsonl", lines(*pairs("line-break")), 2, RowsRead(2)),
    OddFile("spaces-in-name", " x y .jsonl", lines(*pairs("spaces")), 2, RowsRead(2)),
    OddFile("Chinese-name", "数据.jsonl", lines(*pairs("Chinese")), 2, RowsRead(2)),
    mapped("no-options", "is of no known format"),
    mapped("column-misspelt", "no row has a column 'bset'", columns=COLUMNS | {"chosen": "bset"}),
    mapped(
        "column-missing-once", RowsRead(12, {"does not match": 1}), {"title": None}, columns=COLUMNS
    ),
    mapped(
        "template-column-missing",
        "no row has a column 'text'",
        columns=REPLIES,
        template="{title} {text}",
    ),
    mapped(
        "template-null",
        RowsRead(12, {"body is missing": 1}),
        {"body": None},
        columns=REPLIES,
        template="{title} {body}",
    ),
    mapped("columns-without-pair", "holds no preferences", columns={"prompt": "title"}),
    mapped(
        "format-that-does-not-fit",
        RowsRead(0, {"does not match the format hh-rlhf": 12}),
        format="hh-rlhf",
    ),
    jsonl(
        "dotted-column",
        [*({"q": {"text": f"dotted {n}?"}, "a": "good", "b": "bad"} for n in range(2))],
        RowsRead(2),
        options={"columns": {"prompt": "q.text", "chosen": "a", "rejected": "b"}},
    ),
    *(
        jsonl(
            f"plain-{kind}", [*({name: f"plain {n}?"} for n in range(60))], RowsRead(60), kind=kind
        )
        for kind, name in (("prompts", "prompt"), ("pretrain", "text"))
    ),
]
