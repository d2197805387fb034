"""A server that runs already: its model, the tokenizer of that, and what it lacks for training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx
from rollyard_inference.errors import BackendError, ModelNotServed
from rollyard_inference.fitness import FitnessCheck, Probed, ask, checks, in_a_line
from rollyard_inference.health import find_model
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_process.hub import TOKENIZER_FILE, HubError, download
from rollyard_process.hub_names import hub_name
from rollyard_process.log_text import one_line

from rollyard.errors import LookupFailed, StartFailed, UsageProblem
from rollyard.extras import missing

MODEL_SECONDS: Final = 10.0
"""The time limit of the request for the model of a running server, in seconds."""
ASK_SECONDS: Final = 90.0
"""The time limit of all requests together that find out what a server has for training, in seconds."""
MAX_QUOTED: Final = 200
MAX_MESSAGE: Final = 1000
"""The largest numbers of characters of a server's text in a message: of a name, and of everything."""


async def _find(url: str, model: str) -> ServedModel:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await find_model(HttpxTransport(http), url, model, MODEL_SECONDS)


def served(url: str, model: str, tokenizer: str) -> tuple[str, str]:
    """Return the name of the model that the server at `url` serves, and the folder of its tokenizer.

    Raises:
        StartFailed: The server does not answer, or it lists no model.
        LookupFailed: The server does not serve `model`.
        UsageProblem: No tokenizer is found. The message says what to give.
    """
    try:
        answer = asyncio.run(_find(url, model))
    except ModelNotServed as error:
        raise LookupFailed(f"--model {model!r}: at {url}, {_short(error)}") from error
    except BackendError as error:
        raise StartFailed(
            f"--backend {url}: GET /v1/models does not answer as a vLLM-compatible server does "
            f"({_short(error)})"
        ) from error
    try:
        return answer.name, str(tokenizer_folder(answer, tokenizer))
    except LookupFailed as error:
        option = f"--tokenizer {tokenizer!r}" if tokenizer else f"--backend {url}: give --tokenizer DIR"
        raise UsageProblem(f"{option}: {error}") from error


def tokenizer_folder(model: ServedModel, option: str = "") -> Path:
    """Return the folder with the tokenizer of a served model.

    It is that of the option, or else that of what the server loaded: a folder of this machine, or a model of
    the Hugging Face Hub, of which this machine's cache gets what it lacks. The name under which the model is
    served may be anything, so it counts only if the server does not say what it loaded.

    Args:
        model: What the server says of its model.
        option: A folder or the name of a model of the hub that is used instead.

    Raises:
        LookupFailed: There is no tokenizer. The message says where it was looked for.
    """
    source = option or model.folder or model.name
    if not source:
        raise LookupFailed("the server does not say what it loaded")
    quoted, repository = repr(source[:MAX_QUOTED]), hub_name(source)
    if not (option or repository is not None or source.startswith("/")):
        raise LookupFailed(f"the server loaded {quoted}, which is no absolute path and no id OWNER/NAME")
    try:
        folder = Path(source).expanduser().resolve()
        is_folder, holds_one = folder.is_dir(), (folder / TOKENIZER_FILE).is_file()
    except (OSError, RuntimeError):  # The path is too long, or it begins with ~ and a user that is not here.
        raise LookupFailed(f"{quoted} is not a folder that can be read") from None
    if holds_one:
        return folder
    if repository is None or is_folder:
        raise LookupFailed(f"{quoted} holds no {TOKENIZER_FILE} on this machine")
    try:
        return download(repository, "tokenizer")
    except HubError as error:
        raise LookupFailed(str(error)) from error


def tokenizer_check(model: ServedModel, option: str) -> FitnessCheck:
    """Return whether the tokenizer and the chat template of a served model are found here, and where."""
    from rollyard_pipeline.chat.tokenizer import load_folder
    from rollyard_pipeline.errors import TokenizerUnavailable

    name, cost, remedy = "tokenizer", "no conversation becomes token ids", "--tokenizer DIR of `rollyard up`"
    if missing("worker"):
        finding = "not looked for, which needs `pip install 'rollyard[worker]'`"
        return FitnessCheck(name, "unknown", finding, False, cost, remedy)
    try:
        folder = tokenizer_folder(model, option)
        load_folder(folder)
    except (LookupFailed, TokenizerUnavailable) as error:
        finding = "no tokenizer with a chat template"
        return FitnessCheck(name, "lacks", finding, True, cost, remedy, detail=_short(error))
    return FitnessCheck(name, "good", f"{folder}, with a chat template", True)


def check_url(name: str, url: str) -> None:
    """Raise UsageProblem if the value of an argument is no URL of a server."""
    if not url.startswith(("http://", "https://")):
        raise UsageProblem(f"{name} must be a URL such as http://127.0.0.1:8000 (got {url!r})")


async def _ask(url: str, model: str, needed_only: bool) -> Probed:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(ASK_SECONDS):
        return await ask(HttpxTransport(http), url, model, needed_only=needed_only)


def probed(url: str, model: str, *, needed_only: bool = False) -> Probed:
    """Ask a server what it has for training. See `rollyard_inference.fitness.ask`.

    Raises:
        UsageProblem: The server does not answer in time, it is no server of a language model, or it does not
            serve `model`.
    """
    try:
        return asyncio.run(_ask(url, model, needed_only))
    except TimeoutError as error:
        raise UsageProblem(f"{url}: not all requests were answered within {ASK_SECONDS:g} s") from error
    except ModelNotServed as error:
        raise UsageProblem(f"--model {model!r}: at {url}, {_short(error)}") from error
    except BackendError as error:
        raise UsageProblem(_short(error)) from error


def trains_line(url: str, model: str) -> str:
    """Return in one line whether a server can train, or why this is not known."""
    try:
        return in_a_line(checks(probed(url, model, needed_only=True)))
    except UsageProblem as error:
        return f"unknown: {error}"


def _short(error: Exception) -> str:
    """Return the message of an error as one line. A server may have put text of any length into it."""
    return one_line(str(error)[:MAX_MESSAGE])
