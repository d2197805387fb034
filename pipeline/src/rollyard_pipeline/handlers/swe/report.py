"""Reads and checks the signed report of a run of pytest, which `report_plugin` writes in the sandbox."""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from rollyard_crds.fields.swe_tests import SweTests
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError

from rollyard_pipeline.handlers.swe.log_parsers import logged_name
from rollyard_pipeline.handlers.swe.protected import test_folders, test_paths
from rollyard_pipeline.handlers.swe.report_plugin import NAME, REPORT, SECRET, TAMPERED, plain, sign
from rollyard_pipeline.handlers.swe.results import (
    MISSING,
    PASSED,
    Reported,
    Results,
    deciding,
    in_a_function,
)

_MAX_BYTES: Final = 32 << 20
_SOURCES: Final = {
    "encodings/__init__.py": "report_start.py",
    "sitecustomize.py": "report_start.py",
    f"{NAME}.py": "report_plugin.py",
}
"""The files that start the report, and the modules of this package that they are."""


@dataclass(slots=True)
class SignedReport:
    """What a report says.

    Attributes:
        results: The result of each test. It is MISSING for a case of a cut name that was found and not run.
        complete: Whether the report is genuine and has its last line.
        tampered: The tests that passed without running their own code to its end, and those in whose place
            a function that fails did not count as failed.
        controlled: The tests in whose place such a function counted as failed.
    """

    results: Results = field(default_factory=Results)
    complete: bool = False
    tampered: set[str] = field(default_factory=set)
    controlled: set[str] = field(default_factory=set)

    def doubtful(self, tests: SweTests) -> set[str]:
        """Return the tests of a task that have passed in a way that is not believed."""
        reported = Reported(tests, self.results.keys() | self.tampered)
        listed = [*tests.fail_to_pass, *tests.pass_to_pass, *(tests.expected or ())]
        doubted = {name for test in listed for name in reported.of(test) if name in self.tampered}
        for test in filter(in_a_function, deciding(tests)):
            passed = (name for name in reported.of(test) if self.results.get(name) == PASSED)
            doubted.update(name for name in passed if name not in self.controlled)
        return doubted


class ReportFiles:
    """The plugin, its secret and its report, in a folder of the sandbox that Run could not write to.

    Args:
        client: The sandbox.
        folder: The absolute path of the folder.
    """

    def __init__(self, client: ExecClient, folder: str) -> None:
        self._client = client
        self._folder = folder
        self._secret = secrets.token_hex(32)

    async def write(self, tests: SweTests, repository: str) -> None:
        """Write the plugin, and the secret with what it has to know of the tests.

        Args:
            tests: The hidden tests.
            repository: The absolute path of the repository's folder.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed.
        """
        names = sorted({plain(name) for name in deciding(tests) if in_a_function(name)})
        listed = (*tests.fail_to_pass, *tests.pass_to_pass)
        cut = sorted({plain(name) for name in listed if "[" in name and not name.endswith("]")})
        paths = test_paths(tests)
        task = {
            "secret": self._secret,
            "folder": repository,
            "names": names,
            "cut": cut,
            "files": paths,
            "folders": test_folders(paths),
        }
        for path, module in _SOURCES.items():
            source = files(__package__).joinpath(module).read_bytes()
            await self._client.write_file(f"{self._folder}/{path}", source)
        await self._client.write_file(f"{self._folder}/{SECRET}", json.dumps(task).encode(), mode=0o600)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the variables that let Python begin with the plugin, and pytest load it."""
        added = {"PYTEST_ADDOPTS": f"-p {NAME}", "PYTHONPATH": self._folder}
        for name, separator in (("PYTEST_ADDOPTS", " "), ("PYTHONPATH", ":")):
            if environment.get(name):
                added[name] += separator + environment[name]
        return {**environment, **added}

    async def read(self, parser: str) -> SignedReport:
        """Return what the report says. Without a report it is empty, and not complete.

        Args:
            parser: The log parser, by whose rules tests are named.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed.
        """
        data, size = bytearray(), 1
        while len(data) < min(size, _MAX_BYTES):
            try:
                part = await self._client.read_file(
                    f"{self._folder}/{REPORT}", max_bytes=8 << 20, offset=len(data)
                )
            except FileError:
                return SignedReport()
            data += part.data
            size = part.size
            if not part.data:
                break
        return read_report(bytes(data), self._secret, parser)


def read_report(data: bytes, secret: str, parser: str) -> SignedReport:
    """Return what a report says, up to the first line that is not genuine."""
    report, last = SignedReport(), b""
    collected: set[str] = set()
    for line in data.split(b"\n")[:-1]:
        signature, _, text = line.partition(b" ")
        expected = sign(secret.encode(), last, text)
        if report.complete or not hmac.compare_digest(expected, signature):
            report.complete = False
            return report
        last = expected
        kind, digits, status = text.decode().split(" ")
        if kind == "end":
            report.complete = True
            for test in collected - report.results.keys() - report.tampered:
                report.results.add(test, MISSING)
            continue
        # Tests are named as data sets name them. No text of a test is read as a line of a log.
        test = logged_name(parser, bytes.fromhex(digits.strip("-")).decode(errors="surrogateescape"))
        if status == TAMPERED:
            report.tampered.add(test)
        elif kind == "collected":
            collected.add(test)
        elif kind == "control":
            report.controlled.add(test)
        else:
            report.results.add(test, status)
    return report
