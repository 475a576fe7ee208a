"""What a server measures, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


class ServingMetrics:
    """Counters, histograms and gauges of one server, in a registry of their own.

    Attributes:
        requests: Responses by HTTP status, of ``/v1`` alone. A stream counts as 200 when it begins.
        replies: Sampled replies by how they ended: ``stop``, ``length``, ``timeout``,
            ``cancelled``, ``error``.
        in_flight: Replies that are being sampled.
        reply_seconds: From the request to the last token.
        first_token_seconds: From the request to the first token.
        prompt_tokens: Tokens of prompts.
        completion_tokens: Tokens of replies.
        reloads: Attempts to load another revision, by result: ``loaded``, ``failed``.
        reload_failing: 1 while the revision that should be served cannot be found out or loaded.
        policy: 1 for the revision that is served.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def measured(
            kind: type[Any], name: str, about: str, labels: Sequence[str] = (), **more: Any
        ) -> Any:
            return kind(f"rlhf_serve_{name}", about, labels, registry=self.registry, **more)

        self.requests = measured(Counter, "requests", "Responses by status", ["status"])
        self.replies = measured(Counter, "replies", "Replies by how they ended", ["end"])
        self.in_flight = measured(Gauge, "in_flight", "Replies that are being sampled")
        self.reply_seconds = measured(
            Histogram, "reply_seconds", "Request to last token", buckets=SECONDS
        )
        self.first_token_seconds = measured(
            Histogram, "first_token_seconds", "Request to first token", buckets=SECONDS
        )
        self.prompt_tokens = measured(
            Histogram, "prompt_tokens", "Tokens of a prompt", buckets=TOKENS
        )
        self.completion_tokens = measured(
            Histogram, "completion_tokens", "Tokens of a reply", buckets=TOKENS
        )
        self.reloads = measured(Counter, "reloads", "Loads of another revision", ["result"])
        self.reload_failing = measured(
            Gauge, "reload_failing", "Whether the wanted revision is not served"
        )
        self.policy = measured(Gauge, "policy", "The revision that is served", ["revision"])

    def serve_revision(self, revision: str) -> None:
        """Note that ``revision`` alone is served from now on."""
        self.policy.clear()
        self.policy.labels(revision).set(1)
