"""Whether the clean pairs suffice for the three reward models, known before SFT and any of them is trained."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.loading import load_params
from rlhf_core.data.batches import length_balanced_rows
from rlhf_core.data.schema import PairUser
from rlhf_core.data.token_folder import TOKENS
from rlhf_core.errors import DataError
from rlhf_core.models.causal_lm import fitting_length, load_tokenizer
from rlhf_core.stages import base, validate
from rlhf_core.training.reward.evaluation import FEWEST_BALANCED_PAIRS
from rlhf_core.training.reward.run import metric_prefix, read_split, require_balanced_pairs

BALANCED = "_length_balanced"


def require_pairs(workspace: Path) -> None:
    """Refuse clean pairs that a stage of a reward model, or the reward gate, would refuse after hours of training.

    Raises:
        DataError: No pair of a split is within ``max_tokens``, too few are left when lengths are balanced, or so few
            that a measure which the reward gate asks for is left out.
    """
    params = load_params(workspace)
    clean, init = workspace / validate.STAGE.outputs["clean"], workspace / base.STAGE.outputs["model"]
    tokenizer = load_tokenizer(init)
    asked = {condition.metric for condition in params.gates.reward} if params.gates.mode == "enforce" else set()
    users = {"reward": PairUser.REWARD, "referee": PairUser.REFEREE, "judge": PairUser.JUDGE}
    for name, user in users.items():
        config = getattr(params, name)
        longest = fitting_length(config.max_tokens, init)
        for split in ("train", "validation", "test"):
            folder = PairUser.REWARD if split == "test" else user
            pairs = read_split(clean / folder / f"{split}.parquet", tokenizer, longest, workspace / TOKENS)
            if split == "train":
                if config.length_balance == "sampling":
                    require_balanced_pairs(pairs, config.batch.min_pairs, name)
                continue
            left = len(length_balanced_rows([pair.length_difference for pair in pairs.pairs], seed=0))
            prefix = f"{'' if name == 'reward' else f'{name}.'}{metric_prefix(split)}"
            wanted = [m for m in asked if m.startswith((f"{prefix}accuracy{BALANCED}", f"{prefix}ece{BALANCED}"))]
            if wanted and left < FEWEST_BALANCED_PAIRS:
                raise DataError(
                    f"the reward gate asks for {sorted(wanted)[0]}, but {len(pairs.pairs)} {split} pairs leave {left} "
                    f"when lengths are balanced, and {FEWEST_BALANCED_PAIRS} are needed; add pairs, or take the "
                    "condition out of gates.reward"
                )
