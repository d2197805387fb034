"""External servers: the model that such a server serves, and the folder of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from rollyard.errors import LookupFailed, StartFailed, UsageProblem

TIMEOUT_SECONDS = 10.0


def _models(url: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=TIMEOUT_SECONDS, trust_env=False)
        answer.raise_for_status()
        listed = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise StartFailed(
            f"--backend {url}: GET /v1/models does not answer as a vLLM-compatible server does ({error})"
        ) from error
    return [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]


def served(url: str, model: str, tokenizer: str) -> tuple[str, str]:
    """Return the name of the model that the server at `url` serves, and the folder of its tokenizer.

    Raises:
        StartFailed: The server does not answer, or it serves no model.
        LookupFailed: The server does not serve `model`.
        UsageProblem: The tokenizer's folder is not known, or it does not exist.
    """
    models = _models(url)
    if not models:
        raise StartFailed(f"--backend {url}: the server lists no model")
    chosen = next((item for item in models if item["id"] == model), None) if model else models[0]
    if chosen is None:
        names = ", ".join(repr(item["id"]) for item in models)
        raise LookupFailed(f"--model {model!r}: the server at {url} serves {names}")
    name = str(chosen["id"])
    candidates = [tokenizer] if tokenizer else [str(chosen.get("root") or ""), name]
    for candidate in candidates:
        folder = Path(candidate).expanduser() if candidate else None
        if folder is not None and (folder / "tokenizer.json").is_file():
            return name, str(folder.resolve())
    raise UsageProblem(
        f"--tokenizer: {tokenizer!r} holds no tokenizer.json"
        if tokenizer
        else f"--backend {url}: give --tokenizer DIR, the folder with the tokenizer.json of {name!r}"
    )
