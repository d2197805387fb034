"""A pod like a sandbox's, without the installation's policy."""

from __future__ import annotations

from typing import Any


def plain_pod(
    name: str, image: str, labels: dict[str, str], command: list[str], **env: str
) -> dict[str, Any]:
    """Return a pod of the same image and security context as a sandbox's, with other labels."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": command,
                    "env": [{"name": variable, "value": value} for variable, value in env.items()],
                    "resources": {"requests": {"cpu": "5m", "memory": "32Mi"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
