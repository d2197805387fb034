"""The request bodies, which follow ``vllm/entrypoints`` of vLLM 0.32.

A field that vLLM knows and this engine cannot support is accepted only at its neutral value. No request is
then silently sampled in another way than it asked for. An unknown field is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollyard_engine.errors import EngineError, InvalidRequest
from rollyard_engine.generation.sampling import SamplingParams

MAX_LOGPROBS: Final = 20
"""The maximum number of alternatives that a request may ask for. It is vLLM's default ``--max-logprobs``."""

MAX_SCORED_PROMPT: Final = 4096
"""The longest prompt, in tokens, whose log-probabilities are computed. Each token costs one call of the
model."""

DEFAULT_MAX_TOKENS: Final = 16

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

# These fields of vLLM change what is sampled or returned. At the values listed, they change nothing.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop": ([], ""),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "priority": (0,),
    "cache_salt": (),
    "output_kind": (2,),
}
# These fields concern only vLLM's logging or scheduling. Ignoring them changes no token.
IGNORED: Final = frozenset({"user", "session_id", "detokenize", "flat_logprobs"})
ADVICE: Final = {
    "stop": "; end generation by stop_token_ids",
    "n": "; send one request a sample, each with its own seed",
}


class RequestBody(BaseModel):
    """A request body, which refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {}
        for name, value in data.items():
            if name in cls.model_fields:
                fields[name] = value
            elif name in NEUTRAL:
                if value is not None and value not in NEUTRAL[name]:
                    accepted = " or ".join(map(repr, NEUTRAL[name])) or "null"
                    raise InvalidRequest(
                        f"`{name}` is not supported by this engine: leave it out or set it to {accepted}"
                        f"{ADVICE.get(name, '')}",
                        param=name,
                    )
            elif name not in IGNORED:
                fields[name] = value
        return fields


class SamplingFields(RequestBody):
    """The sampling fields, which both generating calls share."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream_interval: Annotated[int, Field(ge=1)] = 1

    def to_params(self, *, default_max_tokens: int, prompt_tokens: int, room: int) -> SamplingParams:
        """Return the checked parameters.

        ``max_tokens`` is reduced to ``room``, the number of tokens that the context has left, as in vLLM.

        Raises:
            InvalidRequest: A field is invalid. The message names it in vLLM's words.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        top_k = 0 if self.top_k is None else self.top_k
        max_tokens = default_max_tokens if self.max_tokens is None else self.max_tokens
        if not 0.0 <= temperature <= 2.0:  # This comparison is also false for NaN.
            raise InvalidRequest(
                f"temperature must be in [0, 2], got {temperature}.", param="temperature", value=temperature
            )
        if not 0.0 < top_p <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {top_p}.", param="top_p", value=top_p)
        if top_k < -1:
            raise InvalidRequest(
                f"top_k must be 0 (disable), or at least 1, got {top_k}.", param="top_k", value=top_k
            )
        if max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens", value=max_tokens
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"Requested sample logprobs of {self.logprobs}, which is greater than max allowed: "
                f"{MAX_LOGPROBS}"
                if self.logprobs > 0
                else "`logprobs` must be a positive value.",
                param="logprobs",
                value=self.logprobs,
            )
        self._check_prompt_logprobs(prompt_tokens)
        return SamplingParams(
            max_tokens=min(max_tokens, room),
            temperature=temperature,
            top_p=top_p,
            top_k=max(top_k, 0),
            seed=self.seed,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _check_prompt_logprobs(self, prompt_tokens: int) -> None:
        count = self.prompt_logprobs
        if count is None:
            return
        if not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"`prompt_logprobs` must be from 0 to {MAX_LOGPROBS}, got {count}.",
                param="prompt_logprobs",
                value=count,
            )
        if prompt_tokens > MAX_SCORED_PROMPT:
            raise InvalidRequest(
                f"`prompt_logprobs` are computed for prompts of at most {MAX_SCORED_PROMPT} tokens, "
                f"this one has {prompt_tokens}.",
                param="prompt_logprobs",
                value=count,
            )


class StreamOptions(RequestBody):
    """The options that say which chunks of a stream carry ``usage``."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class CompletionBody(SamplingFields):
    """The body of ``POST /v1/completions``."""

    model: str | None = None
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    add_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateBody(RequestBody):
    """The body of ``POST /inference/v1/generate``, which takes token ids and returns token ids."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingFields
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"


class TokenizeBody(RequestBody):
    """The body of ``POST /tokenize``, which contains either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    continue_final_message: Literal[False] = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self


class DetokenizeBody(RequestBody):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


class WeightVersionBody(RequestBody):
    """The body of ``POST /update_weight_version``."""

    new_version: Annotated[str, Field(min_length=1, max_length=256)]


class RpcBody(RequestBody):
    """The body of ``POST /collective_rpc``."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None


class AbortBody(RequestBody):
    """The body of ``POST /inference/v1/abort_requests`` and ``POST /abort_requests``.

    Without ids, the latter aborts all requests.
    """

    request_ids: list[str] | None = None


B = TypeVar("B", bound=BaseModel)

_BRANCH: Final = re.compile(r"str|int|.*[\[\](){}].*")


def parse(kind: type[B], data: object) -> B:
    """Return the validated form of a decoded body.

    Raises:
        EngineError: The body is invalid. The message is in the words of vLLM's validation handler.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)[:10]
        label = "error" if error.error_count() == 1 else "errors"
        lines = [
            f"  {{'type': '{item['type']}', 'loc': '{_location(item['loc'])}', 'msg': '{item['msg']}', "
            f"'input': {str(item['input'])[:200]!r}}}"
            for item in details
        ]
        message = "\n".join([f"{error.error_count()} validation {label}:", *lines])
        raise EngineError(message, reason="MalformedRequest", param=_location(details[0]["loc"])) from error


def _location(loc: tuple[int | str, ...]) -> str:
    """Return ``body.`` and the path of a field.

    pydantic's names of union branches (``str``, ``list[int]``…) are left out.
    """
    return ".".join(["body", *(str(part) for part in loc if not _BRANCH.fullmatch(str(part)))])
