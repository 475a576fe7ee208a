"""Every causal language model of the installed transformers, made tiny, through what training does.

``make sweep`` compares the results with ``architectures.csv`` and fails where they differ; ``make
sweep WRITE=1`` writes them there, and ``ONLY="bart xlm"`` looks at these kinds alone. Each kind
has a process of its own, under limits of memory and time: it takes minutes, and is meant for the
night and for a new version of transformers.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from architectures import SETTINGS, VOCABULARY, tiny_causal_lm, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_core.config.model import LoraConfig
from rlhf_core.errors import RlhfError
from rlhf_core.models.adapters import add_adapters, merge_adapters
from rlhf_core.models.heads import ScalarModel
from rlhf_core.runtime.limited_call import GIB, CallLimits, limit_reached
from rlhf_core.sampling.agreement import require_next_tokens, require_replies_as_scored
from rlhf_core.training.examples import collate
from rlhf_core.training.sft import reply_loss

TABLE = Path(__file__).with_name("architectures.csv")
PROMPTS, REPLIES = [[5, 6, 7], [8, 9]], [[10, 11, 3], [12, 13, 14, 15, 3]]
LARGEST = 5_000_000  # weights of a model that is tiny; some kinds have parts of fixed sizes
LIMITS = CallLimits(cpu_seconds=120, memory=4 * GIB)
OK, REFUSED, TOO_LARGE = "ok", "refused", "too large"


def loss_is_the_models_own(model: PreTrainedModel, name: str) -> None:
    """The loss of SFT is what the model's own forward says of the same labels."""
    batch = collate(PROMPTS, REPLIES, 0)
    labels = torch.full_like(batch.input_ids, -100)
    for row, (prompt, reply) in enumerate(zip(PROMPTS, REPLIES, strict=True)):
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    own = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
    ours = reply_loss(model, batch, sum(map(len, REPLIES)))
    torch.testing.assert_close(ours, own, atol=1e-3, rtol=1e-3)


def adapters_are_merged(model: PreTrainedModel, name: str) -> None:
    """A model with trained adapters computes the same as after they were merged."""
    add_adapters(model, LoraConfig(rank=2, alpha=4), seed=1)
    for path, weight in model.named_parameters():
        if "lora_B" in path:
            weight.data.fill_(0.05)
    ids = torch.arange(4, 20).view(2, 8) % VOCABULARY
    with torch.no_grad():
        before = model(input_ids=ids).logits
        merge_adapters(model)
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-3, rtol=1e-3)


def scalar_model_is_made(model: PreTrainedModel, name: str) -> None:
    """A reward model of the kind gives numbers, and its head a gradient."""
    scalar = ScalarModel.from_causal_lm(model, 0)
    ids = torch.arange(4, 20).view(2, 8) % VOCABULARY
    scores = scalar.token_scores(ids, torch.ones_like(ids))
    scores.sum().backward()
    head = scalar.model.get_submodule("score").get_parameter("weight")
    assert scores.isfinite().all() and head.grad is not None


CHECKS: dict[str, Callable[[PreTrainedModel, str], None]] = {
    "loss": loss_is_the_models_own,
    "sampling": require_replies_as_scored,
    "adapters": adapters_are_merged,
    "scalar": scalar_model_is_made,
}


def results_of(name: str) -> dict[str, str]:
    """What each check says of a kind: ok, refused by a message of ours, or another error's class."""
    settings = SETTINGS.get(name, {})
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(tiny_config(name, **settings))
        if sum(weight.numel() for weight in empty.parameters()) > LARGEST:
            return dict.fromkeys(CHECKS, TOO_LARGE)
        tiny_causal_lm(name, **settings)
    except Exception as error:
        return dict.fromkeys(CHECKS, f"not made: {type(error).__name__}")
    found = {}
    for check, run in CHECKS.items():
        try:
            model = tiny_causal_lm(name, **settings)
            require_next_tokens(model, name)
            run(model, name)
            found[check] = OK
        except RlhfError:
            found[check] = REFUSED
        except Exception as error:
            found[check] = type(error).__name__
    return found


def results_within_limits(name: str, folder: Path) -> dict[str, str]:
    """Return the results of :func:`results_of`, computed in a process of its own.

    Where that process ends at a limit, the result of every check is the limit.
    """
    found = folder / f"{name}.json"
    reached = limit_reached(lambda: found.write_text(json.dumps(results_of(name))), LIMITS)
    results: dict[str, str] = json.loads(found.read_text()) if found.is_file() else {}
    return results or dict.fromkeys(CHECKS, reached or "ended its process")


def main() -> int:
    """Check every kind; return 1 where the results are others than the table's."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    only = os.environ.get("ONLY", "").split()
    rows = []
    with TemporaryDirectory() as folder:
        for name in only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            rows.append({"kind": name, **results_within_limits(name, Path(folder))})
            print(*rows[-1].values(), sep="\t", flush=True)
    with TABLE.open(newline="", encoding="utf-8") as file:
        expected = {row["kind"]: row for row in csv.DictReader(file)}
    if os.environ.get("WRITE"):
        found = {row["kind"]: row for row in rows}
        kept = expected if only else {}
        table = sorted((kept | found).items())
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["kind", *CHECKS], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for _, row in table)
        return 0
    differing = [row for row in rows if expected.get(row["kind"]) != row]
    for row in differing:
        print(f"{row['kind']} is {row}, but {TABLE.name} says {expected.get(row['kind'])}")
    gone = sorted(expected.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
    for kind in gone:
        print(f"{kind} of {TABLE.name} is no kind of this transformers")
    return 1 if differing or gone else 0


if __name__ == "__main__":
    sys.exit(main())
