"""The extras of the distribution: the modules that each of them installs, and the errors for missing ones.

`pip install rollyard` installs the client alone. Everything else needs an extra, such as `rollyard[local]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from rollyard.errors import UsageProblem

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "parquet": ("pyarrow",),
    "api": (
        "alembic",
        "fastapi",
        "fastapi_swagger",
        "fsspec",
        "httptools",
        "msgpack",
        "msgspec",
        "prometheus_client",
        "pyarrow",
        "pydantic_settings",
        "sqlalchemy",
        "uvicorn",
        "uvloop",
    ),
    "worker": (
        "aiohttp",
        "huggingface_hub",
        "jinja2",
        "markdown_it",
        "math_verify",
        "spython",
        "tokenizers",
        "uvloop",
    ),
    "sandbox": ("ipykernel", "jupyter_client", "packaging", "ptyprocess"),
    "engine": (
        "httptools",
        "jinja2",
        "numpy",
        "onnxruntime",
        "onnxruntime_genai",
        "prometheus_client",
        "starlette",
        "tokenizers",
        "uvicorn",
        "uvloop",
    ),
    "operator": ("aiohttp", "kopf", "kubernetes"),
    "postgresql": ("psycopg",),
    "renderers": ("renderers",),
    "traces": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk", "requests"),
}
"""The modules that each component imports from its extra, beyond those of the client."""


NAMED_MODULES: Final = 4
"""The number of missing modules that a message names."""


def missing(*extras: str) -> tuple[str, ...]:
    """Return the modules of these extras that are not installed, sorted. Nothing is imported."""
    modules = {module for extra in extras for module in MODULES[extra]}
    return tuple(sorted(module for module in modules if not _is_there(module)))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # A package above it is missing.
        return False


def require(purpose: str, extra: str, *parts: str) -> None:
    """Check that the modules of an extra are installed.

    Args:
        purpose: What needs them, at the beginning of the message.
        extra: The extra that the message names.
        parts: The extras whose modules are checked. The default is `extra` alone.

    Raises:
        UsageProblem: A module is not installed. The message names the extra.
    """
    absent = missing(*(parts or (extra,)))
    if absent:
        raise _missing_extra(purpose, extra, absent)


def explained(error: ModuleNotFoundError, purpose: str) -> UsageProblem | None:
    """Return the error that names the smallest extra with the missing module, or None if no extra has it."""
    module = (error.name or "").partition(".")[0]
    candidates = [extra for extra, modules in MODULES.items() if module in modules]
    extra = min(candidates, key=lambda name: len(MODULES[name]), default=None)
    return None if extra is None else _missing_extra(purpose, extra, (module,))


def _missing_extra(purpose: str, extra: str, modules: tuple[str, ...]) -> UsageProblem:
    named = ", ".join(modules[:NAMED_MODULES])
    more = f" and {len(modules) - NAMED_MODULES} more" if len(modules) > NAMED_MODULES else ""
    return UsageProblem(
        f"{purpose} needs packages that are not installed here ({named}{more}): "
        f"pip install 'rollyard[{extra}]'",
        reason="MissingExtra",
    )
