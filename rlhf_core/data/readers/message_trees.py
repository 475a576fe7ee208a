"""OpenAssistant's message trees (Köpf et al., 2023): ranked replies at every turn of a dialogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.config.collect import ReadOptions
from rlhf_core.data.readers.format import PAIRS, Format, Parsed, Undecided, has, number_of
from rlhf_core.data.readers.rankings import RankedReply, ranked_pairs
from rlhf_core.data.readers.turns import Refusal, Turn, reply_of, turn_of

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
            RankedReply(reply_of(_turn(node)["content"], "a reply"), -number_of(node["rank"], "rank"))
            for node in nodes
            if node.get("rank") is not None
        ]
        if kind == "prompts":
            parsed.append(Parsed(prompt))
        elif kind == "preferences":
            pairs = ranked_pairs(ranked, options.pairs) if ranked else []
            parsed += [Parsed(prompt, better.text, worse.text) for better, worse in pairs]
        elif ranked or len(nodes) == 1:
            best = max(ranked, key=lambda reply: reply.value).text if ranked else _turn(nodes[0])["content"]
            parsed.append(Parsed(prompt, reply=reply_of(best, "a reply")))
    if not parsed:
        raise Undecided("the tree has no two ranked replies to one prompt" if kind == "preferences" else "no replies")
    return parsed


def _message(record: Any, kind: str, options: ReadOptions) -> Sequence[Parsed]:
    raise Refusal("is one message of a tree")


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
        frozenset(),
        lambda r: has(r, message_id=str, role=str, text=str) and "parent_id" in r,
        _message,
        note="its rows are single messages: give the file of trees beside it (….trees.jsonl.gz)",
    ),
)
