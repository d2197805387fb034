"""Write the pages of docs/reference on fields, reasons and the chart's values, as the code has them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from rollyard_crds.described_fields import DescribedField, bounds_in_words, described
from rollyard_crds.reasons import FAULTS, PLACES, ReasonMeaning, all_reasons

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "docs" / "reference"
CHART: Final = ROOT / "helm" / "rollyard"
COLUMNS: Final = "| field | type | default | must be | what it means |\n|---|---|---|---|---|\n"
_MADE: Final = "<!-- Made by `make reference`; do not edit. -->\n"
_READING: Final = (
    "`[]` in a path stands for each item of a list, and `{}` for each value of a map. What several fields\n"
    "must fulfil together is listed below their table.\n"
)


def anchor(heading: str) -> str:
    """Return the name by which links reach a heading, on GitHub as in the built documentation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def cell(text: str) -> str:
    """Return text as it stands in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def sections(field: DescribedField, title: str, known: dict[object, str]) -> Iterator[str]:
    """Yield a section for each object that holds other fields, with a table of these.

    Args:
        field: The object with which to begin.
        title: The heading of the fields that are not below another.
        known: Where fields are described already, by what they are. The sections are added.
    """
    heading = field.path or title
    known[_shape(field)] = f"[`{heading}`](#{anchor(heading)})"
    unchanged = " It cannot be changed after creation." if field.immutable else ""
    yield f"## {heading}\n\n{cell(field.description)}{unchanged}\n"
    rows, further = [], []
    for child in field.children:
        same = known.get(_shape(child)) if child.children else None
        rows.append(_row(child, same, parent=field))
        further += [child] if child.children and same is None else []
    yield COLUMNS + "".join(rows)
    if field.rules:
        yield "".join(f"- `{heading}`: {cell(rule)}\n" for rule in field.rules)
    for child in further:
        yield from sections(child, title, known)


def _shape(field: DescribedField) -> object:
    """Return what two fields have in common whose own fields need to be described only once."""
    return tuple((one.name, one.type, one.default, one.description, _shape(one)) for one in field.children)


def _row(field: DescribedField, same: str | None, parent: DescribedField) -> str:
    name = f"`{field.path}`"
    if field.children:
        name = name if same is not None else f"[{name}](#{anchor(field.path)})"
    must = [", ".join(f"`{choice}`" for choice in field.choices)] if field.choices else []
    must += field.bounds
    if field.immutable and not parent.immutable:
        must.append("unchanged after creation")
    meaning = field.description if same is None else f"{field.description} Its fields are those of {same}."
    has_own = bool(field.children) or field.path.startswith("status")
    default = "required" if field.required else field.default or ("" if has_own else "none")
    return f"| {name} | {field.type} | {cell(default)} | {cell('; '.join(must))} | {cell(meaning)} |\n"


def job_page() -> str:
    """Return the page of RolloutJob."""
    known: dict[object, str] = {_shape(described("Task")): "a [task](task.md)"}
    body = "\n".join(sections(described("RolloutJob"), "The object", known))
    return f"""# RolloutJob

{_MADE}
A job in YAML, as `rollyard submit -f` and `kubectl apply -f` take it. Fields that are left out have their
defaults.

```yaml
apiVersion: rollyard.dev/v1alpha1
kind: RolloutJob
metadata:
  name: sums
spec:
  tasks:
    inline:
      - id: sum-1
        prompt: What is 17 + 25? Answer with the number alone.
        answer: "42"
  handler: math
  samplesPerTask: 8
  agent:
    type: single_turn
  backendRef:
    name: default
```

{_READING}
In Python the same fields are in snake case: `job.spec.samples_per_task`. `rollyard explain` shows any part of
this page in a terminal. The reasons of conditions and rollouts are in [Reasons](reasons.md).

{body}"""


def pool_page() -> str:
    """Return the page of BackendPool."""
    body = "\n".join(sections(described("BackendPool"), "The object", {}))
    return f"""# BackendPool

{_MADE}
A pool of inference servers. This one has two servers of vLLM with two GPUs each, which the driver starts:

```yaml
apiVersion: rollyard.dev/v1alpha1
kind: BackendPool
metadata:
  name: qwen
spec:
  model: Qwen/Qwen3-8B
  replicas: 2
  engine:
    type: vllm
    args: [--logprobs-mode, processed_logprobs]
    resources:
      gpu: 2
```

{_READING}
{body}"""


def task_page() -> str:
    """Return the page of tasks."""
    body = "\n".join(sections(described("Task"), "The task", {}))
    return f"""# Task

{_MADE}
A task is one JSON object: a line of a task file, an entry of `spec.tasks.inline`, or what a trainer pushes to
a stream. [Task files](../tasks.md) explains other formats.

```json
{{"id": "sum-1", "prompt": "What is 17 + 25?", "answer": "42"}}
{{"id": "hello", "prompt": "Write hello to out.txt.", "test_script": "test \\"$(cat out.txt)\\" = hello"}}
```

{_READING}
Handlers read different fields: each field says which. [Graders](../graders.md) explains the handlers.

{body}"""


def reasons_page() -> str:
    """Return the page of reasons."""
    names = list(all_reasons())
    initials = {name[0].upper(): name for name in reversed(names)}
    index = " · ".join(f"[{initial}](#{anchor(initials[initial])})" for initial in sorted(initials))
    entries = "\n".join(
        f"## {name}\n\n" + "\n".join(_meaning(name, one) for one in several)
        for name, several in all_reasons().items()
    )
    return f"""# Reasons

