"""Rankings: several replies with scores or ranks, read as pairs of a better and a worse one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from rlhf_core.config.data import PairChoice, ReadOptions
from rlhf_core.config.formats import Shape
from rlhf_core.data.readers.formats import Needs, Parsed, Undecided, first_column, number_of
from rlhf_core.data.readers.turns import Refusal, Turn, prompt_of, reply_of, text_of, turn_of
from rlhf_core.data.row_counts import Record

Node = dict[str, Any]


class RankedReply(NamedTuple):
    """A reply and the value that it is ordered by: more is better."""

    text: str
    value: float


def ranked_pairs(
    replies: Sequence[RankedReply], choice: PairChoice
) -> list[tuple[RankedReply, RankedReply]]:
    """Return pairs of a better and a worse reply; replies of equal value are never paired.

    Args:
        replies: In any order.
        choice: ``all`` pairs, K(K-1)/2 of K replies; ``adjacent``: each reply and the next worse;
            ``best_worst``.
    """
    ordered = sorted(replies, key=lambda reply: -reply.value)
    if choice == "best_worst":
        ordered = [*ordered[:1], *ordered[-1:]]
    candidates = combinations(ordered, 2) if choice == "all" else pairwise(ordered)
    return [(better, worse) for better, worse in candidates if better.value > worse.value]


def ranking_rows(
    prompt: list[Turn],
    by_system: Mapping[str, Sequence[RankedReply]],
    kind: str,
    choice: PairChoice,
    scored: bool,
) -> list[Parsed]:
    """Return a ranking as rows of ``kind``: as pairs, as the best reply alone, or as its prompt.

    Args:
        prompt: The prompt of all replies, without a system prompt.
        by_system: The replies by the system prompt that each was asked for with; "" for none.
            Replies to different system prompts are not paired.
        scored: Whether the difference of two values is the margin of a pair. That of ranks would
            not say how much better a reply is.

    Raises:
        Undecided: No reply is better than another.
    """
    if kind == "prompts":
        return [Parsed(prompt)]
    values: set[float] = set()
    for replies in by_system.values():
        values.update(reply.value for reply in replies)
    if len(values) < 2:
        raise Undecided("no reply is better than another")
    rows: list[Parsed] = []
    for system, replies in by_system.items():
        whole = prompt
        if system:
            whole = [{"role": "system", "content": system}, *prompt]
        if kind == "preferences":
            for better, worse in ranked_pairs(replies, choice):
                margin = better.value - worse.value if scored else None
                rows.append(Parsed(whole, better.text, worse.text, margin=margin))
            continue
        for reply in replies:
            if reply.value == max(values):
                return [Parsed(whole, reply=reply.text)]
    if not rows:
        raise Undecided("no reply is better than another to the same system prompt")
    return rows


def _replies_of_objects(shape: Shape, record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    """Read replies that are objects with a score or rank: UltraFeedback and Nectar.

    UltraFeedback (Cui et al., 2023) may have a system prompt for each completion; Nectar is of
    Zhu et al. (2023).
    """
    (column,) = shape.replies
    text, value = shape.of_replies
    scored = value != "rank"
    by_system: dict[str, list[RankedReply]] = {}
    for number, item in enumerate(record[column], 1):
        name = f"{column[:-1]} {number}"
        if not isinstance(item.get(text), str):
            raise Refusal(f"{name} has no {text}")
        given = number_of(item.get(value), f"{value} of {name}")
        if not scored:
            given = -given
        reply = RankedReply(reply_of(item[text], name), given)
        system = ""
        if options.system_prompts:
            asked = item.get("custom_system_prompt") or ""
            system = text_of(asked, f"custom_system_prompt of {name}")
        by_system.setdefault(system, []).append(reply)
    return ranking_rows(prompt_of(record[shape.prompt]), by_system, kind, options.pairs, scored)


def _ranking(shape: Shape, record: Any, kind: str, options: ReadOptions) -> list[Parsed]:
    """Read a list of replies, and a list of their scores or ranks."""
    columns = (first_column(record, names, held) for names, held in shape.needs.items())
    list_name, value_name, prompt_name = map(str, columns)
    texts = record[list_name]
    values = record[value_name]
    if len(texts) != len(values):
        raise Refusal(f"there are {len(texts)} {list_name} but {len(values)} {value_name}")
    scored = value_name != "ranks"
    replies = []
    for number, (text, value) in enumerate(zip(texts, values, strict=True), 1):
        name = f"reply {number}"
        given = number_of(value, f"{value_name[:-1]} of {name}")
        if not scored:
            given = -given
        replies.append(RankedReply(reply_of(text, name), given))
    prompt = prompt_of(record[prompt_name])
    return ranking_rows(prompt, {"": replies}, kind, options.pairs, scored)


_has_text = Needs(role=str, text=str)


def _tree_turn(node: Any) -> Turn:
    if not _has_text(node):
        raise Refusal("a message of the tree has no role or no text")
    return turn_of({"role": node["role"], "content": node["text"]})


def _usable(replies: Any) -> list[Node]:
    """Return the messages that were neither deleted nor rejected by reviewers.

    The answers to the others are left out with them.
    """
    if replies is None:
        return []
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise Refusal("the replies of a message are not a list of messages")
    usable = []
    for reply in replies:
        if not reply.get("deleted") and reply.get("review_result") is not False:
            usable.append(reply)
    return usable


def _prompts(root: Node) -> Iterator[tuple[list[Turn], list[Node]]]:
    """Yield every path that ends with the user's turn, and the replies there."""
    waiting: list[tuple[list[Turn], Node]] = [([], node) for node in _usable([root])]
    while waiting:
        before, node = waiting.pop()
        path = [*before, _tree_turn(node)]
        replies = _usable(node.get("replies"))
        if path[-1]["role"] == "user":
            yield path, [reply for reply in replies if _tree_turn(reply)["role"] == "assistant"]
        waiting += [(path, reply) for reply in reversed(replies)]


