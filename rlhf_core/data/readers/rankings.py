"""Rankings: several replies to a prompt, with scores or ranks, read as pairs of a better and a worse reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from rlhf_core.config.data import PairChoice, ReadOptions
from rlhf_core.data.readers.content import Record
from rlhf_core.data.readers.format import PAIRS, PROMPTS, Format, Parsed, Undecided, has, number_of
from rlhf_core.data.readers.turns import Refusal, Turn, prompt_of, reply_of, text_of, turn_of

REPLY_LISTS = ("responses", "completions", "generations")
VALUE_LISTS = ("scores", "ratings", "ranks")
PROMPT_NAMES = ("prompt", "instruction", "question")


Node = dict[str, Any]


@dataclass(frozen=True)
class RankedReply:
    """A reply and what it is ordered by: more is better."""

    text: str
    value: float


def ranked_pairs(replies: Sequence[RankedReply], choice: PairChoice) -> list[tuple[RankedReply, RankedReply]]:
    """Return pairs of a better and a worse reply; replies of equal value are never paired.

    Args:
        replies: In any order.
        choice: ``all`` pairs, K(K-1)/2 of K replies; ``adjacent``: each reply and the next worse; ``best_worst``.
    """
    ordered = sorted(replies, key=lambda reply: -reply.value)
    if choice == "all":
        candidates = list(combinations(ordered, 2))
    elif choice == "adjacent":
        candidates = list(pairwise(ordered))
    else:
        candidates = [(ordered[0], ordered[-1])] if ordered else []
    return [(better, worse) for better, worse in candidates if better.value > worse.value]


def parsed_ranking(
    prompt: list[Turn], replies: Sequence[RankedReply], kind: str, choice: PairChoice, *, values_are_scores: bool
) -> list[Parsed]:
    """Return a ranking as rows of ``kind``: as pairs, as the best reply alone, or as its prompt.

    A pair's margin is the difference of its scores; a difference of ranks says nothing of how much better a reply is.

    Raises:
        Undecided: No reply is better than another.
    """
    if kind == "prompts":
        return [Parsed(prompt)]
    pairs = ranked_pairs(replies, choice)
    if not pairs:
        raise Undecided("no reply is better than another")
    if kind != "preferences":
        return [Parsed(prompt, reply=max(replies, key=lambda reply: reply.value).text)]
    return [
        Parsed(prompt, better.text, worse.text, margin=better.value - worse.value if values_are_scores else None)
        for better, worse in pairs
    ]


def _are_objects(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _ultrafeedback(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    """Read UltraFeedback (Cui et al., 2023), whose completions may each have been asked for by a system prompt."""
    prompt = prompt_of(record["instruction"])
    by_system: dict[str, list[RankedReply]] = {}
    for number, completion in enumerate(record["completions"], 1):
        if not has(completion, response=str):
            raise Refusal(f"completion {number} has no response")
        score = number_of(completion.get("overall_score"), f"overall_score of completion {number}")
        system = (completion.get("custom_system_prompt") or "") if options.system_prompts else ""
        reply = RankedReply(reply_of(completion["response"], f"completion {number}"), score)
        by_system.setdefault(text_of(system, f"custom_system_prompt of completion {number}"), []).append(reply)
    if not options.system_prompts or kind == "prompts":
        replies = [reply for group in by_system.values() for reply in group]
        return parsed_ranking(prompt, replies, kind, options.pairs, values_are_scores=True)
    return _under_system_prompts(prompt, by_system, kind, options.pairs)


def _under_system_prompts(
    prompt: list[Turn], by_system: dict[str, list[RankedReply]], kind: str, choice: PairChoice
) -> list[Parsed]:
    """Return the pairs of replies to one system prompt, which is a turn of theirs; or the best reply with its own.

    Raises:
        Undecided: No two replies, or of preferences none to one system prompt, differ in value.
    """
    values = {reply.value for replies in by_system.values() for reply in replies}
    if len(values) < 2:
        raise Undecided("no reply is better than another")
    parsed: list[Parsed] = []
    best = max(values)
    for system, replies in by_system.items():
        whole = [*([{"role": "system", "content": system}] if system else []), *prompt]
        if kind == "preferences":
            parsed += [
                Parsed(whole, better.text, worse.text, margin=better.value - worse.value)
                for better, worse in ranked_pairs(replies, choice)
            ]
        elif not parsed:
            parsed = [Parsed(whole, reply=reply.text) for reply in replies if reply.value == best][:1]
    if not parsed:
        raise Undecided("no reply is better than another to the same system prompt")
    return parsed


def _nectar(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    replies = []
    for number, answer in enumerate(record["answers"], 1):
        if not has(answer, answer=str):
            raise Refusal(f"answer {number} has no text")
        rank = number_of(answer.get("rank"), f"rank of answer {number}")
        replies.append(RankedReply(reply_of(answer["answer"], f"answer {number}"), -rank))
    return parsed_ranking(prompt_of(record["prompt"]), replies, kind, options.pairs, values_are_scores=False)


def _first(record: Any, names: Sequence[str], kind: type | tuple[type, ...]) -> str | None:
    return next((name for name in names if isinstance(record.get(name), kind)), None)


def _is_ranking(record: Any) -> bool:
    if not isinstance(record, dict) or not _first(record, PROMPT_NAMES, (str, list)) or "chosen" in record:
        return False
    return bool(_first(record, REPLY_LISTS, list) and _first(record, VALUE_LISTS, list))


def _ranking(record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    prompt_name, list_name, value_name = (
        str(_first(record, names, kinds))
        for names, kinds in ((PROMPT_NAMES, (str, list)), (REPLY_LISTS, list), (VALUE_LISTS, list))
    )
    texts, values = record[list_name], record[value_name]
    if len(texts) != len(values):
        raise Refusal(f"there are {len(texts)} {list_name} but {len(values)} {value_name}")
    sign = -1.0 if value_name == "ranks" else 1.0
    replies = [
        RankedReply(reply_of(text, f"reply {number}"), sign * number_of(value, f"{value_name[:-1]} of reply {number}"))
        for number, (text, value) in enumerate(zip(texts, values, strict=True), 1)
    ]
    return parsed_ranking(
        prompt_of(record[prompt_name]), replies, kind, options.pairs, values_are_scores=value_name != "ranks"
    )


def _is_stepwise(record: Any) -> bool:
    return has(record, prompt=(str, list), completions=list, labels=list)


def _tree_turn(node: Any) -> Turn:
    if not has(node, role=str, text=str):
        raise Refusal("a message of the tree has no role or no text")
    return turn_of({"role": node["role"], "content": node["text"]})


def _usable(replies: Any) -> list[Node]:
    """Return the messages that were neither deleted nor rejected by reviewers; what follows those goes with them."""
    if replies is None:
        return []
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise Refusal("the replies of a message are not a list of messages")
    return [reply for reply in replies if not reply.get("deleted") and reply.get("review_result") is not False]


def _prompts(root: Node) -> Iterator[tuple[list[Turn], list[Node]]]:
    """Yield every path that ends with the user's turn, and the replies there."""
    waiting: list[tuple[list[Turn], Node]] = [([], node) for node in _usable([root])]
    while waiting:
        before, node = waiting.pop()
        path, replies = [*before, _tree_turn(node)], _usable(node.get("replies"))
        if path[-1]["role"] == "user":
            yield path, [reply for reply in replies if _tree_turn(reply)["role"] == "assistant"]
        waiting += [(path, reply) for reply in reversed(replies)]


