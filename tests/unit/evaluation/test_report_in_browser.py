"""The report in headless Chromium: no errors on the console, nothing loaded, nothing wider than a
phone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium

from rlhf_core.evaluation.promotion import Criterion
from rlhf_core.evaluation.report.headline import ReleaseDecision
from rlhf_core.evaluation.report.view import with_release

from .test_report import ATTACK, fill, fill_sections, render, write

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
PHONE, DESKTOP = 375, 1280
LONG_WORD = "example.com/" + "averylongword" * 20
# Elements that reach beyond the right edge and are not cut by an element around them.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (box.width <= 1 || box.right <= innerWidth + 1 || element.closest('.stack thead')) return false;
  for (let around = element.parentElement; around; around = around.parentElement)
    if (getComputedStyle(around).overflowX != 'visible') return false;
  return true;
}).map(element => `${element.tagName}.${element.className.baseVal ?? element.className}`)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report in which every part is shown, with texts that are hard to place."""
    root = tmp_path_factory.mktemp("report")
    fill(root)
    fill_sections(root, "another assistant of a third party", LONG_WORD)
    evaluation = json.loads((root / "metrics/evaluation.json").read_text())
    versus = evaluation["comparison"]["gold"]
    scored = [
        f"{side}_{judge}"
        for judge in ("gold", "judge", "referee", "reward")
        for side in ("policy", "sft", "win_rate")
    ]
    of_category = dict.fromkeys(scored, -0.123) | {
        "prompts": 100,
        "comparison": {"judge": versus, "gold": versus},
    }
    checked = {"passed": 0.5, "category": {LONG_WORD: 0.5}, "property": {"json_schema": 0.5}}
    evaluation["category"] = {"selfinstruct": of_category}
    evaluation["verifiable"] = {
        "prompts": 8,
        "sft": checked,
        "policy": checked,
        "comparison": versus,
    }
    evaluation["policy"]["safety"] = {"refuses_harmful": 0.31}
    write(root / "metrics/evaluation.json", json.dumps(evaluation))
    edges = {f"reward_{name}": value for name, value in
             {"min": -3, "p05": -2, "p25": -1, "p50": 0, "p75": 1, "p95": 2, "max": 3}.items()}  # fmt: skip
    history = [
        edges | {"iteration": i, "reward_mean": 0.1 * i, "kl": i, "findings": []}
        for i in range(1, 20)
    ]
    write(root / "history/ppo.jsonl", "\n".join(map(json.dumps, history)))
    sft = {"outs": [{"path": "models/sft", "md5": f"{'0123456789abcdef' * 2}.dir"}]}
    write(root / "dvc.lock", json.dumps({"stages": {"sft": sft}}))
    text = render(root)
    for part in (
        "Distribution of rewards",
        "gets most wrong",
        "Against ",
        "dvc.lock sha256",
        "verifiable prompts",
    ):
        assert part in text
    return root / "report.html"


@pytest.fixture(scope="module")
def release(page: Path) -> Path:
    """The same report with what was released."""
    unmet = tuple(
        Criterion(f"policy.safety.{i}", LONG_WORD, "≤ 6", False, why=ATTACK) for i in range(9)
    )
    decision = ReleaseDecision(
        "open", f"Not released: {LONG_WORD} version 2 was not promoted", f"Registered as {LONG_WORD} version 2.",
        LONG_WORD, unmet, f"Decided by {LONG_WORD}, 2026-11-23 04:05 UTC", "The champion is version 1.",
        "rlhf promote --dry-run --explain", "every criterion", "2026-11-23 04:06 UTC",
    )  # fmt: skip
    text = with_release(page.read_text(), decision)
    assert text is not None and ATTACK not in text and "and 3 more" in text
    write(page.parent / "release.html", text)
    return page.parent / "release.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    opened = Browser(CHROMIUM, tmp_path_factory.mktemp("chromium"), width=DESKTOP, height=900)
    for domain in ("Network", "Runtime", "Log"):
        opened.call(f"{domain}.enable")
    yield opened
    opened.close()


def reported(events: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [event["params"] for event in events if event["method"] == method]


@pytest.mark.parametrize("which", ["page", "release"])
@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")])
def test_the_page_fits_loads_nothing_and_has_no_errors(
    request: pytest.FixtureRequest, which: str, browser: Browser, width: int, scheme: str
) -> None:
    page: Path = request.getfixturevalue(which)
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    browser.events.clear()
    browser.open(page.as_uri(), "Configuration and lineage", "git commit")
    browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    if which == "release":
        top = browser.evaluate(
            "document.querySelector('.release .headline').getBoundingClientRect().top"
        )
        assert 0 < top < 900, "what was released stands on the first screen"
    requests = [
        event["request"]["url"] for event in reported(browser.events, "Network.requestWillBeSent")
    ]
    loaded = [url for url in requests if not url.startswith("data:") and url != "about:blank"]
    assert loaded == [page.as_uri()], "no request leaves the file"
    assert reported(browser.events, "Runtime.exceptionThrown") == []
    assert reported(browser.events, "Runtime.consoleAPICalled") == []
    assert [entry["entry"]["text"] for entry in reported(browser.events, "Log.entryAdded")] == []