{_MADE}
Whatever goes wrong, or merely happens, has a reason: one stable CamelCase word for programs, beside a message
for people. This page says of each of the {len(names)} reasons what it means, whose fault it is, what to do,
and where it stands. `rollyard explain REASON` shows an entry in a terminal, and the `type` of a problem
document leads here.

An infrastructure failure is never a reward: a rollout that fails has `reward: null`. What a policy does to
itself is scored instead, with the reason in `reward_reason`. Words that Kubernetes or Slurm give are in
messages, and are explained in their documentation.

{index}

{entries}"""


def linked(text: str, own: str) -> str:
    """Return a text of a reason in which the names of pages and of other reasons are links."""
    text = re.sub(r"\bdocs/([\w-]+\.md)", r"[docs/\1](../\1)", text)

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[{match[0]}](#{anchor(name)})" if name in all_reasons() and name != own else match[0]

    return re.sub(r"`(\w+)`", link, text)


def _meaning(name: str, meaning: ReasonMeaning) -> str:
    statuses = " or ".join(f"HTTP {status}" for status in meaning.statuses)
    where = [
        f"{PLACES[place]} ({statuses})" if place == "problem" else PLACES[place] for place in meaning.places
    ]
    # What a single fault means is said in full.
    faults = [FAULTS[one] for one in meaning.faults]
    shown = faults[0] if len(faults) == 1 else "; or ".join(fault.partition(":")[0] for fault in faults)
    lines = (
        linked(meaning.what, name),
        f"**Fault:** {shown}.",
        f"**To do:** {linked(meaning.remedy, name)}",
        f"**Where:** {'; '.join(where)}.",
    )
    return "\\\n".join(lines) + "\n"


def chart_page() -> str:
    """Return the page of the chart's values."""
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load(text)
    groups: dict[str, list[str]] = {}
    for path, comment in _comments(text):
        node = _node(schema, path)
        default = values
        for name in path:
            default = default[name]
        group = path[0] if len(path) > 1 else "Top level"
        groups.setdefault(group, []).append(_value_row(".".join(path), node, default, comment, schema))
    columns = COLUMNS.replace("field", "value", 1)
    body = "\n".join(f"## {group}\n\n{columns}{''.join(rows)}" for group, rows in groups.items())
    return f"""# Values of the chart

{_MADE}
Every value of `helm/rollyard`, with its default. `--set` or a file (`-f values.yaml`) sets them, and Helm
refuses a value that the schema does not permit. [Kubernetes](../kubernetes.md) shows how they are used.
`api.options` takes each of the control plane's [options](../options.md) that has no value of its own.

{body}"""


def _comments(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each value that has a comment, and the comment."""
    lines = text.splitlines()

    def below(node: yaml.MappingNode, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for key, value in node.value:
            path = (*above, key.value)
            before = lines[key.start_mark.line - 1].strip()
            if before.startswith("# -- "):
                yield path, before.removeprefix("# -- ")
            elif isinstance(value, yaml.MappingNode):
                yield from below(value, path)

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from below(root, ())


def _node(schema: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    node: Mapping[str, Any] = schema
    for name in path:
        node = _resolved(node, schema)["properties"][name]
    return _resolved(node, schema)


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node of the schema in the place of a reference to it; those inside are replaced, too."""
    if "$ref" in node:
        return _resolved(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    inner = {
        key: _resolved(node[key], schema)
        for key in ("items", "additionalProperties")
        if isinstance(node.get(key), dict)
    }
    return {**node, **inner}


def _value_row(
    path: str, node: Mapping[str, Any], default: Any, comment: str, schema: Mapping[str, Any]
) -> str:
    choices = [_resolved(one, schema) for one in node.get("anyOf", [node])]
    kinds = " or ".join(_kind(choice) for choice in choices)
    must = [bound for choice in choices for bound in _limits(choice)]
    if "enum" in node:
        must.append(", ".join(f"`{choice}`" for choice in node["enum"]))
    shown = f"`{json.dumps(default, ensure_ascii=False)}`"
    return f"| `{path}` | {kinds} | {cell(shown)} | {cell('; '.join(must))} | {cell(comment)} |\n"


def _kind(node: Mapping[str, Any]) -> str:
    if isinstance(node.get("type"), list):
        return " or ".join(node["type"])
    if "type" not in node:
        return "string" if "enum" in node else "any"
    if node["type"] == "array":
        return f"list of {_kind(node.get('items', {}))}s"
    return str(node["type"])


def _limits(node: Mapping[str, Any]) -> list[str]:
    """Return the bounds of a node; those of lists of objects and of maps are in words of Kubernetes."""
    plain = {key: value for key, value in node.items() if key not in ("additionalProperties", "properties")}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in plain:
            plain[bound], plain[exclusive] = plain[exclusive], True
    return list(bounds_in_words(plain))


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "rolloutjob.md": job_page,
    "backendpool.md": pool_page,
    "task.md": task_page,
    "reasons.md": reasons_page,
    "chart.md": chart_page,
}
"""What makes each page."""


def stale() -> list[str]:
    """Return the pages that are not as the code has them."""
    there = {name: (FOLDER / name).read_text() if (FOLDER / name).exists() else "" for name in PAGES}
    return [name for name, make in PAGES.items() if there[name] != make()]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        for page, content in PAGES.items():
            (FOLDER / page).write_text(content())
    elif names := stale():
        raise SystemExit(f"not current: {', '.join(names)}; run `make reference`")
