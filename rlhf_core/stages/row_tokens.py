"""The tokens of clean rows before anything is trained, counted as the starting model would.

Each file is tokenised once: the forecast of pairs, the check of prompts and the plan of memory all
read the same lengths.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.base import is_pretrained
from rlhf_core.config.params import Params
from rlhf_core.data.pair_counts import READERS
from rlhf_core.data.schema import (
    Demonstration,
    PairUser,
    Preference,
    PretrainText,
    Prompt,
)
from rlhf_core.data.tokens import TokenTable, read_tokens
from rlhf_core.errors import ModelError
from rlhf_core.models.causal_lm import train_tokenizer
from rlhf_core.stages.base import training_texts
from rlhf_core.stages.prompt_room import prompt_files
from rlhf_core.stages.token_lengths import (
    BASE,
    load_counting_tokenizer,
    local_starting_model,
    model_positions,
)

# A tokenizer that is made of more characters is forecast by one that is made of a sample: the
# longest of 796 prompts had 848 tokens by all 8 million characters, 847 by a quarter of them.
MOST_CHARACTERS = 16_000_000
CLEAN = Path("data") / "clean"
OWN_DATA = "the workspace's own data"
Lengths = npt.NDArray[np.int32]
# By kind, the folders of clean data whose rows are trained on.
FOLDERS = {
    Demonstration.KIND: (Demonstration.KIND,),
    Preference.KIND: tuple(PairUser),
    Prompt.KIND: (Prompt.KIND,),
    PretrainText.KIND: (PretrainText.KIND,),
}


def trained_kinds(params: Params) -> frozenset[str]:
    """Return the kinds whose rows stages train on, plain texts only where the ptx loss reads them."""
    kinds = {Demonstration.KIND, Preference.KIND, Prompt.KIND}
    if params.ppo.ptx.weight > 0 and params.ppo.ptx.data != Demonstration.KIND:
        kinds.add(PretrainText.KIND)
    return frozenset(kinds)


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the rows that stages train on.

    Attributes:
        by_kind: Of each training row the tokens with its longest reply, and those of its first
            reply, which alone has logits (N, 2).
        source: What was read.
        unread: Kinds that there are rows of, but elsewhere or too many to read before a run.
    """

    by_kind: Mapping[str, Lengths]
    source: str
    unread: frozenset[str] = frozenset()


class RowTokens:
    """Counts the tokens of rows as a starting model would.

    Attributes:
        tokenizer: The model's.
        positions: The most tokens that the model takes; None where it has no bound.
        longest: By reader, the most tokens of a prompt with a reply.
        cache: Where tokens are kept; None keeps none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        positions: int | None,
        params: Params,
        cache: Path | None = None,
    ) -> None:
        self.tokenizer, self.positions, self.cache = tokenizer, positions, cache
        self.longest: dict[str, int] = {}
        for reader in READERS:
            most = getattr(params, reader).max_tokens
            self.longest[reader] = most if positions is None else min(most, positions)
        self._lengths: dict[Path, Lengths] = {}

    @classmethod
    def here(
        cls, params: Params, base: Path, clean: Path, workspace: Path | None = None
    ) -> RowTokens | None:
        """Return those of the starting model, if it is on this machine and can be loaded.

        Args:
            base: The folder that relative paths start at.
            clean: Clean data, of whose texts a model that is made from nothing gets its tokenizer.
            workspace: Whose models/base stands for a starting model that is not here.

        Raises:
            ModelError: A starting model that settings name by its path has no usable tokenizer.
        """
        if not is_pretrained(params.base.source):
            return cls(_made_tokenizer(clean, params), params.base.max_positions, params)
        source = local_starting_model(params, base)
        if source is None and workspace is not None and (workspace / BASE).is_dir():
            source = str((workspace / BASE).absolute())
        source = source or params.validate_.tokenizer
        if source is None:
            return None
        path = base / Path(os.path.expanduser(source))
        try:
            return cls(load_counting_tokenizer(source, base), model_positions(path), params)
        except ModelError:
            if source == params.base.source:
                raise
            return None  # what a hub id has in the cache may be only a part

    def read(self, file: Path, kind: str) -> TokenTable:
        """Return the tokens of a file of ``kind``, and keep their lengths.

        Raises:
            DataError: It is missing or damaged, or the tokenizer cannot write a row.
        """
        tokens = read_tokens(self.cache, file, kind, self.tokenizer)
        self._lengths[file] = _lengths_of(tokens)
        return tokens

    def lengths(self, file: Path, kind: str) -> Lengths:
        """Return the lengths of a file of ``kind``, which is read only once.

        The first column is of all tokens of a row with its longest reply, the second of its first
        reply (N, 2). :meth:`read` says what may be raised.
        """
        if file not in self._lengths:
            self.read(file, kind)
        return self._lengths[file]

    def prompts(self, clean: Path) -> Lengths:
        """Return the lengths of the prompts of all splits (N,)."""
        of_files = [self.lengths(file, Prompt.KIND)[:, 0] for file in prompt_files(clean)]
        return np.concatenate(of_files)

    def training_rows(
        self, clean: Path, kinds: Collection[str], source: str, unread: Collection[str] = ()
    ) -> RowLengths:
        """Return the lengths of the rows of ``kinds`` that stages train on, where there are some.

        Args:
            clean: The folder of clean data.
            source: What it is made of.
            unread: Those of ``kinds`` whose rows are not those of a run.
        """
        by_kind = {}
        for kind in sorted({*kinds} - {*unread}):
            files = [clean / folder / "train.parquet" for folder in FOLDERS[kind]]
            found = [self.lengths(file, kind) for file in files if file.is_file()]
            if found:
                by_kind[kind] = np.concatenate(found)
        return RowLengths(by_kind, source, frozenset(kinds) & frozenset(unread))


def _lengths_of(tokens: TokenTable) -> Lengths:
    columns = {name: tokens.column(name).lengths for name in tokens.id_columns}
    nothing = np.zeros(len(tokens), np.int32)
    prompt = columns.pop("prompt", nothing)
    replies = [*columns.values()] or [nothing]
    longest = np.maximum.reduce(replies)
    return np.stack([prompt + longest, replies[0]], axis=1)


def _made_tokenizer(clean: Path, params: Params) -> PreTrainedTokenizerBase:
    """Make the tokenizer that stage base makes, of a sample where there are very many texts."""
    texts = list(training_texts(clean))
    stride = -(-sum(map(len, texts)) // MOST_CHARACTERS)
    sample = texts[:: max(stride, 1)]
    return train_tokenizer(iter(sample), params.base.vocab_size, params.base.max_positions)