def _tree(shape: Shape, record: Any, kind: str, options: ReadOptions) -> Sequence[Parsed]:
    """Read a tree: pairs of ranked replies to each prompt, the best reply to each, or the prompts.

    A reply without a rank is in no pair, and is a demonstration if it is the only reply.
    """
    rows: list[Parsed] = []
    for prompt, nodes in _prompts(record["prompt"]):
        if len(nodes) == 1 and kind in ("demonstrations", "pretrain"):
            nodes = [nodes[0] | {"rank": 0}]
        replies = []
        for node in nodes:
            if node.get("rank") is not None:
                text = reply_of(_tree_turn(node), "a reply")
                replies.append(RankedReply(text, -number_of(node["rank"], "rank")))
        if kind == "prompts":
            rows.append(Parsed(prompt))
        elif kind == "preferences":
            for better, worse in ranked_pairs(replies, options.pairs):
                rows.append(Parsed(prompt, better.text, worse.text))
        elif replies:
            best = max(replies, key=lambda reply: reply.value)
            rows.append(Parsed(prompt, reply=best.text))
    if rows:
        return rows
    if kind == "preferences":
        raise Undecided("the tree has no two ranked replies to one prompt")
    raise Undecided("no replies")


_is_message = Needs("parent_id", message_id=str, role=str, text=str)


def joined_messages(records: Sequence[Record]) -> list[Record]:
    """Join messages into trees by ``parent_id``; a tree has the position of its first message.

    Messages that no tree reaches become records with that as their problem. Other rows stay as
    they are.
    """
    joined: list[Record] = []
    messages: dict[str, Record] = {}
    for record in records:
        value = record.value
        if record.problem or not _is_message(value):
            joined.append(record)
        elif value["message_id"] in messages:
            joined.append(Record(record.position, value, "its message_id occurs twice"))
        elif not isinstance(value["parent_id"], str | None):
            joined.append(Record(record.position, value, "its parent_id is not text"))
        else:
            messages[value["message_id"]] = record
    nodes: dict[str, Node] = {}
    for name, record in messages.items():
        nodes[name] = {**record.value, "replies": []}
    for node in nodes.values():
        parent = nodes.get(node["parent_id"])
        if parent is not None:
            parent["replies"].append(node)
    waiting = [node for node in nodes.values() if not node["parent_id"]]
    for node in waiting:
        name = node["message_id"]
        joined.append(Record(messages[name].position, {"message_tree_id": name, "prompt": node}))
    lost = dict(messages)
    while waiting:
        node = waiting.pop()
        del lost[node["message_id"]]
        waiting += node["replies"]
    for record in lost.values():
        problem = "its parent is not in the file"
        if record.value["parent_id"] in nodes:
            problem = "its parents do not lead to the first message of a tree"
        joined.append(Record(record.position, record.value, problem))
    return sorted(joined, key=lambda record: record.position)


RANKINGS = {
    "tree": _tree,
    "objects": _replies_of_objects,
    "ranking": _ranking,
}
