"""The words of command lines that several commands share: kinds and names, labels, and durations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import click

Kind = Literal["rj", "bp"]
RESOURCES: Final[dict[Kind, str]] = {"rj": "rolloutjob", "bp": "backendpool"}
"""What messages call an object of each kind."""
GROUP: Final = "rollyard.dev"
_WORDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("rj", "rolloutjob", "rolloutjobs", "job", "jobs"), "rj"),
    **dict.fromkeys(("bp", "backendpool", "backendpools", "pool", "pools"), "bp"),
}
_OF_GROUP: Final = re.compile(r"(\.v1alpha1)?\.rollyard\.dev$")
_OTHER_KINDS: Final = {
    **dict.fromkeys(("event", "events", "ev"), "`rollyard events JOB` shows those of a job"),
    **dict.fromkeys(
        ("pod", "pods", "po", "worker", "workers", "log", "logs"),
        "`rollyard logs` lists the processes of this machine by their logs; in a cluster, use kubectl",
    ),
    **dict.fromkeys(("node", "nodes", "no"), "`rollyard open` opens the page, which shows them"),
    **dict.fromkeys(("rollout", "rollouts"), "`rollyard view JOB --list` lists those of a job"),
    **dict.fromkeys(("trajectory",), "`rollyard view JOB` shows one"),
    **dict.fromkeys(("trajectories",), "`rollyard trajectories JOB -o FILE` writes those of a job"),
    **dict.fromkeys(("backend", "backends"), "`rollyard get bp -o wide` lists those of the pools"),
    **dict.fromkeys(("namespace", "namespaces", "ns"), "`rollyard get -A` lists what all of them have"),
    **dict.fromkeys(("weights",), "`rollyard weights POOL` lists the updates of a pool"),
}
"""What somebody may look for, with the command that shows it."""
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_LABEL: Final = re.compile(r"(?P<no>!?)(?P<key>[^\s=!,]+)(?:\s*(?P<sign>!=|==?)\s*(?P<value>[^\s=!,]*))?")


@dataclass(frozen=True, slots=True)
class NamedObject:
    """An object that a command line names. Without a kind, it is the job of this name, or else the pool."""

    kind: Kind | None
    name: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command line names: objects, or else all of some kinds, or else nothing."""

    kinds: tuple[Kind, ...] = ()
    targets: tuple[NamedObject, ...] = ()


def kind_of(word: str) -> Kind | None:
    """Return the kind that a word names, in each form that kubectl takes, or None if it names none."""
    return _WORDS.get(_OF_GROUP.sub("", word.lower()))


def selection(words: Sequence[str]) -> Selection:
    """Return what `KIND[,KIND]`, `all`, `KIND NAME…`, `KIND/NAME…` or a NAME alone selects.

    Raises:
        click.UsageError: The words have another form, or name what is not a kind.
    """
    if any("/" in word for word in words):
        return Selection(targets=tuple(map(_joined, words)))
    if not words:
        return Selection()
    parts = words[0].split(",")
    kinds = ("rj", "bp") if words[0] == "all" else tuple(dict.fromkeys(map(kind_of, parts)))
    known = tuple(kind for kind in kinds if kind is not None)
    if len(known) == len(kinds):
        return Selection(known, tuple(NamedObject(kind, name) for kind in known for name in words[1:]))
    unknown = next(part for part in parts if kind_of(part) is None)
    if unknown.lower() in _OTHER_KINDS:
        raise click.UsageError(
            f"{unknown!r} is no kind of object: {_OTHER_KINDS[unknown.lower()]} (rj/{unknown} is the job of "
            "this name)"
        )
    if len(words) > 1 or len(parts) > 1:
        raise click.UsageError(
            f"KIND must be rj or bp (got {unknown!r}); several names need it: rj NAME NAME"
        )
    return Selection(targets=(NamedObject(None, words[0]),))


def _joined(word: str) -> NamedObject:
    before, slash, name = word.partition("/")
    kind = kind_of(before)
    if not slash or not name or "/" in name:
        raise click.UsageError(f"give KIND/NAME for each object, or KIND and then names (got {word!r})")
    if kind is None:
        raise click.UsageError(f"KIND must be rj or bp (got {before!r})")
    return NamedObject(kind, name)


def targets(command: str, words: Sequence[str]) -> tuple[NamedObject, ...]:
    """Return the objects that a command is given, of which there is at least one.

    Raises:
        click.UsageError: The words name no object.
    """
    selected = selection(words)
    if selected.targets:
        return selected.targets
    if not selected.kinds:
        raise click.UsageError(f"give a NAME: rollyard {command} NAME (`rollyard get all` lists them)")
    kind = ",".join(selected.kinds)
    raise click.UsageError(
        f"give the NAME too: rollyard {command} {kind} NAME (`rollyard get {kind}` lists them)"
    )


def job_name(text: str) -> str:
    """Return the NAME of a job, which may be written as KIND/NAME."""
    return _name_of("rj", text)


def pool_name(text: str) -> str:
    """Return the NAME of a pool, which may be written as KIND/NAME."""
    return _name_of("bp", text)


def _name_of(kind: Kind, text: str) -> str:
    if "/" not in text:
        return text
    named = _joined(text)
    if named.kind != kind:
        raise click.BadParameter(f"this command takes a {RESOURCES[kind]} (got {text!r})")
    return named.name


def label_selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """Return the check of labels that `k=v,k!=v,k,!k` asks for, as kubectl takes it, without sets of values.

    Raises:
        click.UsageError: The text has another form.
    """
    matches = [_LABEL.fullmatch(part.strip()) for part in text.split(",")]
    requirements = []
    for match in matches:
        if match is None or (match["no"] and match["sign"]):
            raise click.UsageError(f"--selector must be such as team=a,stage!=b,key,!key (got {text!r})")
        requirements.append(match)

    def fulfils(labels: Mapping[str, str], match: re.Match[str]) -> bool:
        if match["sign"] is None:
            return (match["key"] in labels) != bool(match["no"])
        return (labels.get(match["key"]) == match["value"]) == (match["sign"] != "!=")

    return lambda labels: all(fulfils(labels, match) for match in requirements)


def duration(text: str) -> float:
    """Return a duration as kubectl takes it, such as `90s`, `1h30m` or `2d`, or a number of seconds.

    It is negative where the text is.

    Raises:
        click.BadParameter: The text has another form.
    """
    amount = text.strip().removeprefix("-")
    pieces = _DURATION.findall(amount)
    if pieces and "".join(map("".join, pieces)) == amount:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in pieces)
    elif re.fullmatch(r"\d+(\.\d+)?", amount):
        seconds = float(amount)
    else:
        raise click.BadParameter(f"must be such as 90s, 10m or 1h30m (got {text!r})")
    return -seconds if text.strip().startswith("-") else seconds
