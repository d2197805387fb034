"""The tests of a programming task (handler `code`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import Model
from rollyard_crds.fields.json_values import MAX_VALUES, too_many_values
from rollyard_crds.fields.quantity import Quantity

Code = Annotated[str, Field(max_length=1 << 20)]
Input = Annotated[str, Field(max_length=16 << 20)]
Output = Annotated[str, Field(max_length=4 << 20)]
MAX_CASES: Final = 1024
"""The largest number of tests of a task."""
_ONE_KIND: Final = "give either 'program', or 'input' and 'output'"
_NO_JSON: Final = "must be JSON where there is an 'entry_point': the arguments one a line, and the result"
_MOST_DIGITS: Final = 100_000
"""The most digits of an integer in JSON. The time to read one grows with the square of its length."""


class CodeCase(Model):
    """One test: an input and the expected output, or a program that calls the function and asserts."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    input: Input | None = None
    """Standard input; with `entry_point`, the arguments as JSON, one a line."""
    output: Output | None = None
    """The expected standard output; with `entry_point`, the expected result as JSON."""
    program: Code | None = None
    """A Python program with assertions about the function `entry_point`, which is also there as `candidate`.
    If the program defines `check`, it is called with the function."""

    def arguments(self, integer: Callable[[str], Any] | None = None) -> list[Any]:
        """Return the arguments with which the function is called.

        Args:
            integer: Makes a value from an integer's digits; default: the integer.

        Raises:
            ValueError, RecursionError: They are not JSON, one a line.
        """
        lines = [line for line in (self.input or "").split("\n") if line.strip()]
        return [json.loads(line, parse_int=integer or _integer) for line in lines]

    def result(self, integer: Callable[[str], Any] | None = None) -> Any:
        """Return what the function should return. See `arguments`."""
        return json.loads(self.output or "", parse_int=integer or _integer)

    @model_validator(mode="after")
    def _one_kind(self) -> CodeCase:
        if (self.program is None) != (self.input is not None and self.output is not None):
            raise ValueError(_ONE_KIND)
        if self.program is not None and (self.input is not None or self.output is not None):
            raise ValueError(_ONE_KIND)
        return self


class CodeTests(Model):
    """The tests of one task, each of which runs in processes of its own."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    cases: Annotated[list[CodeCase], Field(min_length=1, max_length=MAX_CASES)]
    """The tests, in their order."""
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] | None = None
    """The function that is called, or a method of the class `Solution`; default: a program is run."""
    prefix: Code = ""
    """Python code that is put before the policy's: imports, or the beginning that the policy completes."""
    setup: Code = ""
    """Python code that is put after the policy's program, and makes objects for the calls in each `program`.
    It runs in the policy's process, and so do the arguments of these calls, so it must not give away a
    result."""
    helpers: Code = ""
    """Python code that is put before each `program` of the tests. The policy never sees it."""
    unwrap: bool = False
    """Whether an expected list of one item stands for this item as well, as in APPS and TACO."""
    compare: Literal["exact", "numeric", "checker"] = "exact"
    """How outputs are compared: as equal except for spaces around lines and between numbers; with fractions
    within `tolerance`; or by the program `checker`."""
    tolerance: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-6
    """The permitted distance of two numbers of which one is a fraction, as a share of the expected one, or of
    1 if that is 0. Whole numbers must be equal."""
    checker: Code | None = None
    """A Python program that defines `check(input, output, expected)`, which returns whether the output is
    right."""
    time_limit_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 10.0
    """The limit of each test, in seconds."""
    memory_limit: Quantity = "1Gi"
    """The limit of the memory that each process of a test may write to and shares with no other (on Linux:
    RLIMIT_DATA). What is only reserved does not count."""
    partial: bool = False
    """Whether the reward is the share of the tests that passed; default: 1 if all did, else 0."""

    @model_validator(mode="after")
    def _complete(self) -> CodeTests:
        if self.entry_point is None and any(case.program is not None for case in self.cases):
            raise ValueError("'entry_point' is required where a case has a 'program'")
        if self.entry_point is not None:
            for index, case in enumerate(self.cases):
                _check_json(index, case)
        if (self.compare == "checker") != (self.checker is not None):
            raise ValueError("'checker' and 'compare: checker' need each other")
        return self


def _check_json(index: int, case: CodeCase) -> None:
    if case.program is None:
        if any(map(too_many_values, (case.input or "", case.output or ""))):
            raise ValueError(f"cases[{index}]: 'input' or 'output' holds more than {MAX_VALUES} values")
        try:
            case.arguments(_checked), case.result(_checked)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cases[{index}]: 'input' and 'output' {_NO_JSON} ({error})") from error


def _checked(digits: str) -> None:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer has more than {_MOST_DIGITS:,} digits")


def _integer(digits: str) -> int:
    _checked(digits)
    return int(Decimal(digits))  # `int` itself takes no more than 4,300 digits.
