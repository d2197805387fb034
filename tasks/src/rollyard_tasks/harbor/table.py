"""The tables of a `task.toml`: fields of the expected type, or an error that names the field."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rollyard_crds.fields.harbor import HarborOptions

from rollyard_tasks.errors import TasksError

_DEFAULTED: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")
MAX_SECONDS: Final = 7 * 86_400.0
"""The longest time limit that a task may state, in seconds."""
_MAX_UNKNOWN: Final = 64
_NUMBER: Final = re.compile(r"\d{1,15}(\.\d{1,15})?")
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([KMGT])i?B?", re.IGNORECASE)
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class HarborRefused(TasksError, ValueError):
    """A task folder that is broken, or that asks for what cannot be had. The message names the field."""

    reason = "InvalidTasks"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


@dataclass(frozen=True, slots=True)
class Reading:
    """What all tables of one file share: the job's options, and what is noted while they are read."""

    options: HarborOptions = field(default_factory=HarborOptions)
    unknown: dict[str, str | None] = field(default_factory=dict)
    """The paths of unknown keys, at most 64, each with that of a known key that resembles it."""
    ignored: dict[str, None] = field(default_factory=dict)
    """The paths of keys that ask for something that the options leave out, in their order."""


class Table:
    """One table of a `task.toml`.

    Args:
        values: The keys and values.
        name: The path of the table in the file, which is empty for the file itself.
        reading: What it shares with the other tables of the file.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "", reading: Reading | None = None) -> None:
        self._values = dict(values)
        self._name = name
        self._known: list[str] = []
        self.reading = reading or Reading()

    @classmethod
    def parse(cls, text: str, options: HarborOptions | None = None) -> Table:
        """Return the table of a whole file.

        Raises:
            HarborRefused: The text is not TOML. The message has the line.
        """
        try:
            return cls(tomllib.loads(text), reading=Reading(options or HarborOptions()))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise HarborRefused("task.toml", f"is not TOML: {str(error)[:200]}") from error

    def field(self, key: str) -> str:
        """Return the path of a key in the file."""
        return f"{self._name}.{key}" if self._name else key

    def refused(self, key: str, problem: str) -> HarborRefused:
        """Return the error about a key."""
        return HarborRefused(self.field(key), problem)

    def has(self, key: str) -> bool:
        """Return whether a value is there that has not been read."""
        self._known.append(key)
        return key in self._values

    def take(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """Return a value and mark it as read; the value is None where the key is absent."""
        value = self.free(key)
        # A truth value is a number to Python, but not to readers of the file.
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise self.refused(key, f"must be {expected}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.take(key, str, "a text")
        return default if value is None else str(value)

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """Return a text that must be one of `choices`."""
        value = self.text(key, default)
        if value not in choices:
            raise self.refused(key, f"is {value[:50]!r}, expected {' or '.join(choices)}")
        return value

    def seconds(self, key: str, default: float | None) -> float | None:
        """Return a number of seconds that is larger than 0."""
        value = self._number(key, "a number of seconds")
        if value is None:
            return default
        if not math.isfinite(value) or not 0 < value <= MAX_SECONDS:
            raise self.refused(key, f"must be larger than 0 and at most {MAX_SECONDS:.0f}")
        return value

    def amount(self, key: str) -> float | None:
        """Return a number that is not negative."""
        value = self._number(key, "a number")
        if value is not None and not 0 <= value < 1e9:
            raise self.refused(key, "must be a number from 0 to 10⁹")
        return value

    def _number(self, key: str, expected: str) -> float | None:
        """Return a number, which may be written as a text, as Harbor reads it."""
        value = self.take(key, (int, float, str), expected)
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            raise self.refused(key, f"must be {expected}")
        return None if value is None else float(value)

    def size(self, key: str) -> int:
        """Return a size in bytes, or 0 if none is given.

        The key `KEY_mb` has it as a number of MiB, and the older key as a text such as `2G`.

        Raises:
            HarborRefused: The text has no unit, or both are given and differ.
        """
        in_mib, text = self.amount(f"{key}_mb"), self.take(key, str, "a text such as '2G' or '512M'")
        from_mib = None if in_mib is None else int(in_mib * (1 << 20))
        if text is None:
            return from_mib or 0
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise self.refused(key, f"is {text[:50]!r}, expected a number with K, M, G or T, such as '2G'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
        if from_mib is not None and from_mib != size:
            raise self.refused(key, f"is {text[:50]!r}, and {key}_mb is {in_mib:g}: give one of them")
        return size

    def table(self, key: str) -> Table:
        """Return the table below a key, which is empty where the key is absent."""
        return self.inner(self.take(key, dict, "a table") or {}, key)

    def inner(self, values: Mapping[str, Any], key: str) -> Table:
        """Return values below a key as a table of the same file."""
        return Table(values, self.field(key), self.reading)

    def tables(self, key: str) -> list[Table]:
        """Return the list of tables below a key."""
        entries = self.take(key, list, "a list of tables") or []
        if not all(isinstance(values, dict) for values in entries):
            raise self.refused(key, "must be a list of tables")
        return [self.inner(values, f"{key}[{index}]") for index, values in enumerate(entries)]

    def env(self, key: str) -> dict[str, str]:
        """Return environment variables. `${NAME:-default}` stands for its default.

        Variables of the machine on which a task runs are never read, because they may hold secrets.

        Raises:
            HarborRefused: A value is not a text, or names a variable that has no default.
        """
        values = self.take(key, dict, "a table of texts") or {}
        variables: dict[str, str] = {}
        for name, value in values.items():
            if not isinstance(value, str):
                raise self.refused(f"{key}.{name[:100]}", "must be a text")
            for match in _DEFAULTED.finditer(value):
                if match[2] is None:
                    raise self.refused(
                        f"{key}.{name[:100]}",
                        f"names the variable {match[1]} of the machine that runs the task, which is not "
                        f"passed on; write ${{{match[1]}:-default}} or the value itself",
                    )
            variables[name] = _DEFAULTED.sub(lambda match: match[3], value)
        return variables

    def absent(self, key: str, why: str) -> None:
        """Check that a key is absent, or that its value asks for nothing.

        Raises:
            HarborRefused: It asks for something. The message says why that cannot be had.
        """
        if self.free(key) not in (None, 0, "", [], {}, False):
            raise self.refused(key, why)

    def skip(self, *keys: str) -> None:
        """Mark keys that have no meaning for a rollout as read."""
        for key in keys:
            self.free(key)

    def free(self, key: str) -> Any:
        """Return a value of any kind, and mark it as read."""
        self._known.append(key)
        return self._values.pop(key, None)

    def end(self) -> None:
        """Note every key that has not been read as unknown."""
        for key in self._values:
            if len(self.reading.unknown) >= _MAX_UNKNOWN:
                return
            name = key[:100] if key.isprintable() else ascii(key[:100])
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.75)
            self.reading.unknown[self.field(name)] = self.field(near[0]) if near else None
