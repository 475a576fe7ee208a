"""The tables of README and docs/results.md are those of the rows of finished runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import release_figures, release_pages
from benchmarks.release_figures import keep, read_rows
from benchmarks.release_pages import PAGES, TABLES, paired, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_rows_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, read_rows()) == text, "run `python -m benchmarks.release_pages`"


def test_every_table_stands_on_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in TABLES if texts.count(f"<!--{name}-->") != 1] == []


def test_a_figure_that_changed_reaches_its_page() -> None:
    rows = [row | {"policy_right_fact": "0.1234"} for row in read_rows()]
    page = with_tables("before\n<!--right-->\n\nold\n\n<!--/right-->\nafter", rows)
    assert page.startswith("before\n") and page.endswith("\nafter")
    assert "| policy | 0.12 |" in page and "old" not in page


def test_difference_of_methods_is_paired_by_seed() -> None:
    # Differences 0.1 and 0.3: mean 0.2, standard error 0.1, Student's quantile at one degree 12.706.
    ours = {"1": {"policy_gold": "0.5"}, "2": {"policy_gold": "0.9"}}
    theirs = {"1": {"policy_gold": "0.4"}, "2": {"policy_gold": "0.6"}}
    assert paired(ours, theirs) == "0.200 ±1.271 (2 of 2)"


def test_a_run_made_again_replaces_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_figures, "FILE", tmp_path / "release.csv")
    monkeypatch.setenv("MKL_CBWR", "AVX")
    keep([{"seed": 7, "method": "ppo", "policy_gold": 0.123456}], "fresh")
    keep([{"seed": 7, "method": "dpo", "policy_gold": 0.2}], "fresh")
    monkeypatch.delenv("MKL_CBWR")
    keep([{"seed": 7, "method": "ppo", "policy_gold": 0.3}], "fresh")
    monkeypatch.setenv("MKL_CBWR", "AVX")
    keep([{"seed": 7, "method": "ppo", "policy_gold": 0.4, "kl": 1.5}], "fresh")
    found = [(row["MKL_CBWR"], row["method"], row["policy_gold"], row["kl"]) for row in read_rows()]
    assert sorted(found) == [
        ("", "ppo", "0.3", ""),
        ("AVX", "dpo", "0.2", ""),
        ("AVX", "ppo", "0.4", "1.5"),
    ]


def test_the_demo_is_the_newest_run_of_its_seed() -> None:
    rows = [*read_rows(), read_rows()[0] | {"seed": "1", "method": "ppo", "policy_gold": "0.1"}]
    assert release_pages.demo(rows)["policy_gold"] == "0.1"
