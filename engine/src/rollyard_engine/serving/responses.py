"""The response bodies, which follow vLLM 0.32. They are plain dictionaries that can be written as JSON."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import Any

from rollyard_engine.errors import EngineError
from rollyard_engine.generation.sampling import PromptToken, SampledToken
from rollyard_engine.generation.sequence import Sequence
from rollyard_engine.tokens import EngineTokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """The options of a completion request, and the fields that every chunk repeats."""

    request_id: str
    created: int
    model: str
    return_token_ids: bool
    tokens_as_ids: bool


def error_body(error: EngineError) -> Json:
    """Return vLLM's error object."""
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    }


def usage(sequence: Sequence) -> Json:
    """Return the token counts, including the number of prompt tokens that came from a kept cache."""
    prompt, sampled = len(sequence.prompt), len(sequence.output)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens},
    }


def text_ids(sequence: Sequence) -> list[int]:
    """Return the sampled ids that ``text`` shows, which are all but the token that stopped the sequence."""
    ids = [token.token_id for token in sequence.output]
    return ids[:-1] if sequence.finish_reason == "stop" else ids


def completion(sequence: Sequence, shape: CompletionShape, tokenizer: EngineTokenizer) -> Json:
    """Return the whole answer of ``/v1/completions``."""
    text = tokenizer.decode(text_ids(sequence), skip_special_tokens=True)
    choice = _completion_choice(sequence, shape, tokenizer, sequence.output, text, 0)
    choice["prompt_logprobs"] = prompt_logprobs(sequence, tokenizer)
    choice["prompt_token_ids"] = sequence.prompt.tolist() if shape.return_token_ids else None
    return {**_completion_head(shape), "choices": [choice], "usage": usage(sequence)}


def completion_chunk(
    sequence: Sequence,
    shape: CompletionShape,
    tokenizer: EngineTokenizer,
    start: int,
    end: int,
    text: str,
    text_offset: int,
) -> Json:
    """Return a chunk with the sampled tokens ``[start, end)``.

    The first chunk also contains the prompt's ids, if they were requested.
    """
    choice = _completion_choice(sequence, shape, tokenizer, sequence.output[start:end], text, text_offset)
    if start == 0 and shape.return_token_ids:
        choice["prompt_token_ids"] = sequence.prompt.tolist()
    if not sequence.finished or end < len(sequence.output):
        choice["finish_reason"] = choice["stop_reason"] = None
    return {**_completion_head(shape), "choices": [choice]}


def usage_chunk(sequence: Sequence, shape: CompletionShape) -> Json:
    """Return the last chunk of a completion stream whose ``stream_options`` request usage."""
    return {**_completion_head(shape), "choices": [], "usage": usage(sequence)}


def prompt_logprobs(sequence: Sequence, tokenizer: EngineTokenizer) -> list[Json | None] | None:
    """Return one object for each prompt token, keyed by token id.

    The first entry is ``None``, because nothing predicts the first token. The whole result is ``None`` if the
    request did not ask for it, or ended before its whole prompt was computed.
    """
    if sequence.params.prompt_logprobs is None or sequence.scoring:
        return None
    return [None, *(_prompt_logprob(token, tokenizer) for token in sequence.prompt_scores)]


def _prompt_logprob(token: PromptToken, tokenizer: EngineTokenizer) -> Json:
    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.piece(token_id),
        }

    own = {str(token.token_id): entry(token.token_id, token.logprob, token.rank)}
    for rank, (token_id, logprob) in enumerate(token.top, start=1):
        own.setdefault(str(token_id), entry(token_id, logprob, rank))
    return own


def generation(
    sequence: Sequence, tokenizer: EngineTokenizer, created: int, model: str, *, return_prompt: bool
) -> Json:
    """Return the whole answer of ``/inference/v1/generate``."""
    return {
        "output_mode": "tokens",
        "request_id": sequence.request_id,
        "model": model,
        "created": created,
        "usage": usage(sequence),
        "prompt_logprobs": prompt_logprobs(sequence, tokenizer),
        "prompt_token_ids": sequence.prompt.tolist() if return_prompt else None,
        "choices": [_generation_choice(sequence, sequence.output, final=True)],
    }


def generation_chunk(sequence: Sequence, start: int, end: int, *, return_prompt: bool) -> Json:
    """Return a chunk with the sampled tokens ``[start, end)``.

    The last chunk also contains the weight versions.
    """
    final = sequence.finished and end == len(sequence.output)
    chunk: Json = {
        "output_mode": "tokens",
        "request_id": sequence.request_id,
        "choices": [_generation_choice(sequence, sequence.output[start:end], final=final)],
    }
    if start == 0 and return_prompt:
        chunk["prompt_token_ids"] = sequence.prompt.tolist()
    return chunk


def _completion_head(shape: CompletionShape) -> Json:
    return {
        "id": shape.request_id,
        "object": "text_completion",
        "created": shape.created,
        "model": shape.model,
    }


def _completion_choice(
    sequence: Sequence,
    shape: CompletionShape,
    tokenizer: EngineTokenizer,
    sampled: Series[SampledToken],
    text: str,
    text_offset: int,
) -> Json:
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = _completion_logprobs(sampled, tokenizer, text_offset, as_ids=shape.tokens_as_ids)
    return {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": [token.token_id for token in sampled] if shape.return_token_ids else None,
    }


def _completion_logprobs(
    sampled: Series[SampledToken], tokenizer: EngineTokenizer, text_offset: int, *, as_ids: bool
) -> Json:
    def piece(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else tokenizer.piece(token_id)

    tokens = [piece(token.token_id) for token in sampled]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [token.logprob for token in sampled],
        "tokens": tokens,
        # The sampled token comes first, followed by the likeliest ones. If it is one of them, the dictionary
        # merges the two entries.
        "top_logprobs": [
            {piece(token_id): logprob for token_id, logprob in ((token.token_id, token.logprob), *token.top)}
            for token in sampled
        ],
    }


def _generation_choice(sequence: Sequence, sampled: Series[SampledToken], *, final: bool) -> Json:
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = {"content": [_generation_logprob(token) for token in sampled]}
    versions = None
    if final:
        versions = [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in sequence.version_spans()
        ]
    return {
        "index": 0,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason if final else None,
        "stop_reason": sequence.stop_reason if final else None,
        "token_ids": [token.token_id for token in sampled],
        "weight_versions": versions,
    }


def _generation_logprob(token: SampledToken) -> Json:
    own = {
        "token_id": token.token_id,
        "logprob": token.logprob,
        "rank": token.rank,
    }
    alternatives = [
        {"token_id": token_id, "logprob": logprob, "rank": rank}
        for rank, (token_id, logprob) in enumerate(token.top, start=1)
        if token_id != token.token_id
    ]
    return {**own, "top_logprobs": [own, *alternatives]}
