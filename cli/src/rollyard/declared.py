"""The options of commands that run drivers: the sources of the values, and options of traces and logs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.command_line import on_command_line
from rollyard_api.options.declared import DeclaredOptions
from rollyard_api.options.sources import load

from rollyard.errors import UsageProblem
from rollyard.extras import require

T = TypeVar("T", bound=DeclaredOptions)


def load_options(model: type[T], values: Mapping[str, Any], config: Path | None, program: str) -> T:
    """Return the options of a command from its command line, from variables and from a file.

    Args:
        model: The declaration of the options.
        values: The command's parameters. Those that are not fields of the model are ignored.
        config: The file that `--config` names, or None.
        program: The command, for messages.

    Raises:
        UsageProblem: A value cannot be used, or a variable or a line of the file names no option.
    """
    declared = {name: value for name, value in values.items() if name in model.model_fields}
    try:
        return load(model, on_command_line(declared), config, program)
    except OptionInvalid as error:
        raise UsageProblem(str(error)) from None


def check_plugins(paths: Sequence[Path]) -> None:
    """Check the plugins of a command that starts a control plane, which would refuse them later.

    Raises:
        UsageProblem: One cannot be used, or has a name that is taken.
    """
    from rollyard_api.core.entrypoints import Extensions

    try:
        Extensions(paths).check_plugins()
    except OptionInvalid as error:
        raise UsageProblem(str(error)) from None


def speaker(text: Callable[[str], None], logger: str) -> Callable[[str], None]:
    """Return the function by which a driver reports messages: `text`, or the log if its lines are JSON.

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
        UsageProblem: A flag asks for traces, and the extra `traces` is not installed.
    """
    from rollyard_process.telemetry.options import log_form, trace_options
    from rollyard_process.telemetry.variables import (
        LOG_FORMAT,
        SAMPLE,
        TRACES_ENDPOINT,
        TraceOptionError,
        trace_variables,
    )

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
