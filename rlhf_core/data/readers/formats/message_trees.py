"""OpenAssistant's message trees (Köpf et al., 2023): ranked replies at every turn of a dialogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.config.stages.collect import ReadOptions
from rlhf_core.data.readers.containers.records import Record
from rlhf_core.data.readers.formats.format import PAIRS, Format, Parsed, Undecided, has, number_of
from rlhf_core.data.readers.formats.rankings import RankedReply, ranked_pairs
from rlhf_core.data.readers.formats.turns import Refusal, Turn, reply_of, turn_of

Node = dict[str, Any]


def _turn(node: Any) -> Turn:
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
        path, replies = [*before, _turn(node)], _usable(node.get("replies"))
        if path[-1]["role"] == "user":
            yield path, [reply for reply in replies if _turn(reply)["role"] == "assistant"]
        waiting += [(path, reply) for reply in reversed(replies)]


def _tree(record: Any, kind: str, options: ReadOptions) -> Sequence[Parsed]:
    """Read a tree: pairs of the ranked replies to each prompt, the best reply to each, or the prompts themselves.

    A reply without a rank is in no pair, and is a demonstration where it is the only reply.
    """
    parsed: list[Parsed] = []
    for prompt, nodes in _prompts(record["prompt"]):
        ranked = [
            RankedReply(reply_of(_turn(node), "a reply"), -number_of(node["rank"], "rank"))
            for node in nodes
            if node.get("rank") is not None
        ]
        if kind == "prompts":
            parsed.append(Parsed(prompt))
        elif kind == "preferences":
            pairs = ranked_pairs(ranked, options.pairs) if ranked else []
            parsed += [Parsed(prompt, better.text, worse.text) for better, worse in pairs]
        elif ranked or len(nodes) == 1:
            best = max(ranked, key=lambda reply: reply.value).text if ranked else reply_of(_turn(nodes[0]), "a reply")
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
