"""Commands whose options are declared for several sources: what they read, and how they start again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.command_line import on_command_line
from rollyard_api.options.declared import DeclaredOptions
from rollyard_api.options.sources import load

from rollyard.errors import UsageProblem

T = TypeVar("T", bound=DeclaredOptions)


def load_options(model: type[T], values: Mapping[str, Any], config: Path | None, program: str) -> T:
    """Return the options of a command from its command line, from variables and from a file.

    Args:
        model: The declaration of the options.
        values: The command's parameters. Those that are no field of the model are ignored.
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


def arguments_again(ctx: click.Context, without: Collection[str]) -> list[str]:
    """Return the arguments of the command that runs now, without the parameters of these names."""
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in without:
            continue
        flag = max(parameter.opts, key=len)
        if parameter.is_flag:
            negative = parameter.secondary_opts if value is False else []
            words += [flag] if value else negative
        elif parameter.multiple:
            words += [f"{flag}={item}" for item in value or ()]
        elif value not in (None, ""):
            words.append(f"{flag}={value}")
    return words
