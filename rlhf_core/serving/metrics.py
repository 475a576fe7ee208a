"""What a server measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServingMetrics:
    """Counters, histograms and gauges of one server, in a registry of their own.

    Attributes:
        requests: Responses by HTTP status, of ``/v1`` alone. A stream counts as 200 when it begins.
        replies: Sampled replies by how they ended: ``stop``, ``length``, ``timeout``, ``cancelled``, ``error``.
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
        self.requests = Counter("rlhf_serve_requests", "Responses by status", ["status"], registry=self.registry)
        self.replies = Counter("rlhf_serve_replies", "Replies by how they ended", ["end"], registry=self.registry)
        self.in_flight = Gauge("rlhf_serve_in_flight", "Replies that are being sampled", registry=self.registry)
        self.reply_seconds = Histogram(
            "rlhf_serve_reply_seconds", "Request to last token", buckets=SECONDS, registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "rlhf_serve_first_token_seconds", "Request to first token", buckets=SECONDS, registry=self.registry
        )
        self.prompt_tokens = Histogram(
            "rlhf_serve_prompt_tokens", "Tokens of a prompt", buckets=TOKENS, registry=self.registry
        )
        self.completion_tokens = Histogram(
            "rlhf_serve_completion_tokens", "Tokens of a reply", buckets=TOKENS, registry=self.registry
        )
        self.reloads = Counter("rlhf_serve_reloads", "Loads of another revision", ["result"], registry=self.registry)
        self.reload_failing = Gauge(
            "rlhf_serve_reload_failing", "Whether the wanted revision is not served", registry=self.registry
        )
        self.policy = Gauge("rlhf_serve_policy", "The revision that is served", ["revision"], registry=self.registry)

    def serve_revision(self, revision: str) -> None:
        """Note that ``revision`` alone is served from now on."""
        self.policy.clear()
        self.policy.labels(revision).set(1)

    def exposition(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self.registry)
