"""The declaration of every option of the control plane: its name, type, bounds, default and help.

The name of an option is the same everywhere: `--lease-seconds` on a command line, `lease-seconds` in a file
and ROLLYARD_CONTROL_PLANE_LEASE_SECONDS as a variable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from rollyard_crds.fields.allowed_hosts import installers_rule

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import MAX_HOST, NAME, address_of

BOUNDS: Final = "Bounds on what one namespace, or one client, may hold"
HTTP: Final = "HTTP"
JOBS: Final = "What jobs may name"
LEASES: Final = "Leases and outages"
LOGS: Final = "Traces and logs"
PAGE: Final = "The page and sign-in"
PRORL: Final = "The calls of ProRL Agent's server, which need no token (see docs/prorl.md)"
STATE: Final = "State"
WEIGHTS: Final = "Weight updates"
_NETWORK: Final = "A network in which the hosts of these prefixes may be, beside public addresses; repeatable"
_YEAR_SECONDS: Final = 366 * 86400.0
MAX_PREFIX: Final = 200
"""The largest number of characters of a path prefix."""
_PREFIX_FORM: Final = re.compile(r"(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+")
_OWN_PATHS: Final = frozenset(
    {"assets", "docs", "healthz", "jobs", "metrics", "openapi.json", "readyz", "v1"}
)
"""The first steps of the control plane's own paths."""


def path_prefix(text: str) -> str:
    """Return a path prefix in its usual form, without a slash at its end; "" and "/" stand for the root.

    Raises:
        OptionInvalid: This is not a path prefix, or it begins with a path of the control plane.
    """
    prefix = text.removesuffix("/")
    if not prefix:
        return ""
    if len(prefix) > MAX_PREFIX or not _PREFIX_FORM.fullmatch(prefix):
        raise OptionInvalid(
            "must be a path such as /rollyard, of letters, digits and '-._~', "
            f"with at most {MAX_PREFIX} characters (got {text[:MAX_PREFIX]!r})"
        )
    first = prefix.split("/")[1]
    if first in _OWN_PATHS:
        raise OptionInvalid(f"must not begin with /{first}, which is a path of the control plane itself")
    return prefix


def host_name(text: str) -> str:
    """Return the DNS name of a host in lower case.

    Raises:
        OptionInvalid: This is not a DNS name.
    """
    name = text.strip().removesuffix(".").lower()
    if address_of(name) is not None:
        raise OptionInvalid(f"is for DNS names, and {name} is an address; addresses are accepted without it")
    if len(name) > MAX_HOST or not NAME.fullmatch(name):
        raise OptionInvalid(
            "must be a DNS name such as rollyard.example.org, without a scheme and a port "
            f"(got {text[:MAX_HOST]!r})"
        )
    return name


@dataclass(frozen=True, slots=True)
class Option:
    """What the field of an option says in addition to its type, bounds and default."""

    help: str
    group: str
    """The heading in a command's help under which the option is listed."""
    flag: str = ""
    """The option on the command line, if it is not the field's name."""
    metavar: str = ""
    variable: str = ""
    """Its environment variable, if it has another name than the program's other options."""
    elsewhere: tuple[str, ...] = ()
    """The variables from which the program reads it itself. They have precedence over a file."""
    default: str = ""
    """The default in words, if the value of the field does not say it."""
    secret: bool = False
    """Whether the value may hold a password. It is never quoted, and a URL with a password is not taken from
    a command line."""


