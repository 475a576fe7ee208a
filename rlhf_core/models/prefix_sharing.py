"""Prefix sharing: hidden states of several replies to one prompt, which passes the model once.

Each reply attends to the prompt and to itself, at the positions that it would have alone, so that
only rounding differs (Wang and Hegde, 2024, "Accelerating Direct Preference Optimization with
Prefix Sharing").

Shapes: R rows of up to W tokens, which hold S sequences of up to L tokens; H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.data.batches import PrefixRow
from rlhf_core.data.encoding import right_pad
from rlhf_core.errors import ModelError, first_line
from rlhf_core.models.forward import hidden_states, probe_ids

# Relative differences of hidden states. What a token does not attend to changes no bit of its own.
INDEPENDENT = 1e-6
SAME_IN_FLOAT32, SAME_IN_LOW_PRECISION = 1e-3, 0.05


@dataclass(frozen=True)
class PrefixBatch:
    """Rows of prompts with their replies, padded on the right.

    Attributes:
        input_ids: (R, W).
        position_ids: Position of each token in its own sequence (R, W).
        visible: Whether a token attends to another: bool (R, 1, W, W).
        tokens: Place of each sequence's tokens among the R * W; any, where a sequence has ended (S,
            L).
    """

    input_ids: Tensor
    position_ids: Tensor
    visible: Tensor
    tokens: Tensor

    def to(self, device: torch.device) -> PrefixBatch:
        """The same on ``device``."""
        return PrefixBatch(*(tensor.to(device) for tensor in vars(self).values()))

    def hidden(self, backbone: nn.Module) -> Tensor:
        """Return the last hidden states of each sequence, as in a batch padded on the right: (S, L,
        H).
        """
        states = hidden_states(backbone, self.input_ids, self.visible, self.position_ids).flatten(
            0, 1
        )
        return states.index_select(0, self.tokens.flatten()).view(*self.tokens.shape, -1)


def prefix_batch(rows: Sequence[PrefixRow], pad: int) -> PrefixBatch:
    """Collate rows. Their sequences are in the order of the rows, and in a row in that of its
    replies.
    """
    width = max(row.length for row in rows)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    parts: list[
        list[int]
    ] = []  # which part of its row a token belongs to: 0 the prompt, 1, 2, ... its replies
    tokens: list[list[int]] = []
    for number, row in enumerate(rows):
        start = len(row.prompt)
        row_ids, row_positions, row_parts = list(row.prompt), list(range(start)), [0] * start
        first = number * width
        for which, reply in enumerate(row.replies, 1):
            begin, size = first + len(row_ids), len(reply)
            tokens.append([*range(first, first + start), *range(begin, begin + size)])
            row_ids += reply
            row_positions += range(start, start + size)
            row_parts += [which] * size
        ids.append(row_ids)
        positions.append(row_positions)
        parts.append(row_parts)
    part, _ = right_pad(parts, -1)
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    # Padding attends to itself, since a token must attend to something.
    visible = earlier & ((part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None]))
    return PrefixBatch(
        right_pad(ids, pad)[0],
        right_pad(positions, 0)[0],
        visible.unsqueeze(1),
        right_pad(tokens, 0)[0],
    )


@torch.no_grad()
def require_prefix_sharing(model: PreTrainedModel, max_tokens: int, parameter: str) -> None:
    """Try two replies behind one prompt: the second must not change with the first, and be what it
    is alone.

    Args:
        max_tokens: Tokens of the longest sequence.
        parameter: Names the setting where it is refused.

    Raises:
        ModelError: The model's attention reaches back fewer tokens, or it computes something else:
            its replies see each other, or its positions are not those it is given.
    """
    refused, config = f"{parameter}: {type(model).__name__}", model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_tokens:
        raise ModelError(
            f"{refused} attends to the last {window} tokens only; set it to false, or max_tokens lower"
        )
    prompt, first, second, other = probe_ids(config.vocab_size, rows=4).tolist()
    backbone, training = model.base_model.eval(), model.training
    alone, mask = (tensor.to(model.device) for tensor in right_pad([[*prompt, *second]], 0))
    expected = hidden_states(backbone, alone, mask)[0]
    try:
        computed, beside_other = (
            prefix_batch([PrefixRow(prompt, [beside, second], [0, 1])], pad=0)
            .to(model.device)
            .hidden(backbone)[1]
            for beside in (first, other)
        )
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"{refused} takes no attention mask of its own ({first_line(error)}); set it to false"
        ) from error
    finally:
        model.train(training)
    if _difference(beside_other, computed) > INDEPENDENT:
        raise ModelError(
            f"{refused} lets replies behind one prompt see each other; set it to false"
        )
    difference = _difference(computed, expected)
    if not difference <= (
        SAME_IN_FLOAT32 if model.dtype == torch.float32 else SAME_IN_LOW_PRECISION
    ):
        raise ModelError(
            f"{refused} computes a reply behind another otherwise than alone (its hidden states differ by "
            f"{difference:.2g} of their size); set it to false"
        )


def _difference(computed: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of what is expected."""
    return float((computed.float() - expected.float()).norm() / expected.float().norm())