def _tree(record: Any, kind: str, options: ReadOptions) -> Sequence[Parsed]:
    """Read a tree: pairs of the ranked replies to each prompt, the best reply to each, or the prompts themselves.

    A reply without a rank is in no pair, and is a demonstration where it is the only reply.
    """
    parsed: list[Parsed] = []
    for prompt, nodes in _prompts(record["prompt"]):
        ranked = [
            RankedReply(reply_of(_tree_turn(node), "a reply"), -number_of(node["rank"], "rank"))
            for node in nodes
            if node.get("rank") is not None
        ]
        if kind == "prompts":
            parsed.append(Parsed(prompt))
        elif kind == "preferences":
            pairs = ranked_pairs(ranked, options.pairs) if ranked else []
            parsed += [Parsed(prompt, better.text, worse.text) for better, worse in pairs]
        elif ranked or len(nodes) == 1:
            best = (
                max(ranked, key=lambda reply: reply.value).text if ranked else reply_of(_tree_turn(nodes[0]), "a reply")
            )
            parsed.append(Parsed(prompt, reply=best))
    if not parsed:
        raise Undecided("the tree has no two ranked replies to one prompt" if kind == "preferences" else "no replies")
    return parsed


def _is_message(value: Any) -> bool:
    return has(value, message_id=str, role=str, text=str) and "parent_id" in value


