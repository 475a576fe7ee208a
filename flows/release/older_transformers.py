"""An exported folder as transformers 4 reads it too: rotary embeddings and the tokenizer under their earlier names.

transformers 5 writes ``rope_parameters`` and a tokenizer class that version 4 does not know. Version 4 then computes
with a base of 10,000, in silence, so the earlier names are written beside the new ones, which version 5 prefers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
# What architectures call the base and the rotated share in transformers 4, where not rope_theta and
# partial_rotary_factor.
EARLIER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
GLOBAL, LOCAL = "full_attention", "sliding_attention"


def write_earlier_names(folder: Path) -> bool:
    """Add them to ``config.json`` and ``tokenizer_config.json``; False where transformers 4 has no name for a setting.

    Those are architectures whose layers have several rotary embeddings, other than a global and a local one.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    earlier = earlier_rope(str(text.get("model_type")), text.get("rope_parameters") or {})
    if earlier:
        text.update({name: value for name, value in earlier.items() if name not in text})
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        settings = json.loads(tokenizer.read_text(encoding="utf-8"))
        name = settings.get("tokenizer_class")
        extra = settings.pop("extra_special_tokens", None)
        if isinstance(extra, list):  # a mapping in version 4, whose name for a list both versions read
            settings["additional_special_tokens"] = extra
        elif extra is not None:
            settings["extra_special_tokens"] = extra
        settings["tokenizer_class"] = TOKENIZER_CLASSES.get(name, name)
        tokenizer.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return earlier is not None


def earlier_rope(model_type: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters under the names of transformers 4, None where it has none."""
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return _one_rope(model_type, parameters)
    if not set(parameters) <= {GLOBAL, LOCAL} or GLOBAL not in parameters:
        return None
    earlier = _one_rope(model_type, parameters[GLOBAL])
    local = parameters.get(LOCAL) or {}
    if local.get("rope_type", "default") != "default":
        return None
    return earlier | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})


def _one_rope(model_type: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    names = EARLIER_NAMES.get(model_type, {})
    rest = dict(parameters)
    earlier = {
        names.get(name, name): rest.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rest
    }
    scaled = rest.get("rope_type", "default") != "default"
    return earlier | ({"rope_scaling": rest} if scaled else {})
