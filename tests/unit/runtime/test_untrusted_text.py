"""Patterns over texts of strangers take steps that grow no faster than the text."""

from __future__ import annotations

import importlib.util
import itertools
import json
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from regex_steps import pieces, steps

import flows.stage
import rlhf_core.data
import rlhf_core.redaction
import rlhf_core.secret_commands
from rlhf_core.runtime import untrusted_text
from rlhf_core.runtime.untrusted_text import string_literals, without_json_strings

ROOT = Path(__file__).resolve().parents[3]
TIMES = 24
# Of texts that are read as a whole: steps of twice the text over steps of the text, and steps of a
# character.
FASTEST_GROWTH, DEAREST_CHARACTER = 2.6, 40
SEARCHES = "search|sub|subn|split|finditer|findall"


def modules() -> Iterator[ModuleType]:
    """Those that read data files, templates, requests and logs."""
    yield from (untrusted_text, rlhf_core.redaction, rlhf_core.secret_commands, flows.stage)
    for found in pkgutil.walk_packages(rlhf_core.data.__path__, "rlhf_core.data."):
        yield importlib.import_module(found.name)
    for name in ("rlhf_core.serving.protocol", "rlhf_extras.serving.protocol"):
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            yield importlib.import_module(name)


def patterns() -> dict[str, re.Pattern[str]]:
    """Every compiled pattern of these modules, also those in their tuples and dictionaries, by its
    name.
    """
    found: dict[str, re.Pattern[str]] = {}
    for module in modules():
        for name, value in vars(module).items():
            values = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, tuple)
                else [value]
            )
            for number, item in enumerate(values):
                for part in item if isinstance(item, tuple) else [item]:
                    if (
                        isinstance(part, re.Pattern)
                        and isinstance(part.pattern, str)
                        and part not in found.values()
                    ):
                        found[f"{module.__name__}.{name}{f'[{number}]' if number else ''}"] = part
    return found


@cache
def source() -> str:
    """The text of all modules that may use a pattern."""
    packages = (ROOT / name for name in ("rlhf_core", "flows", "rlhf_extras"))
    return "".join(
        path.read_text() for package in packages for path in sorted(package.rglob("*.py"))
    )


def is_only_matched(name: str) -> bool:
    """Whether a pattern is tried at the beginning of texts, and nowhere else."""
    matched = re.search(rf"\b{re.escape(name)}\.(?:full)?match\b", source())
    return matched is not None and not re.search(
        rf"\b{re.escape(name)}\.(?:{SEARCHES})\b", source()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pattern"), patterns().items(), ids=str)
def test_a_pattern_takes_steps_in_proportion_to_the_text(
    name: str, pattern: re.Pattern[str]
) -> None:
    """Whatever part of it is repeated, and whatever comes before: twice the text takes twice the
    steps.
    """
    parts = sorted(pieces(pattern), key=lambda text: (len(text), text))[:8] or ["a"]
    at_start = is_only_matched(name.rpartition(".")[2])
    repeated = [*parts, *(one + other for one, other in itertools.product(parts[:4], parts[:4]))]
    for head, part in itertools.product(("", parts[-1]), repeated):
        texts = [head + part * times + "\0" for times in (TIMES, 2 * TIMES)]
        once, twice = (steps(pattern, text, at_start=at_start) for text in texts)
        assert twice <= FASTEST_GROWTH * once or twice <= DEAREST_CHARACTER * len(texts[1]), (
            head,
            part,
        )


@pytest.mark.parametrize("quoted", ['"', "'"])
@pytest.mark.parametrize("end", ["", "\\", "\\" * 3])
def test_an_unclosed_string_of_escaped_quotes_is_looked_at_once(quoted: str, end: str) -> None:
    for pattern in (untrusted_text._JSON_STRING, untrusted_text._LITERALS[quoted]):
        once, twice = (steps(pattern, quoted + f"\\{quoted}" * times + end) for times in (200, 400))
        # What is only tried at the first quote of a kind, as literals are, may grow when it is
        # searched for.
        if pattern is untrusted_text._JSON_STRING:
            assert twice < 2.2 * once


@pytest.mark.parametrize("part", ["a.", "key-", "&a", "x+1."])
def test_names_without_a_secret_are_looked_at_once(part: str) -> None:
    """What may begin an address at each of its words would be read to its end from each."""
    rules = [pattern for pattern, _ in rlhf_core.redaction._RULES]
    once, twice = (sum(steps(pattern, part * times) for pattern in rules) for times in (40, 80))
    assert twice <= 2.3 * once


def test_steps_see_what_is_quadratic_and_what_is_exponential() -> None:
    for pattern, growth in ((r"a+b", 3.5), (r"(a+)+b", 100.0), (r"\"(?:[^\"\\]|\\.)*\"", 3.5)):
        part = '\\"' if '"' in pattern else "a"
        texts = ['"' * ('"' in pattern) + part * times for times in (8, 16)]
        once, twice = (steps(re.compile(pattern), text) for text in texts)
        assert twice > growth * once * 0.8, pattern
    assert steps(re.compile(r"a++b"), "a" * 8) < steps(re.compile(r"a+b"), "a" * 8)


def test_strings_of_json_are_left_out_wherever_it_is_cut_off() -> None:
    text = json.dumps([{"a,b": 'c"[', "d": ["\\", "[{,"]}, 1])
    assert without_json_strings(text) == "[{: , : [, ]}, 1]"
    for end in range(len(text)):
        assert set(without_json_strings(text[:end])) <= set("[{: ,}]1")


@pytest.mark.parametrize(
    ("source", "literals"),
    [
        ("""{{ "<|a|>" + 'b\\'c' }}""", ["<|a|>", "b\\'c"]),
        ("""don" {{ '<|a|>' }}""", ["<|a|>"]),
        ("""{# it's #} {{ "<|a|>" }}""", ["<|a|>"]),
        ('"a" "b', ["a"]),
        ("'a\nb' \"\"", ["a\nb", ""]),
        ("", []),
    ],
)
def test_literals_of_a_template(source: str, literals: list[str]) -> None:
    assert string_literals(source) == literals
