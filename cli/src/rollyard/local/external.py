"""External servers: the model that such a server serves, and the folder of its tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx
from rollyard_inference.errors import BackendError, ModelNotServed
from rollyard_inference.health import find_model
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.transports.with_httpx import HttpxTransport

from rollyard.errors import LookupFailed, StartFailed, UsageProblem

TIMEOUT_SECONDS: Final = 10.0


async def _find(url: str, model: str) -> ServedModel:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await find_model(HttpxTransport(http), url, model, TIMEOUT_SECONDS)


def served(url: str, model: str, tokenizer: str) -> tuple[str, str]:
    """Return the name of the model that the server at `url` serves, and the folder of its tokenizer.

    Raises:
        StartFailed: The server does not answer, or it lists no model.
        LookupFailed: The server does not serve `model`.
        UsageProblem: The tokenizer's folder is not known, or it does not exist.
    """
    try:
        answer = asyncio.run(_find(url, model))
    except ModelNotServed as error:
        raise LookupFailed(f"--model {model!r}: at {url}, {error}") from error
    except BackendError as error:
        raise StartFailed(
            f"--backend {url}: GET /v1/models does not answer as a vLLM-compatible server does ({error})"
        ) from error
    candidates = [tokenizer] if tokenizer else [answer.folder or "", answer.name]
    for candidate in candidates:
        folder = Path(candidate).expanduser() if candidate else None
        if folder is not None and (folder / "tokenizer.json").is_file():
            return answer.name, str(folder.resolve())
    raise UsageProblem(
        f"--tokenizer: {tokenizer!r} holds no tokenizer.json"
        if tokenizer
        else f"--backend {url}: give --tokenizer DIR, the folder with the tokenizer.json of {answer.name!r}"
    )
