"""Calls of kubectl, which handles authentication plugins and proxies."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rollyard.errors import CliError

CALL_SECONDS: Final = 15
"""The limit of one kubectl call, in seconds."""


class ClusterProblem(CliError):
    """Raised if the cluster or the user's rights in it do not suffice. The message says what to do."""

    reason = "ClusterProblem"


class KubectlRefused(CliError):
    """Raised if kubectl failed. The message is kubectl's own."""

    reason = "KubectlRefused"

    @property
    def forbidden(self) -> bool:
        """Whether the cluster refused the call because the user lacks rights."""
        return "Forbidden" in str(self) or "forbidden" in str(self)


def configured(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether kubectl and a kubeconfig exist. This does not contact a cluster."""
    if shutil.which("kubectl") is None:
        return False
    variable = env.get("KUBECONFIG")
    paths = [Path(part) for part in variable.split(os.pathsep) if part] if variable else []
    return any(path.is_file() for path in paths or [Path.home() / ".kube" / "config"])


def kubectl(*arguments: str, seconds: float = CALL_SECONDS) -> str:
    """Run kubectl and return its output.

    Raises:
        KubectlRefused: kubectl failed.
        ClusterProblem: There is no kubectl, or no cluster answers in time.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ClusterProblem(
            "kubectl is not on PATH, and --kubernetes needs it; install it, or give --url (an ingress, say)"
        )
    command = [program, *arguments, f"--request-timeout={seconds:.0f}s"]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 5
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterProblem(f"the cluster does not answer within {seconds:.0f} s") from error
    if process.returncode == 0:
        return process.stdout
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else f"kubectl ended with status {process.returncode}"
    unreachable = ("was refused", "Unable to connect", "i/o timeout", "no such host", "context deadline")
    if any(part in text for part in unreachable):
        raise ClusterProblem(f"the cluster does not answer: {text} (is KUBECONFIG right?)")
    raise KubectlRefused(text)
