"""The tests of a programming task (handler `code`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import Model
from rollyard_crds.fields.quantity import Quantity

Code = Annotated[str, Field(max_length=1 << 20)]
Data = Annotated[str, Field(max_length=4 << 20)]
_ONE_KIND = "give either 'program', or 'input' and 'output'"


class CodeCase(Model):
    """One test: what goes in and must come out, or a program that calls the function and asserts."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    input: Data | None = None
    """Standard input; with `entry_point`, the arguments as JSON, one a line."""
    output: Data | None = None
    """The expected standard output; with `entry_point`, the expected result as JSON."""
    program: Code | None = None
    """A Python program with assertions about the function `entry_point`, which is also there as `candidate`.
    If the program defines `check`, it is called with the function."""

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

    cases: Annotated[list[CodeCase], Field(min_length=1, max_length=1024)]
    """The tests, in their order."""
    entry_point: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] | None = None
    """The function that is called, or a method of the class `Solution`; default: a program is run."""
    prefix: Code = ""
    """Python code that stands before the policy's: imports, or the beginning that the policy completes."""
    helpers: Code = ""
    """Python code that stands before each `program` of the tests. The policy never sees it."""
    compare: Literal["exact", "numeric", "checker"] = "exact"
    """How outputs are compared: equal but for spaces at the ends of lines; numbers within `tolerance`; or by
    the program `checker`."""
    tolerance: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-6
    """The permitted distance of numbers, absolute or as a share of the expected one."""
    checker: Code | None = None
    """A Python program that defines `check(input, output, expected)`, which returns whether the output is
    right."""
    time_limit_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 10.0
    """The limit of each test, in seconds."""
    memory_limit: Quantity = "1Gi"
    """The limit of the address space of each test's process."""
    partial: bool = False
    """Whether the reward is the share of the tests that passed; default: 1 if all did, else 0."""

    @model_validator(mode="after")
    def _complete(self) -> CodeTests:
        if self.entry_point is None and any(case.program is not None for case in self.cases):
            raise ValueError("'entry_point' is required where a case has a 'program'")
        if (self.compare == "checker") != (self.checker is not None):
            raise ValueError("'checker' and 'compare: checker' need each other")
        return self
