"""Write the options of all commands into docs/options.md, and the control plane's into the chart's schema."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from pydantic.fields import FieldInfo
from rollyard.commands.slurm_bridge import BridgeCommandOptions
from rollyard.local.options import Options
from rollyard.main import cli
from rollyard_api.options.command_line import usual
from rollyard_api.options.declared import (
    ControlPlaneOptions,
    DeclaredOptions,
    ListeningOptions,
    PlaneOptions,
    key_of,
    option_of,
    variable_of,
)
from rollyard_crds.described_fields import bounds_in_words
from rollyard_pipeline.program import argument_parser

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "options.md"
CHART: Final = ROOT / "helm" / "rollyard"
SCHEMA: Final = CHART / "values.schema.json"
BEGIN: Final = '        "options": {\n'
"""The line of the schema that begins what is written here."""
VALUES: Final = {
    "db": "api.database",
    "tokens": "tokens.existingSecret",
    "host": "api.listen",
    "tls-cert": "tls",
    "tls-key": "tls",
    "allowed-host": "api.allowedHosts",
    "path-prefix": "api.pathPrefix",
    "prorl": "api.prorl",
    "prorl-host": "api.prorl",
    "prorl-port": "api.prorl",
    "prorl-config": "api.prorl",
    "otlp-endpoint": "traces.endpoint",
    "trace-sample": "traces.sample",
}
"""The chart's values for options whose argument names no value by itself."""
DECIDED: Final = ("state-dir", "port", "port-file", "prorl-port-file", "prorl-tokenizer")
"""What the chart decides: its pods have one folder and one port, and `api.prorl.config` has the tokenizer."""


def values() -> dict[str, str]:
    """Return the chart's value for each option that has one of its own, by the name of the option."""
    text = (CHART / "templates" / "api.yaml").read_text()
    lines = [line.strip() for line in text.splitlines()]
    begin, end = lines.index("args:") + 1, lines.index("env:")
    paths = dict(VALUES)
    for before, line in zip(lines[begin - 1 : end], lines[begin:end], strict=False):
        option = re.match(r'- (?:\{\{ printf ")?--([\w-]+)', line)
        # An option has its value from its own line, or from that of the condition or the loop around it.
        around = before if before.startswith("{{") else ""
        value = next(
            filter(None, (re.search(r"(\$api|\.Values)\.([\w.]+)", each) for each in (line, around))), None
        )
        if option is not None and value is not None:
            paths.setdefault(option[1], "api." * (value[1] == "$api") + value[2])
    return paths


def table(model: type[DeclaredOptions], without: type[DeclaredOptions] | None = None) -> str:
    """Return the options of a model as a table in Markdown, by group, without those of another model."""
    mine = {
        name: field
        for name, field in model.model_fields.items()
        if without is None or name not in without.model_fields
    }
    groups: dict[str, list[str]] = {}
    properties = model.model_json_schema()["properties"]
    chart = values() if issubclass(model, ControlPlaneOptions) else None
    columns = ["option", "takes", "what", "default", "variable", *(() if chart is None else ("chart",))]
    for name, field in mine.items():
        option, key = option_of(field), key_of(name, field)
        variables = [variable_of(model, name), *option.elsewhere]
        row = [f"`--{key}`", _taken(properties[name]), option.help.replace("|", "\\|")]
        row.append(option.default or usual(field) or _natural(field))
        row.append(" or ".join(f"`{each}`" for each in variables if each))
        row += [] if chart is None else [_in_chart(key, chart)]
        groups.setdefault(option.group, []).append(f"| {' | '.join(row)} |")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for title, rows in groups.items():
        lines += [f"| **{title}** {'| ' * len(columns)}".rstrip(), *rows]
    return "\n".join(lines) + "\n"


def _taken(node: dict[str, Any]) -> str:
    """Return what an option takes, from its part of a schema."""
    node = next((one for one in node.get("anyOf", ()) if one.get("type") != "null"), node)
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            node = {**node, bound: node[exclusive], exclusive: True}
    words = {"array": "text", "boolean": "", "integer": "whole number", "string": "text"}
    word = "path" if node.get("format") == "path" else words.get(node["type"], node["type"])
    return ", ".join((word, *bounds_in_words(node))) if node["type"] in ("integer", "number") else word


def _natural(field: FieldInfo) -> str:
    """Return how the table shows a default that needs no words in a help."""
    if field.is_required():
        return "required"
    return "no" if field.annotation is bool else "none"


def _in_chart(key: str, chart: dict[str, str]) -> str:
    if key in DECIDED:
        return "the chart decides"
    return f"`{chart[key]}`" if key in chart else "`api.options`"


class CommandOption(NamedTuple):
    """An option of a command: its names, what it takes, and its help."""

    names: str
    takes: str
    help: str

    def row(self, *further: str) -> str:
        """Return it as a row of a table in Markdown."""
        cells = (self.names, self.takes, self.help, *further)
        return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |\n"


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the path and the command of everything that can be run, in the order of the help."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}")
    else:
        yield path, command


