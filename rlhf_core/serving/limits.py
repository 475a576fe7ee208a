"""What one server accepts at most."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a request: room for a prompt of 100,000 tokens and more. Larger bodies are not read.
MAX_BODY_BYTES = 4 * 2**20
# Characters that no token of a common vocabulary has. Messages with more of them for each token that fits are refused
# before they are tokenised, which takes a second per million characters and holds up other requests.
MAX_TOKEN_CHARACTERS = 256
# What a refused client waits before it asks again.
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True)
class ServingLimits:
    """Limits of each request and of all of them together.

    Attributes:
        max_prompt_tokens: Tokens of the messages as the chat template writes them; None: what the model takes.
        max_new_tokens: Tokens of a reply that a request may ask for.
        max_concurrent: Replies that are sampled at the same time. Further requests get status 429.
        timeout_seconds: After so many seconds a request ends with an error, checked at every token.
    """

    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_concurrent: int = 8
    timeout_seconds: float = 120.0
