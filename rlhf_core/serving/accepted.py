"""A chat request that a policy will answer, with its prompt encoded and its settings checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import DataError, ModelError
from rlhf_core.sampling.reply import SampledReply
from rlhf_core.serving.policy import LoadedPolicy, ReplySettings
from rlhf_core.serving.protocol import (
    MAX_TOKEN_CHARACTERS,
    SEEDS,
    ApiError,
    ChatRequest,
    CompletionId,
    ServingLimits,
    shown,
    token_usage,
)


@dataclass(frozen=True)
class AcceptedRequest:
    """A request with the policy that answers it, the prompt's tokens and the reply's settings."""

    request: ChatRequest
    policy: LoadedPolicy
    prompt_ids: list[int]
    settings: ReplySettings
    completion: CompletionId

    def usage(self, reply: SampledReply) -> dict[str, int]:
        """Return the token counts."""
        return token_usage(len(self.prompt_ids), len(reply.token_ids))

    def response(self, reply: SampledReply) -> dict[str, Any]:
        """Return the whole chat completion."""
        return self.completion.completion(reply.text, reply.finish_reason, self.usage(reply))


def accept_request(
    request: ChatRequest, policy: LoadedPolicy, limits: ServingLimits, created: int
) -> AcceptedRequest:
    """Encode the prompt and settle how its reply is sampled.

    What the request leaves open is set as it was when the policy was judged.

    Args:
        created: Seconds since 1970.

    Raises:
        ApiError: The chat template refuses the messages, or prompt and reply do not fit.
    """

    def refused(
        message: str, code: str = "context_length_exceeded", param: str = "messages"
    ) -> ApiError:
        return ApiError(400, message, param=param, code=code)

    judged, context, most_prompt = policy.judged, policy.context, limits.max_prompt_tokens
    bounds = [bound for bound in (most_prompt, context) if bound is not None]
    characters = sum(len(message.content) for message in request.dialogue)
    # So many characters are too many, however few tokens they make.
    if bounds and characters > min(bounds) * MAX_TOKEN_CHARACTERS:
        raise refused(
            f"the messages have {characters} characters, far more than {min(bounds)} tokens hold; shorten them"
        )
    try:
        prompt_ids = policy.encode(request.dialogue)
    # The chat template refuses the dialogue, or does not end on it.
    except (DataError, ModelError) as error:
        raise refused(str(error), "invalid_value") from error
    count, wanted = len(prompt_ids), request.requested_tokens
    if most_prompt is not None and count > most_prompt:
        raise refused(f"the messages have {count} tokens; this server takes at most {most_prompt}")
    if wanted is not None and wanted > limits.max_new_tokens:
        message = (
            f"max_tokens is {shown(wanted)}; this server writes at most {limits.max_new_tokens}"
        )
        raise refused(message, "invalid_value", "max_tokens")
    tokens = min(judged.max_new_tokens, limits.max_new_tokens) if wanted is None else wanted
    if context is not None:
        room = context - count
        if wanted is None:
            tokens = min(tokens, room)
        if room < 1:
            raise refused(
                f"the messages have {count} tokens; the model's context has {context} for them and the reply: "
                "shorten them"
            )
        if tokens > room:
            raise refused(
                f"the messages have {count} tokens; with max_tokens {tokens} that exceeds the {context} of the "
                "model's context: shorten one of them"
            )
    temperature, top_p, seed = request.temperature, request.top_p, request.seed
    if temperature is None:
        temperature = judged.temperature
    if top_p is None:
        top_p = judged.top_p
    if seed is None:
        seed = secrets.randbits(63)
    settings = ReplySettings(
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=request.repetition_penalty or judged.repetition_penalty,
        max_new_tokens=tokens,
        seed=seed % SEEDS,
        stop=tuple(request.stop or ()),
    )
    completion = CompletionId(policy.revision.id, created)
    return AcceptedRequest(request, policy, prompt_ids, settings, completion)
