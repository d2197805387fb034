"""The scripts that run the tests of rows which bring a test command instead of a script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

ACTIVATE: Final = "source /opt/miniconda3/bin/activate\nconda activate testbed"
"""The commands that make ready the environment of an image of SWE-bench."""
START: Final = ">>>>> Start Test Output"
END: Final = ">>>>> End Test Output"
"""The lines around the output of the tests, as SWE-bench's scripts print them."""


def script_of(folder: str, before: Sequence[str], commands: Sequence[str], arguments: Sequence[str]) -> str:
    """Return a script that runs the test commands in a folder, and exits with the status of the last one.

    Args:
        folder: The absolute path of the repository.
        before: Commands that prepare the tests. They may fail, as reinstalling does without a network.
        commands: The test commands.
        arguments: The files or labels that are added to each command.
    """
    added = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    lines = [*before, f"cd {shlex.quote(folder)}", f"echo '{START}'"]
    lines += [f"{command}{added}" for command in commands]
    return "\n".join([*lines, "rollyard_status=$?", f"echo '{END}'", "exit $rollyard_status", ""])


def labels(repository: str, files: Sequence[str]) -> list[str]:
    """Return what the test command of a repository takes for these files: Django takes modules."""
    if repository != "django/django":
        return list(files)
    return [
        file.removesuffix(".py").removeprefix("tests/").replace("/", ".")
        for file in files
        if file.endswith(".py")
    ]


def files_of(tests: Sequence[str]) -> list[str]:
    """Return the files of pytest's test names, each once and in their order."""
    return list(dict.fromkeys(test.split("::")[0] for test in tests if "::" in test))