def options_of(path: str, command: click.Command) -> list[CommandOption]:
    """Return the options of a command that no table of declared options has."""
    if path == "rollyard worker":  # It hands its arguments on.
        return [_of_argument(action) for action in argument_parser()._actions if action.dest != "help"]
    plain = [param for param in command.params if type(param) is click.Option]
    return [_of_option(option, click.Context(command)) for option in plain]


def _of_option(option: click.Option, context: click.Context) -> CommandOption:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    takes = "" if option.is_flag else f"`{option.make_metavar(context)}`"
    if isinstance(option.type, click.Choice):
        takes = ", ".join(f"`{choice}`" for choice in option.type.choices)
    elif isinstance(option.type, click.IntRange | click.FloatRange):
        takes = _bounds(option.type)
    text = " ".join((option.help or "").split())
    # Most helps say the default themselves.
    text += f" [{option.default}]" * bool(option.show_default)
    return CommandOption(names, takes, text + " (required)" * option.required)


def _bounds(kind: click.IntRange | click.FloatRange) -> str:
    noun = "whole number" if isinstance(kind, click.IntRange) else "number"
    node = {"exclusiveMinimum": kind.min_open, "exclusiveMaximum": kind.max_open}
    return ", ".join((noun, *bounds_in_words({**node, "minimum": kind.min, "maximum": kind.max})))


def _of_argument(action: argparse.Action) -> CommandOption:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    takes = "" if action.nargs == 0 else f"`{action.metavar or action.dest.upper()}`"
    if action.choices is not None:
        takes = ", ".join(f"`{choice}`" for choice in action.choices)
    text = (action.help or "") % {**vars(action), "prog": "rollyard worker"}
    required = " (required)" if action.required else ""
    return CommandOption(names, str(takes), f"{text}{required}")


def command_sections() -> str:
    """Return the options that several commands have, and then a section for each command."""
    every = {path: options_of(path, command) for path, command in commands(cli, "rollyard")}
    users: defaultdict[CommandOption, list[str]] = defaultdict(list)
    for path, options in every.items():
        for option in options:
            users[option].append(path.removeprefix("rollyard "))
    shared = {option: paths for option, paths in users.items() if len(paths) > 1}
    head = "| option | takes | what |"
    lines = [f"### Options of several commands\n\n{head} commands |\n|---|---|---|---|\n"]
    lines += [option.row(", ".join(f"`{path}`" for path in paths)) for option, paths in shared.items()]
    for path, command in commands(cli, "rollyard"):
        lines.append(f"\n### {path}\n\n{_opening(path, command)}\n")
        own = [option for option in every[path] if option not in shared]
        if own:
            lines += [f"\n{head}\n|---|---|---|\n", *(option.row() for option in own)]
    return "".join(lines)


def _opening(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    pieces = " ".join([path, *command.collect_usage_pieces(context)])
    paragraphs = (command.help or "").split("\f")[0].strip().split("\n\n")
    text = "\n\n".join(" ".join(paragraph.replace("\b", "").split()) for paragraph in paragraphs)
    return f"```\n{pieces}\n```\n\n{text}"


def sections() -> dict[str, str]:
    """Return what stands after each marker of the page, up to the marker of the end."""
    return {
        "<!-- options of the control plane -->\n": table(ControlPlaneOptions),
        "<!-- options of up -->\n": table(Options, without=ListeningOptions),
        "<!-- options of the bridge -->\n": table(BridgeCommandOptions, without=PlaneOptions),
        "<!-- options of all commands -->\n": command_sections(),
    }


def current(page: str) -> str:
    """Return the page with its sections as the code has them."""
    for marker, text in sections().items():
        before, rest = page.split(marker)
        page = f"{before}{marker}{text}{rest[rest.index('<!-- end -->') :]}"
    return page


def chart_options() -> dict[str, Any]:
    """Return the schema of the value `api.options`: every option that has no value of its own."""
    schema = ControlPlaneOptions.model_json_schema()["properties"]
    known = values()
    kept = ("type", "items", "enum", "minimum", "maximum", "exclusiveMinimum")
    properties = {}
    for name, field in ControlPlaneOptions.model_fields.items():
        key = key_of(name, field)
        if key in known or key in DECIDED:
            continue
        node = schema[name]
        properties[key] = {word: node[word] for word in kept if word in node}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def current_schema(text: str) -> str:
    """Return the schema of the chart's values with `api.options` as declared."""
    before, rest = text.split(BEGIN)
    after = rest[rest.index("\n        },\n") :]
    node = json.dumps(chart_options(), indent=2).replace("\n", "\n        ")
    return before + BEGIN.rstrip("{\n") + node.removesuffix("\n        }") + after


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
    SCHEMA.write_text(current_schema(SCHEMA.read_text()))
