"""The installer's lists decide which hosts the sandboxes of a job may reach with `network: allowlist`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.fields.allowed_hosts import HostRule, installers_rule
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid


@dataclass(frozen=True, slots=True)
class _List:
    """One list of the installer. An empty one allows no host."""

    option: str
    field: str
    """The field of a job that it is for."""
    patterns: tuple[str, ...]
    rules: tuple[HostRule, ...]

    @classmethod
    def of(cls, option: str, field: str, patterns: Sequence[str]) -> _List:
        try:
            return cls(option, field, tuple(patterns), tuple(installers_rule(text) for text in patterns))
        except ValueError as error:
            raise OptionInvalid(str(error)) from error

    def problems(self, hosts: Sequence[str]) -> list[str]:
        """Return a problem for each host of a job that no entry contains."""
        # Where a host is, is not the author's business.
        shown = ", ".join(dict.fromkeys(text.partition("=")[0] for text in self.patterns))
        allowed = shown or f"none; `{self.option}` of the control plane names some"
        return [
            f"{self.field}[{index}]: {text} is not allowed by the installer; allowed hosts: {allowed}"
            for index, text in enumerate(hosts)
            if not any(rule.contains(HostRule.parse(text)) for rule in self.rules)
        ]


@dataclass(frozen=True, slots=True)
class SandboxHosts:
    """The hosts that the installer allows jobs to open to their sandboxes: in Init and Run, and in Eval."""

    sandbox: _List
    evaluation: _List

    @classmethod
    def of(cls, sandbox: Sequence[str], evaluation: Sequence[str]) -> SandboxHosts:
        """Return the lists as they are written on a command line.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        return cls(
            _List.of("--allow-sandbox-host", "spec.sandbox.allowedHosts", sandbox),
            _List.of("--allow-eval-host", "spec.stages.eval.allowedHosts", evaluation),
        )

    @property
    def pinned(self) -> list[str]:
        """The entries that let a host have an address which is not public."""
        patterns = dict.fromkeys((*self.sandbox.patterns, *self.evaluation.patterns))
        return [text for text in patterns if "=" in text]

    def check(self, spec: RolloutJobSpec) -> None:
        """Check that one entry of the right list contains each host of a job.

        Raises:
            Invalid: There are hosts for which this is not so; `errors` names each, and the reason is
                HostsNotAllowed.
        """
        problems = self.sandbox.problems(spec.sandbox.allowed_hosts or ())
        problems += self.evaluation.problems(spec.stages.eval.allowed_hosts or ())
        if problems:
            raise Invalid.of(*problems, reason="HostsNotAllowed")
