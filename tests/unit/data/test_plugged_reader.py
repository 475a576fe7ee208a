"""A package's reader that fails: one line that names the package, whatever it raises."""

from __future__ import annotations

import sys

import pytest
from plugin_distributions import Install

from rlhf_core.config.data import ReadOptions
from rlhf_core.data.readers.detection import format_named
from rlhf_core.data.readers.turns import Refusal
from rlhf_core.plugins import READERS, PluginError

READER = """
from rlhf_core.data.readers.formats import Format
from rlhf_core.data.readers.turns import Refusal

def work(*given):
    {}

shape = Format("any", ("preferences",), work, work)
"""


def installed(body: str, install: Install) -> None:
    sys.modules.pop("their_reader", None)
    install("theirs", READERS, {"their": "their_reader:shape"}, their_reader=READER.format(body))


@pytest.mark.parametrize(
    "body", ["1 / 0", "return given[9]", "raise SystemExit(0)", "import none_such"]
)
def test_a_reader_that_fails_is_named(body: str, install: Install) -> None:
    installed(body, install)
    shape = format_named("their")
    for call in (lambda: shape.matches({}), lambda: shape.parse({}, "preferences", ReadOptions())):
        with pytest.raises(PluginError, match=r"their of the package theirs .* raised ") as refused:
            call()
        assert "their_reader.py, line 6" in str(refused.value) and "\n" not in str(refused.value)


def test_a_row_that_it_refuses_is_refused(install: Install) -> None:
    installed('raise Refusal("no reply")', install)
    with pytest.raises(Refusal, match=r"^no reply$"):
        format_named("their").parse({}, "preferences", ReadOptions())