class DeclaredOptions(BaseModel):
    """The base of every set of options, which cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    prefix: ClassVar[str] = ""
    """The prefix of the variables of the options that a class itself declares."""


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
_Prefix = Annotated[str, AfterValidator(path_prefix)]
_DnsName = Annotated[str, AfterValidator(host_name)]


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _installers_entry(text: str) -> str:
    installers_rule(text)
    return text


_HostRule = Annotated[str, AfterValidator(_installers_entry)]


LeaseSeconds = Annotated[
    float,
    Field(ge=1, le=3600),
    Option("After a worker's sudden end its rollouts continue elsewhere within this time", LEASES),
]
"""How long a lease holds without a heartbeat, in seconds."""
TaskPrefixes = Annotated[
    tuple[str, ...],
    Option(
        "What `spec.tasks.url` may name beside uploads, as file:///data/, https://host/path/ or "
        "s3://bucket/key/; '{namespace}' stands for the job's; repeatable",
        JOBS,
        metavar="URL-PREFIX",
    ),
]


class PlaneOptions(DeclaredOptions):
    """The options of every program that starts a control plane."""

    prefix: ClassVar[str] = "ROLLYARD_CONTROL_PLANE_"

    db: Annotated[
        str,
        Field(repr=False),
        Option(
            "sqlite:///… or postgresql+psycopg://…",
            STATE,
            metavar="URL",
            default="in the state folder",
            secret=True,
        ),
    ] = ""
    """The SQLAlchemy URL of the database; the default is `state_dir/rollyard.db`."""
    trajectories: Annotated[
        str,
        Field(repr=False),
        Option(
            "The trajectory store, as any URL that fsspec opens",
            STATE,
            metavar="URL",
            default="in the state folder",
            secret=True,
        ),
    ] = ""
    """The fsspec URL of the trajectory store; the default is `state_dir/trajectories`."""
    tokens_file: Annotated[
        Path | None,
        Option(
            "JSON object with the tokens of admin, worker, driver and metrics, a string or a list of them "
            "for each; read again when it changes",
            STATE,
            flag="--tokens",
            metavar="FILE",
            default="tokens.json in the state folder, made if missing",
        ),
    ] = None
    sqlite_max_pages: Annotated[
        int, Field(ge=0), Option("Bound of the database file in pages of 4 KiB; 0: none", STATE)
    ] = 0
    """The largest size of the SQLite file in pages of 4 KiB. With 0, only the disk limits it."""

    open_metrics: Annotated[bool, Option("/metrics needs no token", HTTP)] = False
    open_docs: Annotated[
        bool,
        Option(
            "/docs and /openapi.json need no token; `rollyard up` on a loopback address asks for none anyway",
            HTTP,
        ),
    ] = False
    tls_cert: Annotated[
        Path | None, Option("PEM certificate chain: serve HTTPS", HTTP, metavar="FILE", default="HTTP")
    ] = None
    tls_key: Annotated[
        Path | None, Option("Its PEM private key, without a password", HTTP, metavar="FILE", default="none")
    ] = None
    stall_seconds: Annotated[
        Count, Option("A client that reads nothing of its answer for this long is cut off", HTTP)
    ] = 60

    lease_seconds: LeaseSeconds = 30.0
    no_backend_seconds: Annotated[
        float,
        Field(ge=1, le=365 * 86400.0),
        Option(
            "While no backend is ready, rollouts of a job without a deadline wait this long, and then fail",
            LEASES,
        ),
    ] = 3600.0
    """How long such rollouts wait in the Run queue, in seconds, before they end as Failed/NoBackend."""

    plugins: Annotated[
        tuple[Annotated[Path, AfterValidator(_absolute)], ...],
        Option(
            "A Python file whose handlers, tools, agents, harnesses, tool-call parsers and reward functions "
            "jobs may name, or a folder of such files; a job keeps the text of its submission; repeatable",
            JOBS,
            flag="--plugin",
            metavar="FILE",
        ),
    ] = ()
    allow_tasks_from: TaskPrefixes = ()
    allow_tasks_networks: Annotated[
        tuple[str, ...], Option(_NETWORK, JOBS, flag="--allow-tasks-network", metavar="CIDR")
    ] = ()
    allow_sandbox_hosts: Annotated[
        tuple[_HostRule, ...],
        Option(
            "A host that `spec.sandbox.allowedHosts` may name: a DNS name, '*.example.org' for all names "
            "below one, 'example.org:8443' for another port than 80 and 443, or '*' for every public host; "
            "'pypi.org=10.1.2.3' or 'pypi.org=10.1.0.0/16' lets it have an address that is not public; "
            "repeatable",
            JOBS,
            flag="--allow-sandbox-host",
            metavar="HOST",
        ),
    ] = ()
    allow_eval_hosts: Annotated[
        tuple[_HostRule, ...],
        Option(
            "A host that `spec.stages.eval.allowedHosts` may name, in the same form: hidden tests reach it; "
            "repeatable",
            JOBS,
            flag="--allow-eval-host",
            metavar="HOST",
        ),
    ] = ()
    allow_rewards_from: Annotated[
        tuple[str, ...],
        Option(
            "What `spec.reward.service.url` may name, as https://host/path/; '{namespace}' stands for the "
            "job's; repeatable",
            JOBS,
            metavar="URL-PREFIX",
        ),
    ] = ()
    allow_rewards_networks: Annotated[
        tuple[str, ...], Option(_NETWORK, JOBS, flag="--allow-rewards-network", metavar="CIDR")
    ] = ()
    max_task_bytes: Annotated[Count, Option("Bytes of one task file, unpacked", JOBS)] = 256 << 20
    max_blob_bytes: Annotated[Count, Option("Bytes of one upload", JOBS)] = 1 << 30
    max_namespace_blob_bytes: Annotated[Count, Option("Bytes of all uploads of a namespace", JOBS)] = 4 << 30
    max_namespace_blobs: Annotated[Count, Option("Uploads of a namespace", JOBS)] = 1000

    max_queued: Annotated[Count, Option("Unfinished rollouts", BOUNDS)] = 4_000_000
    """The largest number of unfinished rollouts in all. Further ones are answered with 429."""
    max_queued_per_namespace: Annotated[Count, Option("Those of one namespace", BOUNDS)] = 1_000_000
    max_harness_runs_per_namespace: Annotated[
        Count, Option("Rollouts of harnesses of one namespace that are in Run at once", BOUNDS)
    ] = 4096
    """The largest number of rollouts of harnesses of one namespace that are in Run at once, each of which
    keeps a session of the gateway of its worker. Further ones wait in the queue."""
    max_unread: Annotated[Count, Option("Ended rollouts of a stream that nobody has read", BOUNDS)] = 100_000
    """The largest number of ended rollouts of a stream that nobody has read. A stream with more of them takes
    no further tasks and targets."""
    max_unstored: Annotated[Count, Option("Ended rollouts that wait for the trajectory store", BOUNDS)] = (
        10_000
    )
    """The number of ended rollouts that may wait for the trajectory store. Above it, completions answer
    507."""
    store_seconds: Annotated[Seconds, Option("How long a request waits for the trajectory store", BOUNDS)] = (
        15.0
    )
    """The time in seconds that a request waits for the trajectory store. Writing a part may take three
    times as long."""
    page_bytes: Annotated[
        Count, Option("Bytes of a page of results, of a list, and of an answer with leases", BOUNDS)
    ] = 16 << 20
    """The largest size in bytes of a page of results, of a list, and of an answer with leases. A single
    item that is larger has a page to itself."""
    max_polls: Annotated[Count, Option("Long polls of trainers and drivers", BOUNDS)] = 4096
    """The largest number of simultaneous long polls of trainers and drivers. More are answered with 429."""
    max_polls_per_namespace: Annotated[Count, Option("Those of one namespace", BOUNDS)] = 1024
    max_worker_polls: Annotated[Count, Option("Long polls of workers", BOUNDS)] = 32_768
    """The largest number of simultaneous long polls of workers. More are answered with 429."""
    max_worker_polls_per_namespace: Annotated[Count, Option("Those of one namespace", BOUNDS)] = 8192
    max_streams: Annotated[Count, Option("Event streams", BOUNDS)] = 1024
    """The largest number of simultaneous event streams. More are answered with 429."""
    max_streams_per_namespace: Annotated[Count, Option("Those of one namespace", BOUNDS)] = 256
    max_pages: Annotated[Count, Option("Pages of results in memory at the same time", BOUNDS)] = 32
    """The largest number of pages of results that are in memory at the same time on their way to a client,
    from the trajectory store and from the database each. Further requests wait in order."""
    max_pages_per_namespace: Annotated[Count, Option("Those of one namespace", BOUNDS)] = 8

    verify_python: Annotated[
        str,
        Option(
            "A Python with torch and transformers, which verifies weight updates by a forward pass",
            WEIGHTS,
            metavar="PYTHON",
            variable="ROLLYARD_VERIFY_PYTHON",
            default="that of the control plane, if it has them",
        ),
    ] = ""

    path_prefix: Annotated[
        _Prefix,
        Option(
            "Path below which a proxy shows the page, as /rollyard; calls are answered below it, too, and "
            "without it",
            PAGE,
            metavar="PATH",
        ),
    ] = ""
    allowed_hosts: Annotated[
        tuple[_DnsName, ...],
        Option(
            "DNS name under which browsers may open the page, beside localhost and the address that is "
            "listened on; repeatable",
            PAGE,
            flag="--allowed-host",
            metavar="NAME",
        ),
    ] = ()
    session_idle_seconds: Annotated[
        float, Field(gt=0, le=_YEAR_SECONDS), Option("A session that nobody uses ends after this time", PAGE)
    ] = 12 * 3600.0
    session_seconds: Annotated[
        float, Field(gt=0, le=_YEAR_SECONDS), Option("Every session ends after this time", PAGE)
    ] = 7 * 86400.0

    prorl: Annotated[bool, Option("Offer them, on a port of their own", PRORL)] = False
    prorl_host: Annotated[str, Option("Address of that port", PRORL)] = "127.0.0.1"
    prorl_port: Annotated[Port, Option("That port; 0: a free one", PRORL)] = 8006
    prorl_config: Annotated[
        Path | None, Option("YAML file with their settings", PRORL, metavar="FILE", default="none")
    ] = None
    prorl_tokenizer: Annotated[
        str, Option("The setting `tokenizer`, where the file has none", PRORL, metavar="DIR")
    ] = ""

    otlp_endpoint: Annotated[
        str,
        Option(
            "OpenTelemetry receiver (OTLP over HTTP), as http://127.0.0.1:4318: send it a trace of each "
            "rollout",
            LOGS,
            metavar="URL",
            elsewhere=(
                "ROLLYARD_OTLP_ENDPOINT",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
                "OTEL_EXPORTER_OTLP_ENDPOINT",
            ),
        ),
    ] = ""
    trace_sample: Annotated[
        float | None,
        Field(ge=0, le=1),
        Option(
            "Fraction of groups whose rollouts are traced",
            LOGS,
            elsewhere=("ROLLYARD_TRACE_SAMPLE",),
            default="1",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"] | None,
        Option("Form of all log lines", LOGS, elsewhere=("ROLLYARD_LOG_FORMAT",), default="text"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option("Level of the control plane's log", LOGS)
    ] = "info"


class ListeningOptions(PlaneOptions):
    """The options of a control plane whose user chooses where it listens."""

    host: Annotated[
        str, Option("Address to listen on, or the absolute path of a Unix socket (--port 0)", HTTP)
    ] = "127.0.0.1"
    port: Annotated[Port, Option("Port; 0: a free one", HTTP)] = 8765


class ControlPlaneOptions(ListeningOptions):
    """The options of `rollyard control-plane`."""

    state_dir: Annotated[Path, Option("Folder of tokens, database and trajectories", STATE, metavar="DIR")]
    """The folder of tokens.json and, by default, of the database and the trajectories."""
    port_file: Annotated[
        Path | None,
        Option("Written with the port once requests are answered", HTTP, metavar="FILE", default="none"),
    ] = None
    prorl_port_file: Annotated[
        Path | None, Option("Written with that port once it is open", PRORL, metavar="FILE", default="none")
    ] = None


TELEMETRY: Final = ("otlp_endpoint", "trace_sample", "log_format")
"""The fields that workers and backends need as well. Drivers pass them on as variables."""


def option_of(field: FieldInfo) -> Option:
    """Return what the declaration of a field says about its option."""
    return next(entry for entry in field.metadata if isinstance(entry, Option))


def key_of(name: str, field: FieldInfo) -> str:
    """Return the name of an option in files, which is its flag without the dashes."""
    return (option_of(field).flag or name.replace("_", "-")).removeprefix("--")


def keys(model: type[DeclaredOptions]) -> dict[str, str]:
    """Return the fields of a model by the names of their options."""
    return {key_of(name, field): name for name, field in model.model_fields.items()}


def variable_of(model: type[DeclaredOptions], name: str) -> str:
    """Return the environment variable of a field, or "" if the program itself reads it elsewhere.

    Its prefix is that of the class that first declares the option, and so the same for all that inherit it.
    """
    field = model.model_fields[name]
    option = option_of(field)
    if option.variable or option.elsewhere:
        return option.variable
    classes = [base for base in reversed(model.__mro__) if issubclass(base, DeclaredOptions)]
    first = next(base for base in classes if name in base.model_fields)
    return first.prefix + key_of(name, field).replace("-", "_").upper()


def document(options: PlaneOptions) -> dict[str, Any]:
    """Return the content of a file that gives a control plane these options of the program that starts it.

    Those of traces and logs are absent, because every process inherits their variables.
    """
    values = options.model_dump(mode="json", exclude_none=True)
    return {
        key_of(name, field): values[name]
        for name, field in PlaneOptions.model_fields.items()
        if name in values and name not in TELEMETRY
    }
