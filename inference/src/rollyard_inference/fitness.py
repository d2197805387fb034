"""What a server lacks for training: each check with its state, its cost, and the option that would change it.

`ask` sends the requests, and `checks` reads what was answered. The options are those of vLLM 0.32. Those of
SGLang are taken from its documentation (0.5), and were never tried against a running server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rollyard_inference import metrics
from rollyard_inference.capabilities import Capabilities, get, probe
from rollyard_inference.errors import BackendError, BackendMismatch, BackendRefused, ModelNotServed
from rollyard_inference.health import check_alive, find_model, first_answer
from rollyard_inference.metrics import CacheConfig, ServerMetrics
from rollyard_inference.replies import sampled
from rollyard_inference.sampling.prorl import ProrlGenerate
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.sampling.vllm import VllmCompletions
from rollyard_inference.transports.interface import Transport, base_url

State = Literal["good", "lacks", "unknown"]
Engine = Literal["vLLM", "SGLang", "ProRL", "embedded engine"]

REQUEST_SECONDS: Final = 10.0
SAMPLING_SECONDS: Final = 30.0
"""The time limit of a request for tokens, in seconds. A server may compile kernels for its first one."""
_MAX_BYTES: Final = 8 << 20
_PAIR: Final = (0, 1)
"""Two ids that every vocabulary contains."""
_DEVELOPER: Final = "VLLM_SERVER_DEV_MODE=1"
_LOADS_ADAPTERS: Final = "/v1/load_lora_adapter"
"""The call of vLLM that loads an adapter. vLLM has it only with `_RUNTIME_ADAPTERS`."""
_RUNTIME_ADAPTERS: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_INFO: Final = ("/server_info?config_format=json", "/get_server_info")
"""The path of vLLM and of SGLang, and the older name of SGLang's."""
_INFO_SECONDS: Final = (
    30.0  # The first time, vLLM runs programs that describe its environment: 7 s were seen.
)
_MAX_TEXT: Final = 300
"""The largest number of characters that a check quotes of a server."""


@dataclass(frozen=True, slots=True)
class FitnessCheck:
    """One thing that training uses, and whether the server has it."""

    name: str
    state: State
    finding: str
    """What the server has, or what it lacks."""
    needed: bool = False
    """Whether a server that lacks it cannot train. Otherwise training is slower, or has fewer choices."""
    cost: str = ""
    """What it costs where it is missing. It is empty in the state `good`."""
    remedy: str = ""
    """The option of the server, or the variable of its environment, that would change it."""
    detail: str = ""
    """What the server, or what looked for it, said about it."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a server answered."""

    engine: Engine
    version: str
    """The version of the engine, or an empty string if it does not say."""
    model: ServedModel
    capabilities: Capabilities | None
    """What it can do, or None if it has no call with token ids."""
    refused: str = ""
    """Why no token was sampled, or an empty string."""
    paused: bool = False
    mode: str = "unknown"
    """The kind of the log-probabilities, as `SamplingCall.mode` names it."""
    versions: bool = False
    """Whether an answer says which weights sampled which token."""
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    cache: CacheConfig = field(default_factory=CacheConfig)
    loads_adapters: bool | None = None
    """Whether the server has the call of vLLM that loads an adapter, or None if this is not known."""
    settings: Mapping[str, Any] | None = None
    """The settings that the server was started with, or None if it does not show them."""


async def ask(transport: Transport, url: str, model: str = "", *, needed_only: bool = False) -> Probed:
    """Ask a server everything that the checks need. It samples three tokens, and none while it is paused.

    Args:
        transport: Sends the requests. There are at most 31, each with a limit of time and bytes.
        url: The base URL of the server.
        model: The name of the model, or an empty string for the first one that the server lists.
        needed_only: Whether to leave out what is only for the checks that are not needed.

    Raises:
        ModelNotServed: The server serves other models.
        BackendError: The server did not answer, failed, or is no server of a language model.
    """
    await check_alive(transport, url, REQUEST_SECONDS)
    problem = ""
    try:
        capabilities = await probe(transport, url, REQUEST_SECONDS)
    except BackendMismatch as error:
        capabilities, problem = None, str(error)
    served = await _served(transport, url, model, capabilities)
    engine, version = await _engine(transport, url, capabilities)
    base: dict[str, Any] = {"engine": engine, "version": version, "model": served}
    if not needed_only:
        base |= await _details(transport, url, engine)
    if capabilities is None:
        return Probed(capabilities=None, refused=problem, **base)
    if await _is_paused(transport, url, capabilities):
        return Probed(capabilities=capabilities, paused=True, **base)
    try:
        answer = await first_answer(transport, url, capabilities, served.name, SAMPLING_SECONDS)
    except (BackendMismatch, BackendRefused) as error:
        return Probed(capabilities=capabilities, refused=str(error), **base)
    try:
        mode = await logprobs_mode(transport, url, capabilities, served)
    except (BackendMismatch, BackendRefused):
        mode = "unknown"  # The server does not have what the probes use, such as a list of allowed tokens.
    return Probed(capabilities=capabilities, mode=mode, versions=answer.versions is not None, **base)


