"""Published formats with values out of range, ties, missing preferences, and rows of another kind than asked for."""

from __future__ import annotations

from typing import Any

from unit.data.malformed.case import OddFile, Row, RowsRead, jsonl, pair, pairs

AS_TEXT, RENDERED = "is a dialogue written out as text", "is rendered by a chat template"
UNEQUAL = "the prompts of the two replies differ"


def hh(label: str, chosen: str | None = None, rejected: str | None = None, **more: Any) -> Row:
    start = f"\n\nHuman: {label}?\n\nAssistant:"
    return {"chosen": chosen or f"{start} good", "rejected": rejected or f"{start} bad"} | more


def hh_at(start: str, label: str, line: str) -> Row:
    """Return a row of transcripts with other white space before the first turn, and other line ends."""
    begin = f"{start}Human: {label}?{line * 2}Assistant: who?{line * 2}Human: you{line * 2}Assistant:"
    return {"chosen": f"{begin} good", "rejected": f"{begin} bad"}


def pku(label: str, better: Any = 0, safer: Any = 0) -> Row:
    replies = {"response_0": f"{label} a", "response_1": f"{label} b"}
    return {"prompt": f"{label}?"} | replies | {"better_response_id": better, "safer_response_id": safer}


def helpsteer(label: str, strength: Any = 2) -> Row:
    return {
        "prompt": f"{label}?",
        "response_1": f"{label} a",
        "response_2": f"{label} b",
        "preference_strength": strength,
    }


def shp(label: str, best: Any = 1) -> Row:
    return {"history": f"{label}?", "human_ref_A": f"{label} a", "human_ref_B": f"{label} b", "labels": best}


def ranking(label: str, scores: Any = (3, 1), name: str = "scores", replies: int = 2) -> Row:
    return {"prompt": f"{label}?", "responses": [f"{label} {n}" for n in range(replies)], name: list(scores)}


def ultrafeedback(label: str, *scores: Any) -> Row:
    replies = [{"response": f"{label} {n}", "overall_score": score} for n, score in enumerate(scores)]
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

    return {"chosen": turns(f"{label} {prompt}?", "good"), "rejected": turns(f"{label} {other or prompt}?", "bad")}


