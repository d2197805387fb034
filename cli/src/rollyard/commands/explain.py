"""The command `rollyard explain`, which needs no server: fields of manifests and tasks, and reasons."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING, Final

import click

from rollyard.arguments import RESOURCES, kind_of
from rollyard.errors import LookupFailed

if TYPE_CHECKING:
    from rollyard_crds.described_fields import DescribedField
    from rollyard_crds.reasons import ReasonMeaning

MAX_WIDTH: Final = 100
_KINDS: Final = {"rj": "RolloutJob", "bp": "BackendPool"}
_TASKS: Final = ("task", "tasks")
_PARTS: Final = ("metadata", "spec", "status")
"""The fields with which a path may begin that names no kind, which is then that of jobs."""


@click.command()
@click.argument("word", metavar="FIELD|REASON")
@click.option("--recursive", is_flag=True, help="List all fields below FIELD, too.")
def explain(word: str, recursive: bool) -> None:
    """Explain a field, such as rj.spec.stages.run, bp.spec.engine or task.prompt, or a reason.

    A reason is the word in CamelCase that failed rollouts, conditions and errors have, such as SandboxLost:
    what has happened, whose fault it is, and what to do.
    """
    from rollyard_crds.described_fields import FieldUnknown, described
    from rollyard_crds.reasons import ReasonUnknown, meanings

    first, _, rest = word.partition(".")
    known = kind_of(first)
    if known is not None:
        kind = _KINDS[known]
        rest = rest.removeprefix("v1alpha1.rollyard.dev").removeprefix("rollyard.dev").lstrip(".")
    elif first.lower() in _TASKS:
        kind = "Task"
    elif first in _PARTS:
        kind, rest = _KINDS["rj"], word
    elif not rest:
        try:
            _print_reason(word, meanings(word))
        except ReasonUnknown as error:
            kinds = ", ".join((*RESOURCES, "task"))
            raise LookupFailed(f"{error}; a field begins with {kinds}, as in rj.spec.stages.run") from error
        return
    else:
        raise LookupFailed(
            f"a field begins with rj, bp or task, as in rj.spec.stages.run (got {word[:256]!r})"
        )
    root = described(kind)
    try:
        field = root.find(rest) if rest else root
    except FieldUnknown as error:
        raise LookupFailed(f"{kind}: {error}") from error
    _print_field(kind, field, recursive)


def _paragraph(text: str, indent: int) -> None:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    margin = " " * indent
    for line in text.splitlines():
        click.echo(
            textwrap.fill(
                line, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
            )
        )


def _print_field(kind: str, field: DescribedField, recursive: bool) -> None:
    click.echo(f"{kind}{'.' * bool(field.path)}{field.path}  <{field.type}>{_required(field)}\n")
    _paragraph(field.description, 2)
    facts = [
        ("default", field.default),
        ("values", ", ".join(field.choices)),
        *(("bound", bound) for bound in field.bounds),
        *(("rule", rule) for rule in field.rules),
        ("change", "not after creation" if field.immutable else ""),
    ]
    shown = [(name, text) for name, text in facts if text]
    if shown:
        click.echo()
    for name, text in shown:
        click.echo(f"  {name + ':':<9}{text}")
    if field.children:
        click.echo("\nFields:")
    for child in field.children:
        _print_child(child, recursive)
    if field.children and not recursive:
        path = f"{kind.lower()}{'.' * bool(field.path)}{field.path}"
        click.echo(f"\nMore of one: rollyard explain {path}.{field.children[0].name}")


def _print_child(child: DescribedField, recursive: bool, depth: int = 1) -> None:
    default = f" [{child.default}]" if child.default else ""
    click.echo(f"{'  ' * depth}{child.name}  <{child.type}>{_required(child)}{default}")
    if not recursive:
        _paragraph(child.description, 2 * depth + 4)
        return
    for further in child.children:
        _print_child(further, recursive, depth + 1)


def _required(field: DescribedField) -> str:
    return " (required)" if field.required and field.path else ""


def _print_reason(reason: str, found: tuple[ReasonMeaning, ...]) -> None:
    from rollyard_crds.reasons import FAULTS, PLACES, all_reasons

    name = next(each for each in all_reasons() if each.lower() == reason.lower())
    click.echo(name)
    for meaning in found:
        statuses = f" (HTTP {', '.join(map(str, meaning.statuses))})" if meaning.statuses else ""
        click.echo()
        _paragraph(f"Where: {'; '.join(PLACES[place] for place in meaning.places)}{statuses}", 2)
        _paragraph(f"What: {meaning.what}", 2)
        _paragraph(f"Fault: {'; or '.join(FAULTS[fault] for fault in meaning.faults)}", 2)
        _paragraph(f"Do: {meaning.remedy}", 2)
