"""The installer's list decides which hosts the sandboxes of a job may reach with `network: allowlist`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.fields.allowed_hosts import HostRule, installers_rule
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.problems import Invalid

FIELD = "spec.sandbox.allowedHosts"


class HostsNotAllowed(Invalid):
    """The job names a host that the installer's list does not contain."""

    reason = "HostsNotAllowed"


class HostPatternError(ControlPlaneError, ValueError):
    """An entry of the installer's list cannot be used. The message names it and says what would be right."""

    reason = "HostPatternInvalid"


@dataclass(frozen=True, slots=True)
class SandboxHosts:
    """The hosts that the installer allows jobs to open to their sandboxes. An empty list allows none."""

    patterns: tuple[str, ...] = ()
    rules: tuple[HostRule, ...] = ()

    @classmethod
    def of(cls, patterns: Sequence[str]) -> SandboxHosts:
        """Return the list as it is written on a command line.

        Raises:
            HostPatternError: An entry cannot be used.
        """
        try:
            return cls(tuple(patterns), tuple(installers_rule(text) for text in patterns))
        except ValueError as error:
            raise HostPatternError(str(error)) from error

    def check(self, spec: RolloutJobSpec) -> None:
        """Check that one entry of the list contains each host of a job.

        Raises:
            HostsNotAllowed: There are hosts for which this is not so; `errors` names each.
        """
        allowed = ", ".join(self.patterns) or "none; `--allow-sandbox-host` of the control plane names some"
        problems = [
            f"{FIELD}[{place}]: {text} is not allowed by the installer; allowed hosts: {allowed}"
            for place, text in enumerate(spec.sandbox.allowed_hosts or ())
            if not any(rule.contains(HostRule.parse(text)) for rule in self.rules)
        ]
        if problems:
            raise HostsNotAllowed(problems[0], errors=problems)
