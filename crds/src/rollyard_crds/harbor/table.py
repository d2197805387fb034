"""The tables of a `task.toml`: fields of the expected type, or an error that names the field."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from rollyard_crds.errors import CrdsError

_DEFAULTED: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\}")
MAX_SECONDS: Final = 7 * 86_400.0
"""The longest time limit that a task may state, in seconds."""


class HarborRefused(CrdsError, ValueError):
    """A task folder that is broken, or that asks for something that cannot be had. It names the field."""

    reason = "InvalidTasks"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


class Table:
    """One table of a `task.toml`, whose keys must all be read.

    Args:
        values: The keys and values.
        name: The path of the table in the file, which is empty for the file itself.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values = dict(values)
        self._name = name

    @classmethod
    def parse(cls, text: str) -> Table:
        """Return the table of a whole file.

        Raises:
            HarborRefused: The text is no TOML. The message has the line.
        """
        try:
            return cls(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise HarborRefused("task.toml", f"is no TOML: {str(error)[:200]}") from error

    def field(self, key: str) -> str:
        """Return the path of a key in the file."""
        return f"{self._name}.{key}" if self._name else key

    def refused(self, key: str, problem: str) -> HarborRefused:
        """Return the error about a key."""
        return HarborRefused(self.field(key), problem)

    def take(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        """Return a value and mark it as read; the value is None where the key is absent."""
        value = self._values.pop(key, None)
        # A truth value is a number to Python, and to no reader of the file.
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise self.refused(key, f"must be {what}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.take(key, str, "a text")
        return default if value is None else str(value)

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """Return one of some words."""
        value = self.text(key, default)
        if value not in choices:
            raise self.refused(key, f"is {value[:50]!r}, expected {' or '.join(choices)}")
        return value

    def seconds(self, key: str, default: float | None) -> float | None:
        """Return a number of seconds that is larger than 0."""
        value = self.take(key, (int, float), "a number of seconds")
        if value is None:
            return default
        if not math.isfinite(value) or not 0 < value <= MAX_SECONDS:
            raise self.refused(key, f"must be larger than 0 and at most {MAX_SECONDS:.0f}")
        return float(value)

    def amount(self, key: str) -> float | None:
        """Return a number that is not negative."""
        value = self.take(key, (int, float), "a number")
        if value is not None and not 0 <= value < 1e9:
            raise self.refused(key, "must be a number from 0 to 10⁹")
        return None if value is None else float(value)

    def table(self, key: str) -> Table:
        """Return the table below a key, which is empty where the key is absent."""
        return Table(self.take(key, dict, "a table") or {}, self.field(key))

    def tables(self, key: str) -> list[Table]:
        """Return the list of tables below a key."""
        found = self.take(key, list, "a list of tables") or []
        if not all(isinstance(values, dict) for values in found):
            raise self.refused(key, "must be a list of tables")
        return [Table(values, f"{self.field(key)}[{place}]") for place, values in enumerate(found)]

    def env(self, key: str) -> dict[str, str]:
        """Return environment variables. `${NAME:-default}` stands for its default.

        Variables of the machine on which a task runs are never read, because they may be secrets.

        Raises:
            HarborRefused: A value is no text, or names a variable that has no default.
        """
        values = self.take(key, dict, "a table of texts") or {}
        found: dict[str, str] = {}
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
            found[name] = _DEFAULTED.sub(lambda match: match[3], value)
        return found

    def absent(self, key: str, why: str) -> None:
        """Check that a key is absent, or that its value asks for nothing.

        Raises:
            HarborRefused: It asks for something. The message says why that cannot be had.
        """
        if self._values.pop(key, None) not in (None, 0, "", [], {}, False):
            raise self.refused(key, why)

    def skip(self, *keys: str) -> None:
        """Mark keys as read that have no meaning for a rollout."""
        for key in keys:
            self._values.pop(key, None)

    def free(self, key: str) -> Any:
        """Return a value of any kind."""
        return self._values.pop(key, None)

    def end(self) -> None:
        """Check that every key has been read.

        Raises:
            HarborRefused: There is an unknown key. It might change what the task is, so it is not ignored.
        """
        for key in self._values:
            raise self.refused(key[:100], "is not known here")
