"""A reply in pieces for a stream: what was sent cannot be taken back."""

from __future__ import annotations

from collections.abc import Sequence


class ReplyPieces:
    """Splits a growing text into pieces whose concatenation is the whole reply.

    Args:
        lead: What the chat template writes in front of a reply. A text that is its beginning is held back.
        endings: Strings that a reply ends before. What could be the beginning of one is held back.
    """

    def __init__(self, lead: str, endings: Sequence[str]) -> None:
        self.lead, self.endings = lead, [ending for ending in endings if ending]
        self.sent = ""

    def next(self, text: str) -> str:
        """The next piece of the reply, whose ``text`` so far is longer than it was; empty if there is none yet."""
        if text and self.lead.startswith(text):
            return ""
        # A beginning longer than the text cannot end it: a request's stop string may have millions of characters.
        lengths = (
            n for ending in self.endings for n in range(1, min(len(ending), len(text)) + 1) if text.endswith(ending[:n])
        )
        return self._piece(text[: len(text) - max(lengths, default=0)])

    def rest(self, reply: str) -> str:
        """The last piece of the whole ``reply``."""
        return self._piece(reply)

    def _piece(self, text: str) -> str:
        # A tokenizer may decode a beginning otherwise when it knows more; the text goes on where both agree again.
        if not text.startswith(self.sent):
            return ""
        piece = text[len(self.sent) :]
        self.sent = text
        return piece
