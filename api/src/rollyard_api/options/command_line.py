"""Declared options on the command line of click, under the headings of their groups."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
import click
from pydantic.fields import FieldInfo

from rollyard_api.options.declared import DeclaredOptions, key_of, option_of

F = TypeVar("F", bound=Callable[..., object])


class DeclaredOption(click.Option):
    """An option that is listed under the heading of its group."""

    def __init__(self, *words: Any, group: str, **more: Any) -> None:
        super().__init__(*words, **more)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists declared options by group, after its own.

    Args:
        most_used: The parameters that come before all others, by name.
        first_groups: The groups that come before the others.
    """

    def __init__(
        self, *words: Any, most_used: Sequence[str] = (), first_groups: Sequence[str] = (), **more: Any
    ) -> None:
        super().__init__(*words, **more)
        self._most_used = tuple(most_used)
        self._first_groups = tuple(first_groups)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: the most used ones, the command's own, and then the groups."""
        first = ("Most used", "Options", *self._first_groups)
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in first}
        for parameter in sorted(self.get_params(ctx), key=self._place):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_most_used = parameter.name in self._most_used
                title = "Most used" if is_most_used else getattr(parameter, "group", "Options")
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _place(self, parameter: click.Parameter) -> int:
        name = parameter.name or ""
        return self._most_used.index(name) if name in self._most_used else len(self._most_used)


def declared_options(model: type[DeclaredOptions]) -> Callable[[F], F]:
    """Return a decorator that adds the options of a model, and `--config`, to a command.

    The function of the command gets the value of each option by its field's name, and None or an empty tuple
    for one that is not on the command line; `on_command_line` leaves these out.
    """

    def add(function: F) -> F:
        for name, field in reversed(model.model_fields.items()):
            function = _option(model, name, field)(function)
        return click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            help="YAML file with any of these options, such as `lease-seconds: 20`. The command line has "
            "precedence over variables, and these over the file.",
        )(function)

    return add


def on_command_line(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command's parameters that are on its command line."""
    return {name: value for name, value in values.items() if value is not None and value != ()}


def _option(model: type[DeclaredOptions], name: str, field: FieldInfo) -> Callable[[F], F]:
    option, key = option_of(field), key_of(name, field)
    kind, more = _kind(field)
    flag = f"--{key}/--no-{key}" if kind is bool else f"--{key}"
    default = option.default or usual(field)
    variables = " or ".join(f"${each}" for each in (option.variable, *option.elsewhere) if each)
    words = ", else ".join(each for each in (variables, default) if each)
    text = f"{option.help} [{words}]." if words else f"{option.help}."
    if option.metavar:
        more["metavar"] = option.metavar
    if kind is not bool:
        more["type"] = kind
    return click.option(flag, name, cls=DeclaredOption, group=option.group, default=None, help=text, **more)


def usual(field: FieldInfo) -> str:
    """Return the default of a field in words, or "" if it goes without saying."""
    value = field.get_default(call_default_factory=True)
    if value is True:
        return "yes"
    if isinstance(value, tuple):
        return " ".join(value)
    if isinstance(value, float):
        return f"{value:.10g}"
    return "" if value is None or value is False or field.is_required() else str(value)


def _kind(field: FieldInfo) -> tuple[Any, dict[str, Any]]:
    """Return the type of click for a field, and further arguments of the option."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (types.UnionType, Union):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation)), {}
    if get_origin(annotation) is tuple:
        return str, {"multiple": True}
    if annotation is Path:
        return click.Path(path_type=Path), {}
    if annotation in (int, float):
        return _range(annotation, field), {"metavar": "N"}
    return annotation, {}


def _range(kind: type, field: FieldInfo) -> Any:
    """Return the type of click for a number within the bounds of a field."""
    low, high, above = None, None, False
    for bound in field.metadata:
        if isinstance(bound, annotated_types.Ge | annotated_types.Gt):
            above = isinstance(bound, annotated_types.Gt)
            low = bound.gt if isinstance(bound, annotated_types.Gt) else bound.ge
        elif isinstance(bound, annotated_types.Le):
            high = bound.le
    range_type = click.IntRange if kind is int else click.FloatRange
    return range_type(min=low, max=high, min_open=above)  # type: ignore[arg-type]
