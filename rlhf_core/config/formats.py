"""The known shapes of rows, as data: which columns hold the prompt, the replies and the preference.

A new format of columns is one entry here; ``rlhf_core/data/readers/shapes.py`` reads them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

# The kinds of rows that a format can serve as, best first.
PAIRS = ("preferences", "demonstrations", "prompts", "pretrain")
REPLIES = ("demonstrations", "prompts", "pretrain")
PROMPTS = ("prompts",)
TEXTS = ("pretrain",)
# A record with one of these columns has its prompt there.
OTHER_PROMPTS = "prompt instruction conversations messages"


@dataclass(frozen=True)
class Shape:
    """A shape of rows: the columns that a record of it has, and how they are read.

    Names of columns are separated by spaces if the first of them that is there is read.

    Attributes:
        example: What messages show of it.
        kinds: The kinds of rows that it can serve as, best first.
        prompt: The columns of the prompt.
        prompt_is: What the prompt's column has to hold: a word of ``HOLDS`` in
            ``rlhf_core/data/readers/formats.py``.
        system: The column of the prompt's system turn, if there may be one.
        replies: The columns of the replies. Of two without a label, the first is the better one.
        replies_are: What each of them has to hold.
        of_replies: If replies are objects, their keys of text and value.
        labels: The columns that say which reply is the better one.
        labels_are: What each of them has to hold.
        prefers: How they say it: ``index`` is the number of the better reply; ``strength`` goes
            from -3, where the first reply is much better, to 3.
        dimensions: The preferences that a record states side by side, of which a source names one.
        category: The column of the row's category.
        also: What further columns, which are not read, have to hold.
        lacks: Columns that only records of other shapes have.
        looks: A further condition on the values, by its name in ``LOOKS`` of
            ``rlhf_core/data/readers/shapes.py``.
        style: How the prompt is written if it is neither one text nor a list of turns, by its name
            in ``STYLES`` there.
        reads: What makes rows of a record, by its name in ``READS`` there.
        more: Further columns that are read if they are there.
        note: What to do if the format does not serve as the kind that is asked for.
    """

    name: str
    example: str
    kinds: tuple[str, ...] = PAIRS
    prompt: str = "prompt"
    prompt_is: str = "text"
    system: str = ""
    replies: tuple[str, ...] = ()
    replies_are: str = "text"
    of_replies: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    labels_are: str = "anything"
    prefers: Literal["first", "index", "strength"] = "first"
    dimensions: tuple[str, ...] = ()
    category: str = ""
    also: dict[str, str] = field(default_factory=dict)
    lacks: str = ""
    looks: str = ""
    style: str = ""
    reads: str = "columns"
    more: str = ""
    note: str = ""

    @property
    def needs(self) -> dict[str, str]:
        """What each column, or one of several, has to hold."""
        needs = dict.fromkeys(self.replies, self.replies_are)
        needs |= dict.fromkeys(self.labels, self.labels_are)
        needs |= self.also
        if self.prompt:
            needs[self.prompt] = self.prompt_is
        return needs

    @property
    def columns(self) -> str:
        """All columns that are read."""
        single = (self.prompt, self.system, self.category, self.more)
        return " ".join((*single, *self.replies, *self.labels))


# The first that fits a row is its format, so richer shapes come first.
SHAPES = (
    Shape(
        "oasst-trees",
        '{"message_tree_id": …, "prompt": {"role": "prompter", "text": …, "replies": [{…, "rank": 0}, …]}}',
        prompt_is="an object",
        also={"message_tree_id": "text"},
        reads="tree",
        more="message_tree_id",
    ),
    Shape(
        "oasst-messages",
        '{"message_id": …, "parent_id": …, "message_tree_id": …, "role": "prompter", "text": …}',
        prompt="text",
        also={"message_id": "text", "role": "text", "parent_id": "anything"},
        reads="tree",
        more="message_id role parent_id",
    ),
    Shape(
        "pku-saferlhf",
        '{"prompt": …, "response_0": …, "response_1": …, "better_response_id": 0, "safer_response_id": 1}',
        replies=("response_0", "response_1"),
        labels=("better_response_id", "safer_response_id"),
        prefers="index",
        dimensions=("helpful", "safe", "agreed"),
    ),
    Shape(
        "pku-saferlhf-single",
        '{"prompt": …, "response_0": …, "response_1": …, "better_response_id": 0}',
        replies=("response_0", "response_1"),
        labels=("better_response_id",),
        prefers="index",
    ),
    Shape(
        "helpsteer2-preference",
        '{"prompt": "…", "response_1": "…", "response_2": "…", "preference_strength": -3 to 3}',
        replies=("response_1", "response_2"),
        labels=("preference_strength",),
        prefers="strength",
        category="domain",
        style="helpsteer",
    ),
    Shape(
        "helpsteer3-preference",
        '{"context": […], "response1": …, "response2": …, "overall_preference": -3 to 3}',
        prompt="context",
        prompt_is="text or turns",
        replies=("response1", "response2"),
        labels=("overall_preference",),
        prefers="strength",
        category="domain",
    ),
    Shape(
        "helpsteer-ratings",
        '{"prompt": "…", "response": "…", "helpfulness": 0 to 4, "correctness": …}',
        PROMPTS,
        also={"helpfulness": "anything", "correctness": "anything", "response": "text"},
        style="helpsteer",
        note="its replies are rated, the worst of them too; HelpSteer2's comparisons are in its folder preference",
    ),
    Shape(
        "shp",
        '{"history": "…", "human_ref_A": "…", "human_ref_B": "…", "labels": 1 where A is preferred, else 0}',
        prompt="history",
        replies=("human_ref_B", "human_ref_A"),
        labels=("labels",),
        prefers="index",
        category="domain",
    ),
    Shape(
        "orca-dpo",
        '{"system": "…", "question": "…", "chosen": "…", "rejected": "…"} (or "input" for "question")',
        prompt="question input",
        replies=("chosen", "rejected"),
        lacks=OTHER_PROMPTS,
        looks="no transcripts",
        more="status",
    ),
    Shape(
        "open-orca",
        '{"system_prompt": "…", "question": "…", "response": "…"}',
        REPLIES,
        prompt="question",
        system="system_prompt",
        replies=("response",),
        lacks=OTHER_PROMPTS,
    ),
    Shape(
        "ultrafeedback-ratings",
        '{"instruction": …, "chosen_response": …, "rejected_response": …, "chosen_avg_rating": 5}',
        prompt="instruction",
        replies=("chosen_response", "rejected_response"),
    ),
    Shape(
        "ultrafeedback",
        '{"instruction": "…", "completions": [{"response": "…", "overall_score": 7.5}, …]}',
        prompt="instruction",
        replies=("completions",),
        replies_are="objects",
        of_replies=("response", "overall_score"),
        reads="objects",
    ),
    Shape(
        "nectar",
        '{"prompt": "…", "answers": [{"answer": "…", "rank": 1}, …]} (the best has the lowest rank)',
        prompt_is="text or turns",
        replies=("answers",),
        replies_are="objects",
        of_replies=("answer", "rank"),
        reads="objects",
    ),
    Shape(
        "ranking",
        '{"prompt": …, "responses": ["…", …], "scores": [7, …]} (or "ranks": the best has the lowest)',
        prompt="prompt instruction question",
        prompt_is="text or turns",
        replies=("responses completions generations",),
        replies_are="a list",
        labels=("scores ratings ranks",),
        labels_are="a list",
        lacks="chosen",
        reads="ranking",
    ),
    Shape(
        "stepwise",
        '{"prompt": "…", "completions": ["a step", …], "labels": [true, …]}',
        PROMPTS,
        prompt_is="text or turns",
        also={"completions": "a list", "labels": "a list"},
        note="reward models here judge whole replies, not steps",
    ),
    Shape(
        "hh-rlhf",
        '{"chosen": "\\n\\nHuman: … \\n\\nAssistant: …", "rejected": …}',
        prompt="",
        replies=("chosen", "rejected"),
        looks="transcripts",
        reads="transcripts",
        more="prompt",
    ),
    Shape(
        "sharegpt-ranking",
        '{"conversations": [{"from": "human", …}], "chosen": {"from": "gpt", …}, "rejected": …}',
        prompt="conversations",
        prompt_is="a list",
        replies=("chosen", "rejected"),
        replies_are="text, a turn or turns",
    ),
    Shape(
        "turn-list-pair",
        '{"chosen": ["user says", "assistant says"], "rejected": […]} (MOSS-RLHF reward data)',
        prompt="",
        replies=("chosen", "rejected"),
        replies_are="texts",
        looks="no prompt",
        reads="pair of turn lists",
        more="prompt",
    ),
    Shape(
        "conversational-implicit",
        '{"chosen": [{"role": …, "content": …}, …], "rejected": […]}',
        prompt="",
        replies=("chosen", "rejected"),
        replies_are="a list",
        looks="whole dialogues",
        reads="dialogues",
        more="prompt",
    ),
    Shape(
        "conversational",
        '{"prompt": [{"role": …, "content": …}], "chosen": […], "rejected": […]}',
        prompt_is="text or turns",
        replies=("chosen", "rejected"),
        replies_are="text or turns",
        looks="turns",
    ),
    Shape(
        "standard",
        '{"prompt": "…", "chosen": "…", "rejected": "…"}',
        prompt_is="text or turns",
        replies=("chosen", "rejected"),
        replies_are="anything",
        looks="two replies",
    ),
    Shape(
        "standard-implicit",
        '{"chosen": "The sky is blue.", "rejected": "The sky is green."}',
        prompt="",
        replies=("chosen", "rejected"),
        lacks="prompt",
        looks="two texts alone",
        reads="texts with one beginning",
    ),
    Shape(
        "alpaca-ranking",
        '{"instruction": "…", "input": "…", "chosen": "…", "rejected": "…"}',
        prompt="instruction",
        replies=("chosen", "rejected"),
        replies_are="text or a turn",
        style="alpaca",
        more="input history",
    ),
    Shape(
        "alpaca",
        '{"instruction": "…", "input": "…", "output": "…"}',
        REPLIES,
        prompt="instruction",
        replies=("output",),
        style="alpaca",
        more="input history",
    ),
    Shape(
        "messages",
        '{"messages": [{"role": …, "content": …}, …]} (or "conversations": ShareGPT)',
        REPLIES,
        prompt="messages conversations",
        prompt_is="a list",
        reads="dialogue",
    ),
    Shape(
        "turn-list",
        '["user says", "assistant says", …] (MOSS-RLHF)',
        REPLIES,
        prompt="",
        looks="a list of texts",
        reads="turn list",
    ),
    Shape(
        "prompt-reply",
        '{"prompt": …, "reply": "…"} (or completion, response)',
        REPLIES,
        prompt_is="text or turns",
        replies=("reply completion response output",),
        replies_are="a value",
        note="a reply that is labelled by itself is no pair: put a better or worse reply to its prompt beside it",
    ),
    Shape("prompt", '{"prompt": …}', PROMPTS, prompt_is="text or turns"),
    Shape("text", '{"text": "…"}', TEXTS, prompt="text", reads="text"),
)

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(shape.name for shape in SHAPES)]