async def logprobs_mode(
    transport: Transport,
    url: str,
    capabilities: Capabilities,
    model: ServedModel,
    seconds: float = SAMPLING_SECONDS,
) -> str:
    """Return the kind of the log-probabilities that a server gives, by two requests of one token.

    They are sent at once, so that no others come between them on a busy server.

    Args:
        seconds: The time limit of each request, in seconds.

    Raises:
        BackendError: The server did not answer, or its answer fails a check.
    """
    if model.logprobs_mode is not None:
        return model.logprobs_mode
    address = base_url(url) + capabilities.call.path

    async def answer(body: object) -> object:
        reply = await transport.request("POST", address, body, seconds=seconds, limit=_MAX_BYTES)
        return sampled(f"POST {address}", reply)

    answers = await asyncio.gather(*map(answer, capabilities.call.mode_probes(model, _PAIR)))
    return capabilities.call.mode(answers, _PAIR)


async def _served(
    transport: Transport, url: str, model: str, capabilities: Capabilities | None
) -> ServedModel:
    """Return what the server says of a model.

    Raises:
        ModelNotServed: The server serves other models.
        BackendMismatch: It lists no models. The message has the status that it answered.
    """
    if capabilities is not None and isinstance(capabilities.call, ProrlGenerate):
        return ServedModel(model)
    try:
        return await find_model(transport, url, model, REQUEST_SECONDS)
    except ModelNotServed:
        raise
    except BackendMismatch as error:
        status, _ = await get(transport, f"{base_url(url)}/v1/models", REQUEST_SECONDS)
        hint = "; Rollyard sends no API key: start the server without one" if status in (401, 403) else ""
        raise BackendMismatch(f"{error}, but status {status}{hint}") from error


async def _engine(transport: Transport, url: str, capabilities: Capabilities | None) -> tuple[Engine, str]:
    """Return the kind of the server and its version."""
    if capabilities is not None and isinstance(capabilities.call, ProrlGenerate):
        return "ProRL", ""
    if capabilities is not None and capabilities.weights.shape == "sglang":
        return "SGLang", ""
    try:
        _, body = await get(transport, base_url(url) + "/version", REQUEST_SECONDS)
    except BackendError:
        return "vLLM", ""
    if not isinstance(body, dict):
        return "vLLM", ""
    version = body.get("version")
    engine: Engine = "embedded engine" if body.get("engine") == "rollyard_engine" else "vLLM"
    return engine, version[:_MAX_TEXT] if isinstance(version, str) else ""


async def _is_paused(transport: Transport, url: str, capabilities: Capabilities) -> bool:
    if not capabilities.reports_pause:
        return False
    _, body = await get(transport, base_url(url) + "/is_paused", REQUEST_SECONDS)
    return isinstance(body, dict) and body.get("is_paused") is True


async def _details(transport: Transport, url: str, engine: Engine) -> dict[str, Any]:
    """Return the fields of `Probed` that concern the server's metrics, calls and settings."""
    fields: dict[str, Any] = {}
    try:
        address = f"{base_url(url)}/metrics"
        reply = await transport.request("GET", address, seconds=REQUEST_SECONDS, limit=_MAX_BYTES)
        if reply.status == 200:
            fields = {"metrics": metrics.parse(reply.content), "cache": metrics.cache_config(reply.content)}
        if engine == "vLLM":
            # The call takes POST alone, so this loads nothing.
            status, _ = await get(transport, base_url(url) + _LOADS_ADAPTERS, REQUEST_SECONDS)
            fields["loads_adapters"] = {405: True, 404: False}.get(status)
        for path in _INFO:
            status, body = await get(transport, base_url(url) + path, _INFO_SECONDS)
            if status == 200 and isinstance(body, dict):
                return fields | {"settings": body}
    except BackendError:
        pass  # These are not needed: the checks say that they are unknown.
    return fields


def checks(probed: Probed) -> tuple[FitnessCheck, ...]:
    """Return the checks of a server. Those that its engine has no option for are left out."""
    rows = [_token_ids(probed)]
    can = probed.capabilities
    if can is None:
        return tuple(rows)
    rows += [_logprobs(probed), _weight_updates(probed, can)]
    if probed.engine != "ProRL":
        length = can.limit(probed.model.name)
        rows += [_token_versions(probed, can), _prefix_cache(probed)]
        rows += [_context(probed, length), _kv_cache(probed, length)]
    if probed.engine in ("vLLM", "SGLang"):
        rows.append(_sleep(probed))
    if probed.engine == "vLLM":
        rows += [_weight_transfer(probed), _adapters(probed)]
    return tuple(rows)


