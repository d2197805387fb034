"""The environment variables of traces and log lines, and the check of a receiver's URL. It is pure."""

from __future__ import annotations

import re
from typing import Final, Literal

from rollyard_process.errors import ProcessError

OWN_ENDPOINT: Final = "ROLLYARD_OTLP_ENDPOINT"
"""The variable that drivers pass on. A vLLM server that inherited OpenTelemetry's own would send spans of its
own accord, over gRPC."""
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SAMPLE: Final = "ROLLYARD_TRACE_SAMPLE"
LOG_FORMAT: Final = "ROLLYARD_LOG_FORMAT"
PATH: Final = "/v1/traces"
LogForm = Literal["text", "json"]
LOG_FORMS: Final[tuple[LogForm, ...]] = ("text", "json")
_URL: Final = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


class TraceOptionError(ProcessError, ValueError):
    """An option of traces or logs cannot be used. The message names the flag or the variable.

    The reason is TraceLibrariesMissing if spans are to be exported and OpenTelemetry is not installed.
    """

    reason = "InvalidTraceOption"


def checked_url(url: str, name: str) -> str:
    """Return the URL of a receiver.

    Raises:
        TraceOptionError: It is not such a URL; the message begins with `name`.
    """
    if not _URL.fullmatch(url) or len(url) > 2048:
        raise TraceOptionError(
            f"{name} must be a URL such as http://127.0.0.1:4318, without user name, query and fragment "
            f"(got {url[:128]!r})"
        )
    return url


def trace_variables(endpoint: str, sample: float | None, form: str | None) -> dict[str, str]:
    """Return the variables that pass these options on to every process below a driver.

    Options that are not given stay as the driver's own environment has them.

    Raises:
        TraceOptionError: The endpoint is not the URL of a receiver.
    """
    variables = {OWN_ENDPOINT: checked_url(endpoint, "--otlp-endpoint")} if endpoint else {}
    if sample is not None:
        variables[SAMPLE] = f"{sample:.10g}"
    if form:
        variables[LOG_FORMAT] = form
    return variables
