"""Draw the pictures of a run, and write its screen into the tutorial: ``rlhf run | tee run.txt``,
``python -m benchmarks.run_picture run.txt release.html``.

The first file is what a run prints where its output is no terminal: README's picture has the line
of each stage with its result, and the verdict, and so has the tutorial without times; paths of the
machine are left out. The site's picture is the first screen of the page, by Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES, TUTORIAL = DOCS / "images", DOCS / "tutorial.md"
SCREEN = re.compile(r"(?<=<!--screen-->\n\n```\n).*?(?=\n```\n\n<!--/screen-->)", re.DOTALL)
PICTURE, FIRST_SCREEN = IMAGES / "run.svg", IMAGES / "report.png"
STAGE = re.compile(r"\[ *[\d.]+ s] (?P<name>[\w-]+) +ran +(?P<seconds>[\d.]+) s *(?P<result>.*)")
WIDTH = 122


def drawn_lines(printed: str) -> Iterator[Text]:
    """The lines of the picture: a row per stage, then everything from ``Completed`` to ``next``.

    Raises:
        SystemExit: the text is not that of a run that completed.
    """
    lines = printed.splitlines()
    end = next(
        (number for number, line in enumerate(lines) if line.startswith("Completed: ")), None
    )
    if end is None:
        raise SystemExit(
            "no line begins with 'Completed: ': give the whole output of a run that completed"
        )
    yield Text("rlhf run", style="bold")
    for found in filter(None, map(STAGE.match, lines[:end])):
        minutes, seconds = divmod(round(float(found["seconds"])), 60)
        row = f" {found['name']:12}{minutes:3}:{seconds:02}  {found['result']}"
        yield Text.assemble(("✓", "green"), row.rstrip())
    last = next(number for number, line in enumerate(lines[end:], end) if line.startswith("next "))
    for line in lines[end : last + 1]:
        style = "bold green" if line.startswith(("verdict", "promotion")) else ""
        yield Text(line, style=style)


def tutorial_with(page: str, drawn: list[str]) -> str:
    """The tutorial with the screen of a run, whose times are not said."""
    rows = [re.sub(r"^(✓) (.{12}) *\d+:\d\d", r"\1  \2", line).rstrip() for line in drawn[1:]]
    return SCREEN.sub(lambda _: "\n".join(rows), page)


def draw_first_screen(browser: str, page: Path) -> None:
    """Draw the top of a report."""
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        size = ["--window-size=1100,1103", f"--screenshot={FIRST_SCREEN}"]
        subprocess.run([browser, *options, *size, page.resolve().as_uri()], check=True)
    print(f"{FIRST_SCREEN} is drawn")


def main(printed: Path, page: Path) -> None:
    """Draw both pictures; that of the terminal needs no browser.

    Raises:
        SystemExit: there is no Chromium, or no page.
    """
    lines = list(drawn_lines(printed.read_text(encoding="utf-8")))
    page_text = TUTORIAL.read_text(encoding="utf-8")
    TUTORIAL.write_text(tutorial_with(page_text, [line.plain for line in lines]), encoding="utf-8")
    print(f"{TUTORIAL} is written")
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, highlight=False)
        for line in lines:
            console.print(line)
    svg = console.export_svg(title="rlhf run")
    # A picture fetches nothing: the viewer's own monospaced font will do.
    svg = re.sub(r"@font-face \{.*?\n    \}\n", "", svg, flags=re.DOTALL)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE} is drawn")
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None or not page.is_file():
        raise SystemExit(
            "install Chromium to draw the report" if browser is None else f"there is no {page}"
        )
    draw_first_screen(browser, page)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))
