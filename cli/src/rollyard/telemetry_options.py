"""The options of traces and logs that the drivers of the command line share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rollyard.errors import UsageProblem


def speaker(text: Callable[[str], None], logger: str) -> Callable[[str], None]:
    """Return what a driver reports its messages with: `text`, or the log if its lines are to be JSON.

    In the latter case, this also sends all log records of this process to standard error.
    """
    from rollyard_process.log_text import log_to
    from rollyard_process.telemetry.options import log_form

    if log_form() == "text":
        return text
    log_to()
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(logger).info


def set_telemetry(endpoint: str, sample: float | None, form: str | None) -> dict[str, str]:
    """Choose traces and logs for this process and all that it starts, by its environment.

    Returns:
        The variables of these options, which include what this process has inherited.

    Raises:
        UsageProblem: A value cannot be used.
        MissingExtra: A flag asks for traces, and the extra `traces` is not installed.
    """
    from rollyard_process.telemetry.options import log_form, trace_options
    from rollyard_process.telemetry.variables import (
        LOG_FORMAT,
        SAMPLE,
        TRACES_ENDPOINT,
        TraceOptionError,
        trace_variables,
    )

    from rollyard.extras import require

    if endpoint:
        require("--otlp-endpoint", "traces")
    try:
        os.environ.update(trace_variables(endpoint, sample, form))
        options, chosen = trace_options(), log_form()
    except TraceOptionError as error:
        raise UsageProblem(str(error)) from error
    variables: dict[str, str] = {LOG_FORMAT: chosen} if chosen != "text" else {}
    if options.on:
        variables |= {TRACES_ENDPOINT: options.url, SAMPLE: f"{options.sample:.10g}"}
    return variables
