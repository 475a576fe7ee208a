"""Which of several replies a model finds likeliest, without sampling (Hendrycks et al. 2021, MMLU; C-Eval)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.batches import whole_passes
from rlhf_core.data.encoding import encode_prompt, encode_reply, pad_id, right_pad
from rlhf_core.evaluation.benchmarks.multiple_choice.questions import MultipleChoiceSet
from rlhf_core.models.forward import lazy_logits, position_ids_from_mask
from rlhf_core.models.starting.base import fitting_length
from rlhf_core.runtime import distributed
from rlhf_core.training.examples import Example, by_length

POSITIONS_PER_CHUNK = 256  # positions whose logits exist at once, which bounds memory


def answer_questions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: MultipleChoiceSet, batch_size: int
) -> list[int | None]:
    """Return the position of the choice that the model finds likeliest for each question.

    None for a question that, with a choice, is longer than the model has positions: nothing is cut. Of equally likely
    choices the first counts.
    """
    dialogues = zip(questions.questions, questions.dialogues(), strict=True)
    asked: list[list[Example]] = []
    for question, dialogue in dialogues:
        prompt = encode_prompt(tokenizer, dialogue)
        replies = (encode_reply(tokenizer, text, finished=False) for text in question.answers(questions.score))
        asked.append([Example(prompt, reply) for reply in replies])
    longest = fitting_length(max((row.length for rows in asked for row in rows), default=0), model)
    fits = [max(row.length for row in rows) <= longest for rows in asked]
    examples = [row for rows, fit in zip(asked, fits, strict=True) if fit for row in rows]
    log_likelihoods = iter(reply_log_likelihoods(model, examples, pad_id(tokenizer), batch_size))
    answers: list[int | None] = []
    for question, fit in zip(questions.questions, fits, strict=True):
        if not fit:
            answers.append(None)
            continue
        texts = question.answers(questions.score)
        lengths = [len(text) if questions.score == "text" else 1 for text in texts]
        per_length = [next(log_likelihoods) / length for length in lengths]
        answers.append(max(range(len(texts)), key=lambda choice: per_length[choice]))
    return answers


@torch.inference_mode()
def reply_log_likelihoods(
    model: PreTrainedModel, examples: Sequence[Example], pad: int, batch_size: int
) -> list[float]:
    """Return the log-probability of each reply given its prompt, in nats, summed over its tokens.

    Replies to a prompt that differ in their last token alone, as letters do, share one pass. Ranks share the passes.
    """
    # The last token is predicted, and never read.
    inputs = [tuple([*row.prompt, *row.reply][:-1]) for row in examples]
    users: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in enumerate(inputs):
        users.setdefault(sequence, []).append(number)
    sequences = list(users)
    log_likelihoods = torch.zeros(len(examples), dtype=torch.float64)
    for part, weight in whole_passes(by_length([len(sequence) for sequence in sequences]), batch_size):
        if not weight:
            continue
        rows = [sequences[number] for number in part]
        ids, mask = (tensor.to(model.device) for tensor in right_pad(rows, pad))
        logits = lazy_logits(model, ids, mask, position_ids_from_mask(mask), ids.shape[1])
        head = logits.repeatable_head()
        owners, row_numbers, columns, targets = [], [], [], []
        for row_number, row in enumerate(rows):
            for number in users[row]:
                example = examples[number]
                for offset, token in enumerate(example.reply):
                    owners.append(number)
                    row_numbers.append(row_number)
                    columns.append(len(example.prompt) + offset - 1)
                    targets.append(token)
        states = logits.states[row_numbers, columns].split(POSITIONS_PER_CHUNK)
        chunks = torch.tensor(targets, device=ids.device).split(POSITIONS_PER_CHUNK)
        values = [
            head(part).float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            for part, tokens in zip(states, chunks, strict=True)
        ]
        for number, value in zip(owners, torch.cat(values).tolist(), strict=True):
            log_likelihoods[number] += value
    # Each rank holds the values of its own passes and zeros elsewhere.
    return distributed.all_reduce_sum(log_likelihoods).tolist()