def after(make: Any, label: str, row: Any, expected: RowsRead | str, **more: Any) -> OddFile:
    """Return a file of twelve good rows by ``make`` and an odd one; a text as ``expected`` is why that is refused."""
    if isinstance(expected, str):
        expected = RowsRead(12, {expected: 1})
    rows = [make(f"{label} {n}") for n in range(12)]
    return jsonl(label, [*rows, row], expected, **more)


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
MESSAGE = {"message_id": "a", "parent_id": None, "role": "prompter", "text": "a?"}
UNPAIRED = [kto(f"unpaired {n}") for n in range(3)]
HELPFUL = {"dimension": "helpful"}
DEMONSTRATIONS, PROMPTS, PRETRAIN = ({"kind": kind} for kind in ("demonstrations", "prompts", "pretrain"))
FILES = [
    after(hh, "hh-other-prompt", hh("a", rejected="\n\nHuman: other?\n\nAssistant: bad"), UNEQUAL),
    after(hh, "hh-ends-with-human", hh("c", f"{HI}Assistant: x\n\nHuman: y"), "ends with a human turn"),
    after(hh, "hh-prompt-space", hh("hps", rejected="\n\nHuman: hps? \n\nAssistant: bad"), UNEQUAL),
    after(hh, "hh-no-assistant", hh("d", rejected="\n\nHuman: d?"), "rejected has no assistant's turn"),
    after(hh, "hh-with-other-prompt", hh("e", prompt="something else?"), "the prompt is not that of the transcripts"),
    after(hh, "hh-no-human", hh("f", "\n\nAssistant: good", "\n\nAssistant: bad"), "the transcript has no turns"),
    after(pku, "pku-index-2", pku("a", better=2), "better_response_id is 2, not 0 or 1", options=HELPFUL),
    after(pku, "pku-index-true", pku("a", better=True), "better_response_id is not a number", options=HELPFUL),
    after(helpsteer, "helpsteer-5", helpsteer("a", 5), "preference_strength is 5, not from -3 to 3"),
    after(helpsteer, "helpsteer-nan", helpsteer("a", float("nan")), "preference_strength is not a number"),
    after(shp, "shp-label-2", shp("a", 2), "labels is 2, not 0 or 1"),
    after(ranking, "ranking-ties", ranking("rt", (3, 1, 1), replies=3), RowsRead(14, expanded=1)),
    after(ranking, "ranking-too-few-scores", ranking("a", (3,)), "there are 2 responses but 1 scores"),
    after(ranking, "ranking-nan", ranking("a", (float("nan"), 1)), "score of reply 1 is not a number"),
    after(ranking, "ranking-nothing", ranking("a", (), replies=0), dropped("no reply is better than another")),
    after(ranking, "ranking-one", ranking("a", (1,), replies=1), dropped("no reply is better than another")),
    after(ranking, "ranks-ties", ranking("rk", (1, 1, 2), "ranks", 3), RowsRead(14, expanded=1)),
    after(
        scored, "ultrafeedback-no-score", ultrafeedback("a", 8, None), "overall_score of completion 2 is not a number"
    ),
    after(scored, "ultrafeedback-empty", ultrafeedback("a"), "does not match"),
    after(binarized, "scores-one-missing", binarized("om", 5, None), RowsRead(13)),
    after(binarized, "scores-text", binarized("a", "high", 5), "score_chosen is not a number"),
    after(implicit, "implicit-other-prompt", implicit("a", "which", "what"), UNEQUAL),
    after(tree, "tree-no-role", tree("a", role=None), "a message of the tree has no role"),
    after(tree, "tree-replies-text", tree("a", replies="none"), "the replies of a message are not a list"),
    after(tree, "tree-deleted", tree("a", deleted=True), dropped("no two ranked replies")),
    after(tree, "tree-rank-text", tree("a", replies=[said("b") | {"rank": "first"}]), "rank is not a number"),
    *(
        jsonl(f"hh-start-{n}", [*(hh_at(start, f"hs{n} {i}", line) for i in range(3))], RowsRead(3))
        for n, (start, line) in enumerate(
            (("", "\n"), (" \n\n", "\n"), ("\n", "\n"), ("\r\n\r\n", "\r\n"), ("", "\r\n"))
        )
    ),
    after(hh, "hh-one-stripped", hh("hos", chosen="Human: hos?\n\nAssistant: good"), RowsRead(13)),
    after(pair, "prompt-stripped", pair("ps", prompt="Human: ps?\n\nAssistant:"), RowsRead(13)),
    after(pair, "prompt-CRLF", pair("pc", prompt="\r\n\r\nHuman: pc?\r\n\r\nAssistant:"), RowsRead(13)),
    after(pair, "prompt-dense", pair("pd", prompt="Human: pd?\nAssistant:"), "without empty lines between its turns"),
    after(pair, "reply-CRLF", pair("rc", chosen="\r\n\r\nHuman: a?\r\n\r\nAssistant: b"), "is a whole transcript"),
    after(pair, "rendered", pair("r", chosen="<|im_start|>assistant\nyes<|im_end|>"), f"chosen {RENDERED}"),
    after(pair, "prompt-as-JSON", pair("pj", prompt='[{"role": "user", "content": "hi"}]'), AS_TEXT),
    after(pair, "reply-as-JSON", pair("rj", rejected='[{"from": "gpt", "value": "hi"}]'), AS_TEXT),
    after(pair, "reply-of-JSON", pair("roj", chosen='[{"role": "admin", "value": 3}]'), RowsRead(13)),
    after(pair, "margin-negative", pair("mn", margin=-2), "the margin prefers the other reply"),
    after(pair, "margin-against-scores", binarized("mas", 1, 5) | {"margin": 1}, "the scores prefer the other reply"),
    after(pair, "margin-against-itself", binarized("mai", 5, 1) | {"margin": -4}, "the margin prefers the other reply"),
    after(pair, "margin-of-equal-scores", binarized("mes", 5, 5) | {"margin": 1}, RowsRead(13)),
    after(pair, "margin-negative-imitated", pair("mni", margin=-2), "the margin prefers", **DEMONSTRATIONS),
    after(pair, "scores-against-imitated", binarized("mni", 1, 5), "the scores prefer", **PRETRAIN),
    after(pair, "label-beside-pair", pair("lbp") | {"label": 0}, RowsRead(13, unused=["label"])),
    jsonl("kto-as-pairs", [kto("a"), kto("b", False)], "is no pair: put a better or worse reply"),
    jsonl("prompts-as-pairs", [{"prompt": "a?"}], "holds no preferences"),
    jsonl("texts-as-prompts", [{"text": "a"}], "holds no prompts", **PROMPTS),
    jsonl("stepwise-as-pairs", [{"prompt": "a?", "completions": ["b"], "labels": [True]}], "not steps"),
    jsonl("oasst-messages", [MESSAGE], RowsRead(0, dropped={"the tree has no two ranked replies": 1})),
    jsonl("mixed-formats", [*pairs("mixed", 3), *UNPAIRED], "are of several formats (3 standard, 3 prompt-reply)"),
    jsonl(
        "mixed-formats-named",
        [*pairs("mn", 3), *UNPAIRED],
        RowsRead(3, {"does not match": 3}),
        options={"format": "standard"},
    ),
    *(
        jsonl(
            f"implicit-prompt-{name}",
            [*({"prompt": value, "chosen": f"a b {n} c", "rejected": f"a b {n} d"} for n in range(2))],
            f"keys prompt ({name})",
        )
        for name, value in (("int", 5), ("NoneType", None), ("bool", True))
    ),
    after(orca, "orca-tie", orca("ot", status="tie"), dropped("is not to be learned")),
    after(orca, "orca-tie-imitated", orca("oti", status="tie"), dropped("is not to be learned"), **DEMONSTRATIONS),
    after(orca, "orca-tie-prompt", orca("otp", status="tie"), RowsRead(13), **PROMPTS),
    after(orca, "orca-swapped", orca("os", status="swapped"), RowsRead(13)),
    after(turn_list, "turn-list-number", ["a", 5], "does not match", **DEMONSTRATIONS),
    after(turn_list, "turn-list-open", ["a", "b", "c"], "there is no reply", **DEMONSTRATIONS),
    after(moss, "moss-pair-short", {"chosen": ["a"], "rejected": ["b"]}, "a reply but no prompt"),
    after(moss, "moss-pair-other-prompt", {"chosen": ["c", "a"], "rejected": ["d", "b"]}, UNEQUAL),
]
