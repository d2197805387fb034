"""The settings of the ProRL calls: a YAML file, with a default for everything in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, PlainValidator, ValidationError
from rollyard_crds.base import Model, Name
from rollyard_crds.base import Path as FilePath
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.yaml_text import YamlError, load_one
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_tasks.formats.registry import task_format

from rollyard_api.core import entrypoints
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import MAX_HOST, NAME
from rollyard_api.prorl.process_calls import FORMATS, RolloutParams, job_spec

MAX_CONFIG_BYTES: Final = 4 << 20


def _rule(text: Any) -> IPv4Network | IPv6Network | str:
    if isinstance(text, str) and len(text) <= MAX_HOST:
        with suppress(ValueError):
            return ip_network(text)
        if NAME.fullmatch(text) and not text[-1].isdigit():
            return text.lower()
    raise ValueError("must be a network such as 10.0.0.0/8, an address, or a name of a host")


def _host(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("must be the name of a host, without a port")
    return text.lower()


def _format(name: str) -> str:
    task_format(name)  # It raises a ValueError if the format is not installed.
    return name


FormatName = Annotated[str, AfterValidator(_format)]
ServerRule = Annotated[IPv4Network | IPv6Network | str, PlainValidator(_rule)]
HostPattern = Annotated[str, Field(max_length=MAX_HOST), AfterValidator(_host)]


class ProrlConfig(Model):
    """What an installer decides about the ProRL calls."""

    namespace: Name = "default"
    """The only namespace that the calls reach."""
    pool: Name = "prorl"
    """The BackendPool that holds the servers of `/add_llm_server`. The calls make it themselves."""
    model: Annotated[str, Field(max_length=4096)] = ""
    """The name under which the servers serve the model. If it is empty, the first server that lists exactly
    one model decides, and a server that lists none has the name of the tokenizer."""
    tokenizer: FilePath | None = None
    """A folder with tokenizer.json and the chat template, as stage workers see it."""
    servers: Annotated[list[ServerRule], Field(max_length=256)] = Field(default_factory=list)
    """The hosts that `/add_llm_server` may name in addition to loopback addresses: networks such as
    `10.0.0.0/8`, and names such as `engine-0.engines`."""
    max_servers: Annotated[int, Field(ge=1, le=1024)] = 64
    """The largest number of servers at the same time."""
    hosts: Annotated[list[HostPattern], Field(max_length=64)] = Field(default_factory=list)
    """The names by which clients address this listener, in addition to `localhost` and its own addresses."""
    max_calls: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """The largest number of `/process` calls that wait at the same time."""
    wait_seconds: Annotated[float, Field(gt=0, le=604_800)] = 21_600.0
    """The longest wait of one `/process` call, in seconds."""
    max_jobs: Annotated[int, Field(ge=1, le=64)] = 4
    """The largest number of open RolloutJobs, one for each combination of sampling parameters in use."""
    max_active_rollouts: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """The rollouts that each server holds at the same time; more wait in the Run queue. By default as many as
    its KV cache has room for, as in every BackendPool."""
    data_sources: Annotated[dict[str, FormatName], Field(max_length=256)] = Field(default_factory=dict)
    """The task formats of further data sources, by the name in `instance.data_source`."""
    specs: dict[str, Any] | None = None
    """The file `tasks.specs` of the format `swebench`, for rows from before SWE-bench 5."""
    spec: dict[str, Any] = Field(default_factory=dict)
    """A part of a RolloutJob's spec: agent, sampling, sandbox, stages, reward and the like."""

    @property
    def formats(self) -> Mapping[str, str]:
        """The task formats by data source."""
        return {**FORMATS, **self.data_sources}


_FIXED: Final = ("tasks", "backendRef", "samplesPerTask", "dynamicSampling", "minGroupSize", "handler")


def _template_problem(config: ProrlConfig) -> str:
    """Return why the part of a spec cannot be that of the jobs, or "" if it can."""
    for name in _FIXED:
        if name in config.spec:
            return f"spec.{name}: is decided by the calls themselves; remove it"
    try:
        spec = job_spec(config.spec, config.pool, RolloutParams())
    except ValidationError as error:
        return describe(error, "spec", RolloutJobSpec)[0]
    # No parameter of a call changes which extensions its job needs.
    missing = entrypoints.problems(spec, entrypoints.installed())
    return missing[0] if missing else ""


def read_config(path: Path | None, tokenizer: str = "") -> ProrlConfig:
    """Return the settings in a YAML file, or the defaults without one.

    Args:
        path: The file.
        tokenizer: The tokenizer, where the file names none.

    Raises:
        OptionInvalid: The file cannot be read, a field is wrong, or something that it names is missing.
    """
    document: Any = {}
    if path is not None:
        try:
            with path.open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES + 1)
            if len(text) > MAX_CONFIG_BYTES:
                raise OptionInvalid(f"{path}: has more than {MAX_CONFIG_BYTES} bytes")
            document = load_one(text) if text.strip() else {}
        except OSError as error:
            raise OptionInvalid(f"{path}: cannot be read: {error.strerror}") from error
        except YamlError as error:
            raise OptionInvalid(f"{path}: is not YAML that is accepted: {error}") from error
    if not isinstance(document, dict):
        raise OptionInvalid(f"{path}: must be a mapping of settings")
    if tokenizer and document.get("tokenizer") is None:
        document = {**document, "tokenizer": tokenizer}
    try:
        config = ProrlConfig.model_validate(document)
    except ValidationError as error:
        problem = describe(error, model=ProrlConfig)[0]
        raise OptionInvalid(f"{path or 'the settings'}: {problem}") from error
    if config.tokenizer is None:
        raise OptionInvalid("tokenizer: is required: give a folder with tokenizer.json and the chat template")
    if problem := _template_problem(config):
        raise OptionInvalid(f"{path or 'the settings'}: {problem}")
    return config
