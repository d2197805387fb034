"""The signed report of a run of pytest, which `report_plugin` writes in the sandbox, is read and checked."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError

from rollyard_pipeline.handlers.swe.log_parsers import parse
from rollyard_pipeline.handlers.swe.report_plugin import NAME, REPORT, SECRET
from rollyard_pipeline.handlers.swe.results import STATUSES, Results

_MAX_BYTES: Final = 32 << 20
_SOURCE: Final = files(__package__).joinpath("report_plugin.py").read_bytes()


@dataclass(slots=True)
class SignedReport:
    """What a report says.

    Attributes:
        results: The result of each test.
        complete: Whether the report is genuine and has its last line.
        tampered: The tests in whose place a function that fails did not count as failed.
    """

    results: Results = field(default_factory=Results)
    complete: bool = False
    tampered: list[str] = field(default_factory=list)


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

    async def write(self, controlled: Sequence[str]) -> None:
        """Write the plugin and the secret.

        Args:
            controlled: The names of the tests after which a function that fails is run in their place.

        Raises:
            rollyard_sandbox.errors.SandboxError: The sandbox failed.
        """
        names = sorted({name.split("[")[0] for name in controlled})
        given = json.dumps({"secret": self._secret, "control": names})
        await self._client.write_file(f"{self._folder}/{NAME}.py", _SOURCE)
        await self._client.write_file(f"{self._folder}/{SECRET}", given.encode(), mode=0o600)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the variables that let pytest load the plugin."""
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
    report, last = SignedReport(), ""
    for line in data.split(b"\n")[:-1]:
        signature, _, text = line.partition(b" ")
        expected = hmac.new(secret.encode(), last.encode() + text, hashlib.sha256).hexdigest()
        if report.complete or not hmac.compare_digest(expected.encode(), signature):
            report.complete = False
            return report
        last = expected
        entry = json.loads(text)
        if entry.get("end") is True:
            report.complete = True
        elif "control" in entry:
            if entry["failed"] is not True:
                report.tampered.append(str(entry["control"]))
        elif entry.get("status") in STATUSES:
            # Tests are named as they are in a log, in which a name ends at the first space.
            for test, status in parse(parser, f"{entry['status']} {entry['test']}").items():
                report.results.add(test, status)
    return report