def trains(rows: Iterable[FitnessCheck]) -> Literal["yes", "no", "unknown"]:
    """Return whether a server with these checks can train: whether it has all that is needed."""
    states = {row.state for row in rows if row.needed}
    return "no" if "lacks" in states else "unknown" if "unknown" in states else "yes"


def in_a_line(rows: Iterable[FitnessCheck]) -> str:
    """Return whether a server can train, and if not, why and what to add: `no: REASON (OPTION); …`."""
    rows = tuple(rows)
    verdict = trains(rows)
    state: State = "lacks" if verdict == "no" else "unknown"
    reasons = [
        f"{row.finding} ({row.remedy})" if row.remedy else row.finding
        for row in rows
        if row.needed and row.state == state
    ]
    return f"{verdict}: {'; '.join(reasons)}" if verdict != "yes" else verdict


def _token_ids(probed: Probed) -> FitnessCheck:
    name = "token ids"
    if probed.paused:
        finding = "the server is paused, so nothing could be sampled"
        return FitnessCheck(
            name, "unknown", finding, True, "nothing is sampled until it resumes", "POST /resume"
        )
    if probed.capabilities is None or probed.refused:
        finding, remedy = "no token ids with log-probabilities", "vLLM 0.30 or SGLang 0.5, or newer"
        return FitnessCheck(
            name, "lacks", finding, True, "no rollout can run on it", remedy, probed.refused[:_MAX_TEXT]
        )
    return FitnessCheck(
        name, "good", f"in and out by {probed.capabilities.call.path}, with log-probabilities", True
    )


def _logprobs(probed: Probed) -> FitnessCheck:
    name = "log-probabilities"
    if probed.mode == "processed_logprobs":
        return FitnessCheck(name, "good", "of the distribution that is sampled from", True)
    if probed.mode == "temperature_logprobs":
        finding = "after temperature, before top-p and top-k: train with topP 1 and topK -1"
        return FitnessCheck(name, "good", finding, True)
    if probed.mode == "raw_logprobs":
        return FitnessCheck(
            name,
            "lacks",
            "raw log-probabilities",
            True,
            "importance ratios at a temperature other than 1, or with top-p or top-k, are wrong, and nothing "
            "shows it",
            "without SGLANG_RETURN_ORIGINAL_LOGPROB=1"
            if probed.engine == "SGLang"
            else "--logprobs-mode processed_logprobs",
        )
    finding = "log-probabilities of an unknown kind"
    if probed.mode != "unknown":
        finding += f", {probed.mode[:_MAX_TEXT]!r}"
    cost = "importance ratios may be wrong"
    return FitnessCheck(name, "unknown", finding, True, cost)


def _weight_updates(probed: Probed, can: Capabilities) -> FitnessCheck:
    name = "weight updates"
    weights = can.weights
    if probed.engine == "ProRL":
        finding = "not in ProRL's protocol: whoever runs the server updates its weights"
        return FitnessCheck(name, "good", finding, True)
    if weights.label is not None and (weights.shape == "sglang" or can.reports_pause):
        return FitnessCheck(
            name, "good", f"the server pauses, loads and labels weights ({weights.path})", True
        )
    cost = "new weights need a restart of the server, and no token says which weights sampled it"
    if weights.shape == "sglang":
        return FitnessCheck(name, "lacks", "no label of the weights", True, cost, "SGLang 0.5 or newer")
    return FitnessCheck(
        name, "lacks", "no calls for pauses and weights", True, cost, f"{_DEVELOPER} in its environment"
    )


def _token_versions(probed: Probed, can: Capabilities) -> FitnessCheck:
    name = "token versions"
    if probed.versions:
        return FitnessCheck(name, "good", "each token says which weights sampled it")
    if probed.paused or probed.refused:
        return FitnessCheck(name, "unknown", "nothing could be sampled")
    remedy = f"a newer {probed.engine}"
    if isinstance(can.call, VllmCompletions):
        remedy = "--enable-scale-out"
    cost = "updates in the mode `keep` are refused, and a turn during which weights change is sampled again"
    return FitnessCheck(name, "lacks", "no weight version of each token", False, cost, remedy)


