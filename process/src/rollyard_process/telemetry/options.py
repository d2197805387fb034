"""The options of traces and logs: flags of the processes, and the variables that stand for them.

The variables are OpenTelemetry's own where it has one. Every driver passes its choice on to the processes
that it starts. No job and no pool can choose where spans go.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollyard_process.telemetry.variables import (
    ENDPOINT,
    LOG_FORMAT,
    LOG_FORMS,
    OWN_ENDPOINT,
    PATH,
    SAMPLE,
    TRACES_ENDPOINT,
    LogForm,
    TraceOptionError,
    checked_url,
)

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where spans go, and which of them."""

    url: str = ""
    """The full URL of an OTLP receiver of traces (HTTP, protobuf). If it is empty, nothing is traced."""
    sample: float = 1.0
    """The fraction of groups whose traces are exported, from 0 to 1."""

    @property
    def on(self) -> bool:
        """Whether anything is traced."""
        return bool(self.url)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags `--otlp-endpoint` and `--trace-sample`."""
    parser.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="base URL of an OpenTelemetry receiver (OTLP over HTTP), as http://127.0.0.1:4318: send a trace "
        f"of each rollout (default: {ENDPOINT}, else none)",
    )
    parser.add_argument(
        "--trace-sample",
        default="",
        metavar="FRACTION",
        help=f"fraction of groups whose rollouts are traced, 0 to 1 (default: {SAMPLE}, else 1)",
    )


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--log-format`."""
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMS,
        default=None,
        help=f"form of log lines (default: {LOG_FORMAT}, else text)",
    )


def trace_options(
    endpoint: str = "", sample: str = "", environ: Mapping[str, str] | None = None
) -> TraceOptions:
    """Return the options that flags and variables give.

    Args:
        endpoint: The base URL of the receiver, or "" for the one that the variables name.
        sample: The fraction, or "" for the variable's value.
        environ: The variables; the default is the environment of this process.

    Raises:
        TraceOptionError: A value cannot be used. The message says which one, and what would be right.
    """
    variables = os.environ if environ is None else environ
    fraction = (
        _fraction(sample, "--trace-sample") if sample else _fraction(variables.get(SAMPLE) or "1", SAMPLE)
    )
    if endpoint:
        return TraceOptions(checked_url(endpoint, "--otlp-endpoint").rstrip("/") + PATH, fraction)
    if variables.get(OWN_ENDPOINT):
        return TraceOptions(checked_url(variables[OWN_ENDPOINT], OWN_ENDPOINT).rstrip("/") + PATH, fraction)
    if (
        variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or variables.get("OTEL_TRACES_EXPORTER") == "none"
    ):
        return TraceOptions("", fraction)
    if variables.get(TRACES_ENDPOINT):
        return TraceOptions(checked_url(variables[TRACES_ENDPOINT], TRACES_ENDPOINT), fraction)
    if variables.get(ENDPOINT):
        return TraceOptions(checked_url(variables[ENDPOINT], ENDPOINT).rstrip("/") + PATH, fraction)
    return TraceOptions("", fraction)


def log_form(flag: str | None = None, environ: Mapping[str, str] | None = None) -> LogForm:
    """Return the form of log lines: the given one, else the variable's, else `text`.

    Raises:
        TraceOptionError: There is no such form.
    """
    variables = os.environ if environ is None else environ
    name, value = ("--log-format", flag) if flag else (LOG_FORMAT, variables.get(LOG_FORMAT) or "text")
    for form in LOG_FORMS:
        if value == form:
            return form
    raise TraceOptionError(f"{name} must be text or json (got {value[:64]!r})")


def _fraction(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise TraceOptionError(f"{name} must be a number from 0 to 1 (got {text[:64]!r})")
    return value
