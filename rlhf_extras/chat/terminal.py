"""A conversation with a model on standard input and output. Heavy imports wait until it begins."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.runtime.progress import busy


def talk(
    folder: Path,
    sampling: Mapping[str, Any],
    seed: int,
    about: Sequence[str] = (),
    workspace: Path | None = None,
) -> None:
    """Converse with the model in ``folder`` until standard input ends or says /quit.

    Args:
        folder: The model folder.
        sampling: Fields of :class:`~rlhf_core.config.model.SamplingConfig`.
        seed: Makes the replies repeatable.
        about: Lines that say what the model is, printed first on a terminal.
        workspace: Where held-out prompts to try are taken from.
    """
    with busy("loading the model"):
        from rlhf_core.config.model import SamplingConfig
        from rlhf_core.errors import ConfigError
        from rlhf_extras.chat.session import ChatSession, converse, prompts_to_try

        try:
            checked = SamplingConfig(**sampling)
        except ValueError as error:
            message = (
                "--temperature and --max-new-tokens must be above 0, --top-p above 0 and at most 1"
            )
            raise ConfigError(message) from error
        session = ChatSession.open(folder, checked, seed)
        prompts = prompts_to_try(workspace) if workspace is not None else []
    if isinstance(sys.stdin, io.TextIOWrapper):
        # So a line that is not UTF-8 is refused by itself.
        sys.stdin.reconfigure(errors="surrogateescape")
    introduction = [*about]
    if prompts:
        introduction += ["", "try, for example:"]
        introduction += [f"  {prompt}" for prompt in prompts]
        introduction.append("")
    converse(session, sys.stdin, sys.stdout, introduction, edited_line)


def edited_line(prompt: str) -> str:
    """Read a line that can be edited, with earlier lines at the arrow keys; empty at the end.

    The terminal's own editing erases one column for a Chinese character, which has two.
    """
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401 - its import changes how input() reads
    try:
        return input(prompt) + "\n"
    except EOFError:
        return ""
