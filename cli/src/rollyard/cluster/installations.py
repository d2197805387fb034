"""The installations of Rollyard in a cluster, found by the labels of their Services, and their tokens."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
from dataclasses import dataclass
from typing import Final

from rollyard.cluster.kubectl import ClusterProblem, KubectlRefused, kubectl
from rollyard.errors import LookupFailed, UsageProblem

SCHEME: Final = "kubernetes://"
"""The scheme of URLs `kubernetes://NAMESPACE/RELEASE`. Either part may be left out."""
SELECTOR: Final = "app.kubernetes.io/name=rollyard,app.kubernetes.io/component=api"
INSTANCE: Final = "app.kubernetes.io/instance"
TOKENS_SECRET: Final = "rollyard.dev/tokens-secret"
TOKEN_KEY: Final = "admin"


@dataclass(frozen=True, slots=True)
class Installation:
    """One installation of Rollyard in a cluster."""

    namespace: str
    service: str
    release: str
    scheme: str
    port: int
    tokens_secret: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.release}"


def _current_namespace() -> str:
    with contextlib.suppress(KubectlRefused):
        text = kubectl("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip()
        if text:
            return text
    return "default"


def parse(url: str) -> tuple[str, str]:
    """Return the namespace and the release of a `kubernetes://` URL. An empty part stands for any.

    Raises:
        UsageProblem: A part is not a valid name.
    """
    namespace, _, release = url.removeprefix(SCHEME).strip("/").partition("/")
    namespace = "" if namespace == "*" else namespace
    for part in (namespace, release):
        if part and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", part):
            raise UsageProblem(f"--kubernetes must be NAMESPACE or NAMESPACE/RELEASE (got {part!r})")
    return namespace, release


def find(url: str) -> Installation:
    """Return the one installation that a `kubernetes://` URL names.

    Raises:
        LookupFailed: There is no such installation.
        UsageProblem: There are several.
        ClusterProblem: The cluster does not answer, or it refuses to list Services.
    """
    namespace, release = parse(url)
    installations, where = _listed(namespace)
    installations = [
        installation for installation in installations if not release or installation.release == release
    ]
    if not installations:
        title = f"release {release!r} of Rollyard" if release else "Rollyard"
        raise LookupFailed(f"no {title} is installed in {where} (no Service labelled {SELECTOR})")
    if len(installations) > 1:
        names = ", ".join(sorted(map(str, installations)))
        raise UsageProblem(
            f"several Rollyards are installed ({names}): choose with --kubernetes=NAMESPACE/RELEASE"
        )
    return installations[0]


def _listed(namespace: str) -> tuple[list[Installation], str]:
    """Return the installations, and the name of the scope in which they were listed.

    Without a namespace, the scope is the whole cluster if the rights permit that, and otherwise the
    kubeconfig's own namespace.
    """
    if not namespace:
        try:
            return _services("--all-namespaces"), "the cluster"
        except KubectlRefused as error:
            if not error.forbidden:
                raise ClusterProblem(f"services cannot be listed: {error}") from error
        # The rights do not cover the whole cluster, so only the kubeconfig's own namespace is listed.
        namespace = _current_namespace()
    try:
        return _services("--namespace", namespace), f"namespace {namespace!r}"
    except KubectlRefused as error:
        message = f"services of namespace {namespace!r} cannot be listed: {error}"
        if error.forbidden:
            message += (
                "; name the installation's namespace (--kubernetes=NAMESPACE), or ask for `list services`"
            )
        raise ClusterProblem(message) from error


def _services(*scope: str) -> list[Installation]:
    document = json.loads(kubectl("get", "services", *scope, "--selector", SELECTOR, "--output", "json"))
    installations = []
    for item in document["items"]:
        meta = item["metadata"]
        for port in item["spec"].get("ports", []):
            if port.get("name") in ("http", "https"):
                labels: dict[str, str] = meta.get("labels", {})
                annotations: dict[str, str] = meta.get("annotations", {})
                installations.append(
                    Installation(
                        namespace=meta["namespace"],
                        service=meta["name"],
                        release=labels.get(INSTANCE, meta["name"]),
                        scheme=port["name"],
                        port=port["port"],
                        tokens_secret=annotations.get(TOKENS_SECRET, ""),
                    )
                )
                break
    return installations


def token(installation: Installation) -> str:
    """Return the admin token from the installation's Secret.

    Raises:
        ClusterProblem: The Secret cannot be read, or it holds no admin token.
    """
    name, namespace = installation.tokens_secret, installation.namespace
    instead = "set ROLLYARD_TOKEN to a token that you were given"
    if not name:
        raise ClusterProblem(f"the Service of {installation} names no Secret with tokens; {instead}")
    where = f"Secret {name!r} in namespace {namespace!r}"
    try:
        text = kubectl("get", "secret", name, "--namespace", namespace, "--output", "json")
    except KubectlRefused as error:
        if error.forbidden:
            raise ClusterProblem(
                f"you may not read {where}: {instead}, or ask for the right to `get` it"
            ) from error
        raise ClusterProblem(f"{where}: {error}; {instead}") from error
    encoded = (json.loads(text).get("data") or {}).get(TOKEN_KEY, "")
    try:
        decoded = base64.b64decode(encoded, validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        decoded = ""
    if not decoded:
        raise ClusterProblem(
            f"Secret {name!r} in namespace {namespace!r} has no key {TOKEN_KEY!r}; {instead}"
        )
    return decoded
