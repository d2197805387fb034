"""The operator of an installation as a process of this machine, which talks to another address."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from rollyard_testing.kubernetes.installed import Release
from rollyard_testing.pace import patience

START_SECONDS = patience(60.0)
END_SECONDS = patience(20.0)
CONFIG = "/etc/rollyard"
"""The folder in which the operator's pod has its settings and tokens."""


class OperatorProcess:
    """A process with the installation's settings, account and DNS, which runs while it is entered."""

    def __init__(self, release: Release, url: str, folder: Path) -> None:
        cluster, where = release.cluster, release.name
        pod = cluster.get("deployment", release.deployment("operator"), where)["spec"]["template"]["spec"]
        self._folder = folder
        self._files(release, pod)
        account = cluster.kubectl(
            "create", "token", pod["serviceAccountName"], "-n", where, "--duration=1h"
        ).strip()
        known = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {"server": url}}],
            "users": [{"name": "it", "user": {"token": account}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(known))
        dns = cluster.get("service", "kube-dns", "kube-system")["spec"]["clusterIP"]
        (folder / "resolv.conf").write_text(f"nameserver {dns}\n")
        api = cluster.get("service", "kubernetes", "default")["spec"]
        self._env = {
            **cluster.env,
            "KUBECONFIG": str(folder / "kubeconfig"),
            "KUBERNETES_SERVICE_HOST": api["clusterIP"],
            "KUBERNETES_SERVICE_PORT": str(api["ports"][0]["port"]),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def _files(self, release: Release, pod: dict[str, Any]) -> None:
        """Write what is mounted at CONFIG into the folder."""
        (config,) = [volume for volume in pod["volumes"] if volume["name"] == "config"]
        for source in config["projected"]["sources"]:
            ((kind, chosen),) = source.items()
            data = release.cluster.get(kind, chosen["name"], release.name)["data"]
            for item in chosen["items"]:
                content = data[item["key"]]
                file = self._folder / item["path"]
                file.parent.mkdir(exist_ok=True)
                file.write_text(b64decode(content).decode() if kind == "secret" else content)
        settings = self._folder / "operator.yaml"
        settings.write_text(settings.read_text().replace(CONFIG, str(self._folder)))

    def __enter__(self) -> OperatorProcess:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            liveness = f"http://127.0.0.1:{probe.getsockname()[1]}/healthz"
        # Only the cluster's DNS knows names of services, so it has an /etc/resolv.conf of its own.
        bind = 'mount --bind "$0" "$(realpath /etc/resolv.conf)" && exec "$@"'
        command = [
            "setpriv", "--pdeathsig", "TERM",  # It does not outlive these tests.
            "unshare", "--mount", "--propagation", "private",
            "sh", "-c", bind, str(self._folder / "resolv.conf"),
            sys.executable, "-m", "rollyard_operator",
            "--config", str(self._folder / "operator.yaml"), "--liveness", liveness,
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.is_alive(), self.log()
            with suppress(httpx.TransportError):
                if httpx.get(liveness, trust_env=False).status_code == 200:
                    return self
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if error is not None:
            print(self.log()[-8000:])
        self._process.terminate()
        try:
            ended = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
            raise
        assert error is not None or ended == 0, self.log()

    def is_alive(self) -> bool:
        """Return whether the very process that was started runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return the process's output."""
        return (self._folder / "log").read_text()
