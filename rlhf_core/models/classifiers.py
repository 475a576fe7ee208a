"""Sequence classifiers of every kind of language model.

Among them are kinds that transformers has no classifier for.

Such a one is the kind's own backbone with transformers' own head for decoders, a linear layer
``score``. Its folder is like those of other classifiers, with safetensors and config.json, but only
what is here loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

LANGUAGE_MODEL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class _Classifiers:
    """Classes of classifiers by classes of configurations.

    Auto classes of transformers ask for them in this form.
    """

    def __contains__(self, config_class: type) -> bool:
        return config_class in _KNOWN or (
            config_class in _LANGUAGE_MODELS and config_class in _BACKBONES
        )

    def __getitem__(self, config_class: type) -> Any:
        return (
            _KNOWN[config_class]
            if config_class in _KNOWN
            else _with_own_head(_LANGUAGE_MODELS[config_class])
        )

    def __iter__(self) -> Iterator[type]:
        known: list[type] = _KNOWN.keys()
        return iter([*known, *(each for each in _LANGUAGE_MODELS.keys() if each not in known)])  # noqa: SIM118

    def keys(self) -> list[type]:
        """Return all configurations with a classifier, the library's or one made here."""
        return list(self)


_KNOWN: Any = AutoModelForSequenceClassification._model_mapping
_LANGUAGE_MODELS: Any = AutoModelForCausalLM._model_mapping
_BACKBONES: Any = AutoModel._model_mapping


class AutoScalarModel(AutoModelForSequenceClassification):
    """``AutoModelForSequenceClassification`` for every kind of language model."""

    _model_mapping: Any = _Classifiers()


@cache
def _with_own_head(language_model: type[PreTrainedModel]) -> Any:
    """The classifier of a kind of language model.

    It is the kind's own parent, with the head that other decoders have.
    """
    parents = (each for each in language_model.__mro__[1:] if issubclass(each, PreTrainedModel))
    parent: type[PreTrainedModel] = next(parents)
    name = language_model.__name__.removesuffix(LANGUAGE_MODEL) + CLASSIFIER
    prefix = parent.base_model_prefix or "model"
    # The library looks into the module of a class for what its kind can do.
    members = {"base_model_prefix": prefix, "__module__": language_model.__module__}
    return type(name, (GenericForSequenceClassification, parent), members)