def _prefix_cache(probed: Probed) -> FitnessCheck:
    name = "prefix cache"
    cost = "every turn computes its whole conversation again"
    caching = probed.cache.prefix_caching
    if probed.engine == "SGLang":
        disabled = (probed.settings or {}).get("disable_radix_cache")
        caching = None if not isinstance(disabled, bool) else not disabled
    counted = probed.metrics.prefix_queries is not None and probed.metrics.prefix_hits is not None
    if caching is False:
        remedy = "without --disable-radix-cache" if probed.engine == "SGLang" else "--enable-prefix-caching"
        return FitnessCheck(name, "lacks", "switched off", False, cost, remedy)
    remedy = "--enable-metrics" if probed.engine == "SGLang" else "without --disable-log-stats"
    if not counted:
        cost = "the hit rate is not known, and a cache that is too small goes unnoticed"
        finding = "on, but its hits are not reported" if caching else "not reported"
        return FitnessCheck(name, "lacks" if caching else "unknown", finding, False, cost, remedy)
    queries, hits = probed.metrics.prefix_queries or 0.0, probed.metrics.prefix_hits or 0.0
    rate = f"; {min(1.0, hits / queries):.0%} of prompt tokens found in it since the start" if queries else ""
    return FitnessCheck(name, "good", f"on{rate}")


def _context(probed: Probed, length: int | None) -> FitnessCheck:
    name = "context"
    option = "--context-length" if probed.engine == "SGLang" else "--max-model-len"
    if length is None:
        cost = "a rollout that outgrows it fails; set agent.maxContextTokens in each job"
        return FitnessCheck(name, "unknown", "length not reported", False, cost, f"{option} N")
    return FitnessCheck(name, "good", f"{length:,} tokens ({option} changes it)")


def _kv_cache(probed: Probed, length: int | None) -> FitnessCheck:
    name = "KV cache"
    tokens = probed.cache.tokens
    if probed.engine == "SGLang":
        size = (probed.settings or {}).get("max_total_num_tokens")
        tokens = size if type(size) is int and size > 0 else None
    if tokens is None:
        cost = "choose the pool's maxActiveRollouts by what the server prints at its start"
        remedy = "without --disable-log-stats" if probed.engine == "vLLM" else ""
        return FitnessCheck(name, "unknown", "size not reported", False, cost, remedy)
    whole = f", {tokens // length:,} rollouts of full length" if length else ""
    return FitnessCheck(name, "good", f"{tokens:,} tokens{whole}")


def _sleep(probed: Probed) -> FitnessCheck:
    name = "sleep"
    cost = "a trainer on the same GPUs cannot have the server's memory while it trains"
    if probed.engine == "SGLang":
        option, enabled = "--enable-memory-saver", (probed.settings or {}).get("enable_memory_saver")
    else:
        option, enabled = "--enable-sleep-mode", _vllm_setting(probed, "model_config", "enable_sleep_mode")
    if enabled is True:
        return FitnessCheck(name, "good", "the server can free the memory of its GPUs")
    if enabled is False:
        return FitnessCheck(
            name, "lacks", "the server cannot free the memory of its GPUs", False, cost, option
        )
    return FitnessCheck(name, "unknown", _unreported(probed), False, cost, option)


def _weight_transfer(probed: Probed) -> FitnessCheck:
    name = "weight transfer"
    cost = "a trainer cannot push tensors into the server: updates load checkpoint folders"
    option = """--weight-transfer-config '{"backend": "nccl"}'"""
    config = _vllm_config(probed)
    if "weight_transfer_config" not in config:
        return FitnessCheck(name, "unknown", _unreported(probed), False, cost, option)
    if config["weight_transfer_config"] is None:
        return FitnessCheck(name, "lacks", "the server takes no tensors from a trainer", False, cost, option)
    return FitnessCheck(name, "good", "the server takes tensors from a trainer")


def _adapters(probed: Probed) -> FitnessCheck:
    name = "adapters"
    config = _vllm_config(probed)
    enabled = config["lora_config"] is not None if "lora_config" in config else None
    if enabled and probed.loads_adapters:
        return FitnessCheck(name, "good", "the server loads adapters (LoRA) while it runs")
    parts = []
    if not enabled:
        parts.append("--enable-lora")
    if not probed.loads_adapters:
        parts.append(f"{_RUNTIME_ADAPTERS} in its environment")
    remedy = ", and ".join(parts)
    cost = "a trainer of an adapter (LoRA) cannot bring it to the server"
    if enabled is False or probed.loads_adapters is False:
        return FitnessCheck(name, "lacks", "the server loads no adapters while it runs", False, cost, remedy)
    return FitnessCheck(name, "unknown", _unreported(probed), False, cost, remedy)


def _unreported(probed: Probed) -> str:
    """Return why a setting of a server is not known."""
    hidden = probed.engine == "vLLM" and probed.settings is None
    return f"reported only with {_DEVELOPER}" if hidden else "not reported"


def _vllm_config(probed: Probed) -> Mapping[str, Any]:
    """Return the configuration that a vLLM server shows, which is empty if it shows none."""
    config = (probed.settings or {}).get("vllm_config")
    return config if isinstance(config, dict) else {}


def _vllm_setting(probed: Probed, group: str, name: str) -> object:
    part = _vllm_config(probed).get(group)
    return part.get(name) if isinstance(part, dict) else None
