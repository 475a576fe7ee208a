"""Lengths of sequences: by the limits of the settings, and as a workspace's own data has them."""

from __future__ import annotations

from pathlib import Path

from clean_files import write_rows
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.base import BaseConfig
from rlhf_core.config.loading import check_params
from rlhf_core.data.batches import token_budget_batches
from rlhf_core.data.schema import Demonstration, Message, Preference, PretrainText, Prompt
from rlhf_core.data.tokens import encode_dialogue, encode_prompt
from rlhf_core.models.causal_lm import new_model, save_policy, train_tokenizer
from rlhf_extras.memory.sequence_lengths import (
    LongestSequences,
    lengths_from_limits,
    lengths_of_workspace,
)

SHAPE = BaseConfig(
    vocab_size=280, hidden_size=16, intermediate_size=32, layers=1, heads=2, max_positions=128
)


def test_limits_bound_lengths_and_the_longest_prompt_can_be_given() -> None:
    params = check_params({"sft": {"max_tokens": 256}, "ppo": {"max_new_tokens": 64}})
    lengths = lengths_from_limits(params, 512)
    # 16000 characters of a prompt are about 5,333 tokens, more than the positions leave.
    assert (lengths.prompt, lengths.demonstrations.width, lengths.ptx.width) == (448, 256, 512)
    assert lengths_from_limits(params, None).prompt == 16000 // 3
    assert lengths.source == "the limits of the settings, at 3 characters per token"
    known = params.model_copy(
        update={"plan": params.plan.model_copy(update={"prompt_tokens": 30, "ptx_tokens": 90})}
    )
    given = lengths_from_limits(known, 512)
    assert (given.prompt, given.ptx.rows, given.demonstrations.width) == (30, ((90, 90),), 256)
    assert given.source == "plan.prompt_tokens, plan.ptx_tokens and the limits of the settings"
    assert (
        lengths_from_limits(known, 80).ptx.width == 80
    )  # ptx leaves out what is longer than the model's positions


def test_the_heaviest_batch_is_that_of_the_longest_rows() -> None:
    data = LongestSequences(((10, 4), (9, 9), (3, 1)))
    assert vars(data.batch(2)) == {"rows": 2, "width": 10, "scored": 13}
    assert vars(data.batch(4)) == {
        "rows": 4,
        "width": 10,
        "scored": 15,
    }  # the last row stands for the rest


@given(
    lengths=st.lists(st.integers(2, 60), min_size=8, max_size=80),
    budget=st.integers(40, 900),
    smallest=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_no_batch_of_pairs_is_heavier_than_the_planned_one(
    lengths: list[int], budget: int, smallest: int, seed: int
) -> None:
    rows = LongestSequences(
        tuple(sorted(((length, length - 1) for length in lengths), reverse=True))
    )
    planned = rows.pairs(budget, smallest, 16)
    batches = token_budget_batches(lengths, budget, smallest, 16, seed, 0)
    padded = [2 * len(batch) * max(lengths[i] for i in batch) for batch in batches]
    # The last pairs of an epoch, fewer than ``smallest``, may join a full batch.
    heavier = [size for size in padded if size > planned.tokens]
    assert len(heavier) <= 1
    assert all(size <= planned.tokens + 2 * (smallest - 1) * max(lengths) for size in heavier)


def asked(words: int) -> list[Message]:
    return [Message("user", " ".join(["why"] * words))]


def test_the_longest_rows_that_training_keeps_are_found(tmp_path: Path) -> None:
    clean = tmp_path / "data" / "clean"
    params = check_params({"sft": {"max_tokens": 60}})
    assert lengths_of_workspace(tmp_path, params) is None
    spoken = [
        Demonstration(str(n), asked(2), "so " * n, "fact", "test", str(n)) for n in (4, 9, 90)
    ]
    paired = [
        Preference(str(n), asked(1), "yes " * n, "no " * 2 * n, None, "fact", "test", str(n))
        for n in (3, 5)
    ]
    write_rows(clean / "demonstrations" / "train.parquet", spoken)
    write_rows(clean / "preferences" / "train.parquet", paired)
    write_rows(clean / "prompts" / "train.parquet", [Prompt("1", asked(7), "fact", "test", "1")])
    assert lengths_of_workspace(tmp_path, params) is None  # no tokenizer yet
    tokenizer = train_tokenizer(["why so yes no"], SHAPE.vocab_size)
    save_policy(tmp_path / "models" / "base", new_model(SHAPE, tokenizer, seed=1), tokenizer)

    found = lengths_of_workspace(tmp_path, params)
    assert found is not None
    sizes = [encode_dialogue(tokenizer, row.prompt, row.reply) for row in spoken]
    whole = [(len(prompt) + len(reply), len(reply)) for prompt, reply in sizes]
    # SFT leaves rows out that are over its limit; ptx, which trains on the same texts, does not.
    assert whole[2][0] > 60
    assert list(found.demonstrations.rows) == [whole[1], whole[0]]
    assert list(found.ptx.rows) == [whole[2], whole[1], whole[0]]
    short = lengths_of_workspace(tmp_path, params, positions=whole[2][0] - 1)
    assert short is not None and list(short.ptx.rows) == [whole[1], whole[0]]
    assert found.prompt == len(encode_prompt(tokenizer, asked(7)))
    prompt, chosen = encode_dialogue(tokenizer, paired[1].prompt, paired[1].chosen)
    _, rejected = encode_dialogue(tokenizer, paired[1].prompt, paired[1].rejected)
    assert found.pairs.rows[0] == (len(prompt) + len(rejected), len(chosen)) and len(
        rejected
    ) > len(chosen)

    of_both = check_params({"sft": {"max_tokens": 60}, "ppo": {"ptx": {"data": "both"}}})
    assert lengths_of_workspace(tmp_path, of_both) == found  # there are no plain texts
    given = check_params(
        {"plan": {"prompt_tokens": 50, "ptx_tokens": 900}, "ppo": {"ptx": {"data": "pretrain"}}}
    )
    assert lengths_of_workspace(tmp_path, given) is None  # the texts of ptx are not there
    write_rows(
        clean / "pretrain" / "train.parquet", [PretrainText("1", "why so", "text", "test", "1")]
    )
    again = lengths_of_workspace(tmp_path, given)
    # What can be measured is not taken from the settings.
    assert again is not None and again.prompt == found.prompt and again.ptx.width < found.ptx.width
    both = lengths_of_workspace(tmp_path, of_both)
    assert both is not None and list(both.ptx.rows) == [*found.ptx.rows, *again.ptx.rows]
