"""Write the control plane's options into docs/options.md and into the schema of the chart, as declared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from pydantic.fields import FieldInfo
from rollyard.commands.slurm_bridge import BridgeCommandOptions
from rollyard.local.options import Options
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
    chart = values() if issubclass(model, ControlPlaneOptions) else None
    columns = ["option", "what", "default", "variable", *(() if chart is None else ("chart",))]
    for name, field in mine.items():
        option, key = option_of(field), key_of(name, field)
        variables = [variable_of(model, name), *option.elsewhere]
        row = [f"`--{key}`", option.help.replace("|", "\\|")]
        row.append(option.default or usual(field) or _natural(field))
        row.append(" or ".join(f"`{each}`" for each in variables if each))
        row += [] if chart is None else [_in_chart(key, chart)]
        groups.setdefault(option.group, []).append(f"| {' | '.join(row)} |")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for title, rows in groups.items():
        lines += [f"| **{title}** {'| ' * len(columns)}".rstrip(), *rows]
    return "\n".join(lines) + "\n"


def _natural(field: FieldInfo) -> str:
    """Return how the table shows a default that needs no words in a help."""
    if field.is_required():
        return "required"
    return "no" if field.annotation is bool else "none"


def _in_chart(key: str, chart: dict[str, str]) -> str:
    if key in DECIDED:
        return "the chart decides"
    return f"`{chart[key]}`" if key in chart else "`api.options`"


def sections() -> dict[str, str]:
    """Return what stands after each marker of the page, up to the marker of the end."""
    return {
        "<!-- options of the control plane -->\n": table(ControlPlaneOptions),
        "<!-- options of up -->\n": table(Options, without=ListeningOptions),
        "<!-- options of the bridge -->\n": table(BridgeCommandOptions, without=PlaneOptions),
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
