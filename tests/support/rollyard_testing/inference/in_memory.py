"""Answers of a vLLM-shaped server for clients that reach it in this process (`httpx.MockTransport`)."""

from __future__ import annotations

import json

import httpx


def completion(request: httpx.Request, logprob: float | None) -> httpx.Response:
    """Answer a POST like a server whose only call for tokens is `/v1/completions`, with token ids."""
    if request.url.path != "/v1/completions":
        return httpx.Response(404)
    body = json.loads(request.content)
    if not body:  # The request only asks whether the call exists.
        return httpx.Response(400)
    choice = {
        "prompt_token_ids": body["prompt"],
        "token_ids": [7],
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [logprob]},
    }
    return httpx.Response(200, json={"choices": [choice]})