def _joined(records: Sequence[Record]) -> list[Record]:
    """Join messages into trees by ``parent_id``; a tree has the position of its first message.

    Messages that no tree reaches are records with that as their problem, other rows stay what they are.
    """
    joined: list[Record] = []
    messages: dict[str, Record] = {}
    for record in records:
        if record.problem or not _is_message(record.value):
            joined.append(record)
        elif record.value["message_id"] in messages:
            joined.append(Record(record.position, record.value, "its message_id occurs twice"))
        elif not isinstance(record.value["parent_id"], str | None):
            joined.append(Record(record.position, record.value, "its parent_id is not text"))
        else:
            messages[record.value["message_id"]] = record
    nodes: dict[str, Node] = {name: {**record.value, "replies": []} for name, record in messages.items()}
    waiting = []
    for name, node in nodes.items():
        if not node["parent_id"]:
            waiting.append(node)
            joined.append(Record(messages[name].position, {"message_tree_id": name, "prompt": node}))
        elif node["parent_id"] in nodes:
            nodes[node["parent_id"]]["replies"].append(node)
    reached = set()
    while waiting:
        node = waiting.pop()
        reached.add(node["message_id"])
        waiting += node["replies"]
    for name in nodes.keys() - reached:
        record = messages[name]
        known = record.value["parent_id"] in nodes
        problem = "its parents do not lead to the first message of a tree" if known else "its parent is not in the file"
        joined.append(Record(record.position, record.value, problem))
    return sorted(joined, key=lambda record: record.position)


MESSAGE_TREES = (
    Format(
        "oasst-trees",
        '{"message_tree_id": "…", "prompt": {"role": "prompter", "text": "…", "replies": [{…, "rank": 0}, …]}}',
        PAIRS,
        lambda r: has(r, message_tree_id=str, prompt=dict),
        _tree,
    ),
    Format(
        "oasst-messages",
        '{"message_id": "…", "parent_id": "…", "message_tree_id": "…", "role": "prompter", "text": "…"}',
        PAIRS,
        _is_message,
        _tree,
        join=_joined,
        joined_as="oasst-trees",
    ),
)


RANKINGS = (
    Format(
        "ultrafeedback",
        '{"instruction": "…", "completions": [{"response": "…", "overall_score": 7.5}, …]}',
        PAIRS,
        lambda r: has(r, instruction=str, completions=list) and _are_objects(r["completions"]),
        _ultrafeedback,
    ),
    Format(
        "nectar",
        '{"prompt": "…", "answers": [{"answer": "…", "rank": 1}, …]} (the best has the lowest rank)',
        PAIRS,
        lambda r: has(r, prompt=(str, list), answers=list) and _are_objects(r["answers"]),
        _nectar,
    ),
    Format(
        "ranking",
        '{"prompt": …, "responses": ["…", …], "scores": [7, …]} (or "ranks": the best has the lowest)',
        PAIRS,
        _is_ranking,
        _ranking,
    ),
    Format(
        "stepwise",
        '{"prompt": "…", "completions": ["a step", …], "labels": [true, …]}',
        PROMPTS,
        _is_stepwise,
        lambda record, kind, options: [Parsed(prompt_of(record["prompt"]))],
        note="reward models here judge whole replies, not steps",
    ),
)
