"""A server that answers the requests of huggingface_hub as the Hugging Face Hub does.

It stands behind HF_ENDPOINT, and serves folders as models. A file of more than 1 MB counts as one of LFS,
which the hub answers with a redirect to its content network. All others come from the hub itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

COMMIT: Final = "c0ffee" + "0" * 34
LARGE: Final = 1_000_000
CONTENT_HOST: Final = "localhost"
"""The host of the content network. A client takes it for another one than the hub, which is 127.0.0.1."""
TOKEN: Final = "hf_theTokenThatMustNotLeak"
_API: Final = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)")
_RESOLVE: Final = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CONTENT: Final = re.compile(r"/content/([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class HubRequest:
    """A request that the server got."""

    method: str
    path: str
    host: str
    """The host and port that the client asked for."""
    token: str
    """What the client sent as its bearer token, or an empty string."""


@dataclass(slots=True)
class HubModel:
    """A model of the hub."""

    folder: Path
    gated: bool = False
    """Whether its files need the server's token. Its description needs none."""
    private: bool = False
    """Whether nothing is said about it without the server's token."""
    also: dict[str, bytes] = field(default_factory=dict)
    """Further files by their path, which may be any text that a hostile hub lists."""

    def files(self) -> Mapping[str, bytes]:
        """Return the content of each file by its path."""
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths} | self.also


class Hub:
    """The models of a server, what it was asked for, and the faults that it shows."""

    def __init__(self, host: str) -> None:
        self.host = host
        """The address by which clients reach the server."""
        self.large = LARGE
        """The size in bytes from which the content network serves a file."""
        self.models: dict[str, HubModel] = {}
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.requests: list[HubRequest] = []
        self.port = 0
        self.cut_off_after: list[int] = []
        """The numbers of bytes after which the next answers with large files end."""
        self.status = 0
        """The status of every answer, if it is not 0."""
        self.lists_files = True
        """Whether the list of a model's files with their sizes is given, or refused with 403."""

    @property
    def url(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://{self.host}:{self.port}"

    def environment(self, home: Path, token: str = "") -> dict[str, str]:
        """Return an environment for a process that uses this hub and the cache in `home` alone."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {
            **kept,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1,localhost",
            **({"HF_TOKEN": token} if token else {}),
        }

    def downloads(self) -> list[str]:
        """Return the paths of the requests for the content of files."""
        return [
            request.path
            for request in self.requests
            if request.method == "GET" and "/api/" not in request.path
        ]


def use_hub(patch: pytest.MonkeyPatch, hub: Hub, home: Path, token: str = "") -> Path:
    """Let this process and its children use a hub and the cache in `home` alone. Return the cache's folder.

    The library reads its variables when it is imported, which another test may have caused already.
    """
    from huggingface_hub import constants

    for name in (name for name in os.environ if name.startswith(("HF_", "HUGGING"))):
        patch.delenv(name)
    patch.setenv("HF_ENDPOINT", hub.url)
    patch.setenv("HF_HOME", str(home))
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    if token:
        patch.setenv("HF_TOKEN", token)
    patch.setattr(constants, "ENDPOINT", hub.url)
    url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    return home / "hub"


@contextmanager
def hub_server(host: str = "127.0.0.1") -> Iterator[Hub]:
    """Run a hub without models until the block ends. It listens on an address of this machine."""
    hub = Hub(host)
    server = ThreadingHTTPServer((host, 0), _handler(hub))
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers the requests for one hub."""

        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            hub.requests.append(HubRequest(self.command, path, self.headers.get("Host", ""), token))
            if hub.status:
                self._send(hub.status, b"{}")
            elif match := _CONTENT.fullmatch(path):
                self._content(match[1])
            elif not hub.lists_files and "/tree/" in path:
                self._send(403, b"{}")
            elif match := _API.fullmatch(urlsplit(self.path).path):
                self._describe(match[1], match[2], unquote(match[3]), token)
            elif match := _RESOLVE.fullmatch(path):
                self._resolve(match[1], match[2], match[3], token)
            else:
                self._send(404, b"{}")

        def _model(self, name: str, revision: str, token: str) -> HubModel | None:
            """Return a model if the caller may know of it and of the revision, or answer with an error."""
            model = hub.models.get(name)
            if model is None or (model.private and token != TOKEN):
                # The hub says the same of both.
                self._fail(404 if token else 401, "RepoNotFound", "Repository not found")
            elif revision not in hub.revisions:
                self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return model
            return None

        def _describe(self, name: str, part: str, revision: str, token: str) -> None:
            model = self._model(name, revision, token)
            if model is None:
                return
            files = model.files()
            if part == "revision":
                document: object = {
                    "_id": "0",
                    "id": name,
                    "modelId": name,
                    "sha": hub.revisions[revision],
                    "private": model.private,
                    "gated": "manual" if model.gated else False,
                    "siblings": [{"rfilename": path} for path in files],
                }
            else:
                document = [_entry(path, content, hub.large) for path, content in files.items()]
            self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def _resolve(self, name: str, revision: str, path: str, token: str) -> None:
            model = self._model(name, revision, token)
            if model is None:
                return
            content = model.files().get(path)
            if model.gated and token != TOKEN:
                self._fail(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
            elif content is None:
                self._fail(404, "EntryNotFound", "Entry not found")
            else:
                self._file(revision, content)

        def _file(self, revision: str, content: bytes) -> None:
            headers = {"X-Repo-Commit": hub.revisions[revision], "ETag": f'"{_blob_id(content)}"'}
            if len(content) <= hub.large:
                self._send(200, content, headers)
                return
            digest = hashlib.sha256(content).hexdigest()
            headers |= {
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"http://{CONTENT_HOST}:{hub.port}/content/{digest}",
            }
            self._send(302, b"", headers)

        def _content(self, digest: str) -> None:
            for model in hub.models.values():
                for content in model.files().values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        self._part(content)
                        return
            self._send(404, b"")

        def _part(self, content: bytes) -> None:
            """Answer with a file, or with its end if the client has the beginning."""
            begin = (
                int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
            )
            headers = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
            limit = hub.cut_off_after.pop(0) if self.command == "GET" and hub.cut_off_after else None
            self._send(206 if begin else 200, content[begin:], headers, limit)

        def _fail(self, status: int, code: str, message: str) -> None:
            self._send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code})

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str] | None = None, limit: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body if limit is None else body[:limit])
            if limit is not None:
                self.wfile.flush()
                self.close_connection = True

    return Handler


def _entry(path: str, content: bytes, large: int) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "oid": _blob_id(content),
        "size": len(content),
    }
    if len(content) > large:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 135}
    return entry


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
