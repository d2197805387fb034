"""What the author of a job tries with `spec.tasks.url` and with uploads, against a control plane of its own.

Loopback stands for every address that the control plane must not reach, and is allowed where a test says so.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from rollyard.main import main
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

pytestmark = pytest.mark.attack(boundary="control plane", surface="`spec.tasks.url`")


TASK = json.dumps({"id": "a", "prompt": "1 + 1?", "answer": "2"}).encode() + b"\n"
SECRET = "hunter2-is-the-secret"
ROWS_MEGABYTES = 300
"""The most memory that a task file may take, whose rows have at most 64 MiB."""
LIMIT = patience(90.0)
"""The seconds that any awaited step may take."""


@dataclass(frozen=True)
class Plane:
    """A control plane as a process, and the client of a job's author."""

    http: httpx.Client
    state: Path
    pid: int

    def submit(
        self, url: str, name: str = "attack", namespace: str = "default", **tasks: str
    ) -> httpx.Response:
        source = {"url": url, **tasks}
        spec = {"tasks": source, "handler": "math", "agent": {"type": "oracle"}, "suspend": True}
        manifest = job_manifest(name, spec, namespace=namespace)
        return self.http.post("/v1/rolloutjobs", json=manifest)

    def refused(self, url: str, namespace: str = "default") -> str:
        """Submit what must not be read, and return the answer's text."""
        answer = self.submit(url, namespace=namespace)
        assert (answer.status_code, answer.json()["reason"]) == (422, "TasksNotAllowed"), answer.text
        assert SECRET not in answer.text
        return answer.text

    def upload(self, data: bytes, namespace: str = "default") -> str:
        digest = hashlib.sha256(data).hexdigest()
        answer = self.http.put(f"/v1/blobs/{digest}", params={"namespace": namespace}, content=data)
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["url"])

    def megabytes(self) -> float:
        """Return the largest resident memory so far, in megabytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024

    @property
    def tokens(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.state / "tokens.json").read_text())
        return found


@contextmanager
def a_plane(state: Path, *options: str) -> Iterator[Plane]:
    state.mkdir()
    port_file = state / "port"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(state), "--port", "0"]
    command += ["--port-file", str(port_file), *options]
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + LIMIT
        while not port_file.exists():
            assert process.poll() is None, (state / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        token = json.loads((state / "tokens.json").read_text())["admin"]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port_file.read_text().strip()}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=LIMIT,
            trust_env=False,
        ) as http:
            yield Plane(http, state, process.pid)
    finally:
        process.kill()
        process.wait(patience(30))


class Web(ThreadingHTTPServer):
    """A web server on loopback, which counts by path what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), Answers)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Answers(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        kind = re.split("[/?]", self.path)[1]
        if kind == "hang":
            self.server.released.wait(LIMIT)
        elif kind == "to":
            self.send_response(302)
            self.send_header("Location", "/" + self.path.split("/", 2)[2])
            self.end_headers()
        elif kind == "away":
            self.send_response(302)
            self.send_header("Location", self.path.split("?", 1)[1])
            self.end_headers()
        elif kind == "garbage":
            self.wfile.write(f"{SECRET}\r\n\r\n".encode())
        elif kind == "error":
            self.send_error(500, SECRET, SECRET)
        else:
            body = gzip.compress(TASK) if kind == "packed" else SECRET.encode() if kind == "text" else TASK
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join(patience(30))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Yield a control plane with its default settings."""
    with a_plane(tmp_path_factory.mktemp("closed") / "state") as plane:
        yield plane


@dataclass(frozen=True)
class Open:
    """A control plane that allows a folder, a folder of each namespace, and one web server."""

    plane: Plane
    folder: Path
    """The folder that is allowed."""
    outside: Path
    """A folder beside the allowed one."""
    teams: Path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, web: Web) -> Iterator[Open]:
    base = tmp_path_factory.mktemp("opened")
    for name in ("data", "outside", "teams/team-a", "teams/team-b", "linked-to"):
        (base / name).mkdir(parents=True)
    (base / "data/tasks.jsonl").write_bytes(TASK)
    (base / "outside/tasks.jsonl").write_bytes(TASK)
    (base / "outside/secret.txt").write_text(SECRET)
    for team in ("team-a", "team-b"):
        (base / "teams" / team / "tasks.jsonl").write_bytes(TASK)
    (base / "linked-to/tasks.jsonl").write_bytes(TASK)
    (base / "link").symlink_to(base / "linked-to")
    options = (
        f"--allow-tasks-from=file://{base}/data",
        f"--allow-tasks-from=file://{base}/teams/{{namespace}}/",
        f"--allow-tasks-from=file://{base}/link",
        f"--allow-tasks-from=file://{base}/state",
        f"--allow-tasks-from=http://127.0.0.1:{web.port}/",
        f"--allow-tasks-from=http://localhost:{web.port}/",
        f"--max-task-bytes={64 << 20}",
    )
    with a_plane(base / "state", *options) as plane:
        yield Open(plane, base / "data", base / "outside", base / "teams")


REFUSED = [
    "file:///etc/passwd",
    "/etc/passwd",
    "FILE:///etc/passwd",
    "file://localhost/etc/passwd",
    "local:///etc/passwd",
    "/proc/self/environ",
    "simplecache::file:///etc/passwd",
    "filecache::local:///etc/passwd",
    "zip://tasks.jsonl::file:///etc/passwd",
    "tar://x::http://127.0.0.1/x",
    "data:application/json,%7B%7D",
    "data://,x",
    "memory://x",
    "dask://worker/etc/passwd",
    "ftp://127.0.0.1/x",
    "sftp://127.0.0.1/x",
    "github://org:repo@main/x",
    "git://x/y",
    "hf://datasets/x/y",
    "reference://x",
    "jlab://x",
    "s3://bucket/key",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://2852039166/",
    "http://[::ffff:169.254.169.254]/",
    "https://example.org/tasks.jsonl",
    "http://example.org@127.0.0.1/",
]


@pytest.mark.attack(
    "it names the control plane's files, an internal or metadata address, or a chained or odd scheme",
    stopped_by="uploads only, unless the installer lists a prefix",
)
@pytest.mark.parametrize("url", REFUSED)
def test_a_server_reads_uploads_only(closed: Plane, url: str) -> None:
    assert "uploads" in closed.refused(url)


@pytest.mark.attack(
    "a job that is applied, and so comes through the driver's registration, names such a place",
    stopped_by="the installer's list holds here, too; the job is `Admitted=False`",
)
def test_a_driver_registers_uploads_only(closed: Plane) -> None:
    """What an author applies comes to the control plane through the driver's registration."""
    driver = {"Authorization": f"Bearer {closed.tokens['driver']}"}
    for number, url in enumerate(("file:///etc/passwd", "http://169.254.169.254/latest/meta-data/")):
        manifest = job_manifest(
            f"applied-{number}",
            {"tasks": {"url": url}, "handler": "math", "agent": {"type": "oracle"}},
            annotations={"rollyard.dev/object-uid": "u"},
        )
        path = f"/v1/rolloutjobs/applied-{number}"
        answer = closed.http.put(path, json={"manifest": manifest}, headers=driver)
        assert (answer.status_code, answer.json()["reason"]) == (422, "TasksNotAllowed"), answer.text
        assert closed.http.get(path).status_code == 404


@pytest.mark.attack(
    "it names tokens, the database or others' trajectories",
    stopped_by="the state folder is never read, whatever is listed",
)
def test_the_installations_tokens_and_others_results(closed: Plane, opened: Open) -> None:
    for plane in (closed, opened.plane):
        for name in (
            "tokens.json",
            "rollyard.db",
            "trajectories/default/job-0/part-000001.ndjson",
            "missing",
        ):
            text = plane.refused((plane.state / name).as_uri())
            assert not any(token in text for token in plane.tokens.values())


@pytest.mark.attack(
    "the checks keep out what the installer lists",
    stopped_by="folders, their links, web servers and redirects of the list are read",
)
def test_what_is_allowed_is_read(opened: Open, web: Web) -> None:
    names = [
        (opened.folder / "tasks.jsonl").as_uri(),
        str(opened.folder / "tasks.jsonl"),
        f"{opened.folder.parent}/link/tasks.jsonl",
        f"http://127.0.0.1:{web.port}/tasks.jsonl",
        f"http://127.0.0.1:{web.port}/packed",
        f"http://127.0.0.1:{web.port}/to/tasks.jsonl",
    ]
    for number, url in enumerate(names):
        answer = opened.plane.submit(url, name=f"good-{number}")
        assert answer.status_code == 201, answer.text
        assert answer.json()["status"]["counts"]["total"] == 1


@pytest.mark.attack("it names another tenant's folder", stopped_by="`{namespace}` in a listed prefix")
def test_another_tenants_folder(opened: Open) -> None:
    mine, others = (opened.teams / team / "tasks.jsonl" for team in ("team-a", "team-b"))
    assert opened.plane.submit(mine.as_uri(), name="own", namespace="team-a").status_code == 201
    opened.plane.refused(others.as_uri(), namespace="team-a")
    opened.plane.refused(mine.as_uri(), namespace="default")
    link = opened.teams / "team-a" / "theirs.jsonl"
    link.symlink_to(others)
    opened.plane.refused(link.as_uri(), namespace="team-a")


@pytest.mark.attack(
    "links, `..` and encoded dots lead out of a listed folder",
    stopped_by="the opened file is judged by the path that the kernel has for it",
)
def test_ways_out_of_an_allowed_folder(opened: Open) -> None:
    folder, outside = opened.folder, opened.outside
    for name, target in (
        ("to-file", outside / "tasks.jsonl"),
        ("to-folder", outside),
        ("to-nothing", outside / "missing"),
        ("relative", Path("../outside/tasks.jsonl")),
    ):
        (folder / name).symlink_to(target)
    ways = ["to-file", "to-folder/tasks.jsonl", "to-nothing", "to-folder/missing", "relative"]
    ways += ["../outside/tasks.jsonl", "%2e%2e/outside/tasks.jsonl", "./../outside/tasks.jsonl"]
    for way in ways:
        opened.plane.refused(f"file://{folder}/{way}")
    opened.plane.refused(f"file://{folder}-not/tasks.jsonl")
    opened.plane.refused(f"file://{folder.parent}")


@pytest.mark.attack(
    "a pipe, socket or folder holds the reader up", stopped_by="only regular files are opened"
)
def test_a_file_that_is_none(opened: Open) -> None:
    os.mkfifo(opened.folder / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(opened.folder / "socket"))
        for name in ("pipe", "socket", ""):
            answer = opened.plane.submit(f"file://{opened.folder}/{name}")
            assert answer.status_code == 422
            assert "not a regular file" in answer.text


@pytest.mark.attack(
    "a link is swapped between the check and the opening",
    stopped_by="the file is held before it is checked, and that one is read",
)
def test_a_link_swapped_while_it_is_read(opened: Open) -> None:
    """The link points to an allowed file when it is checked, and elsewhere a moment later."""
    link, stop = opened.folder / "swapped.jsonl", threading.Event()
    good, bad = opened.folder / "tasks.jsonl", opened.outside / "secret.txt"

    def swap() -> None:
        count = 0
        while not stop.is_set():
            scratch = opened.folder / ".swap"
            scratch.symlink_to((good, bad)[count % 2])
            scratch.replace(link)
            count += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        reasons = []
        for number in range(100):
            answer = opened.plane.submit(link.as_uri(), name=f"swap-{number}")
            assert SECRET not in answer.text
            reasons.append(answer.json().get("reason", "read"))
        # "not valid JSON" would say that the file outside was read.
        assert set(reasons) <= {"read", "TasksNotAllowed"}
    finally:
        stop.set()
        thread.join(patience(30))


@pytest.mark.attack(
    "an error shows what a file or an answer holds",
    stopped_by="errors name line and field of a listed source, and nothing else",
)
def test_answers_are_not_shown(opened: Open, web: Web) -> None:
    (opened.folder / "text").write_text(f'{SECRET}\n{{"{SECRET}": 1}}\n{{"id": "{SECRET}", "prompt": 5}}\n')
    keyed = {"id": "a", "prompt": "x", "sandbox": {"env": {SECRET: 5}}}
    twice = {"id": SECRET, "prompt": "x"}
    (opened.folder / "keys").write_text("\n".join(json.dumps(line) for line in (keyed, twice, twice)))
    base = f"http://127.0.0.1:{web.port}"
    for url in (
        (opened.folder / "text").as_uri(),
        (opened.folder / "keys").as_uri(),
        f"{base}/text",
        f"{base}/garbage",
        f"{base}/error",
    ):
        answer = opened.plane.submit(url)
        assert answer.status_code == 422
        assert SECRET not in answer.text
    lines = opened.plane.submit((opened.folder / "text").as_uri()).json()["errors"]
    assert any("line 1: not valid JSON" in line for line in lines)
    assert any("line 3: prompt: must be a string" in line for line in lines)


@pytest.mark.attack(
    "a listed name leads to loopback or a private address; other spellings of a host; credentials",
    stopped_by="hosts are compared as text, and every address is checked before it is connected to",
)
def test_addresses_that_names_lead_to(opened: Open, web: Web) -> None:
    """`localhost` is on the list by name, but no network that it is in."""
    before = len(web.asked)
    text = opened.plane.refused(f"http://localhost:{web.port}/tasks.jsonl")
    assert "neither public nor in the installer's networks" in text
    base = f"127.0.0.1:{web.port}"
    for way in (
        f"http://2130706433:{web.port}/x",
        f"http://0177.0.0.1:{web.port}/x",
        f"http://0x7f.1:{web.port}/x",
        f"http://127.1:{web.port}/x",
        f"http://0.0.0.0:{web.port}/x",
        f"http://[::1]:{web.port}/x",
        f"http://[::ffff:127.0.0.1]:{web.port}/x",
        f"http://user@{base}/x",
        f"http://user:password@{base}/x",
        f"http://{base}/a/../x",
        f"http://{base}/a/%2e%2e/x",
        f"http://{base}\\@example.org/x",
        f"https://{base}/x",
        "http://127.0.0.1:1/x",
    ):
        opened.plane.refused(way)
    assert len(web.asked) == before, "nothing was connected to"


@pytest.mark.attack(
    "a redirect leads elsewhere", stopped_by="each target is checked as if the job had named it"
)
def test_redirects_are_held_against_the_list(opened: Open, web: Web) -> None:
    base = f"http://127.0.0.1:{web.port}"
    for target in (
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:1/x",
        f"http://localhost:{web.port}/tasks.jsonl",
        f"file://{opened.folder}/tasks.jsonl",
        "//example.org/x",
    ):
        opened.plane.refused(f"{base}/away?{target}")
    endless = opened.plane.submit(f"{base}/away?{base}/away?/away?/away?/away?/away?/away?/away?/x")
    assert endless.status_code == 422
    assert "redirects more than" in endless.text


@pytest.mark.attack(
    "twenty submits to a server that hangs",
    stopped_by="two at once for a namespace, then 429; threads of their own",
)
def test_twenty_submits_to_a_server_that_hangs(opened: Open, web: Web) -> None:
    with ThreadPoolExecutor(20) as pool:
        hanging = [
            pool.submit(opened.plane.submit, f"http://127.0.0.1:{web.port}/hang", f"hang-{number}")
            for number in range(20)
        ]
        try:
            until(
                lambda: not (sum(future.done() for future in hanging) < 18 or web.asked.count("/hang") < 2),
                LIMIT,
            )
            done = [future.result() for future in hanging if future.done()]
            assert {answer.status_code for answer in done} == {429}
            assert all(int(answer.headers["Retry-After"]) > 0 for answer in done)
            # Other tenants, and uploads of the same one, continue.
            mine = opened.plane.upload(TASK)
            assert opened.plane.submit(mine, name="beside").status_code == 201
            file = (opened.teams / "team-b/tasks.jsonl").as_uri()
            assert opened.plane.submit(file, name="beside", namespace="team-b").status_code == 201
            assert opened.plane.http.get("/v1/rolloutjobs").status_code == 200
            assert opened.plane.http.get("/readyz").status_code == 200
        finally:
            web.released.set()


def packed_tasks(megabytes: int) -> bytes:
    """Return tasks of a megabyte each, in a file of about a thousandth of that size."""
    line = '{"id": "%d", "prompt": "' + "a" * (1 << 20) + '"}\n'
    return b"".join(gzip.compress((line % number).encode(), 1) for number in range(megabytes))


@pytest.mark.attack(
    "a small file unpacks to gigabytes, one endless line, item or cell, or a million blank lines",
    surface="task files",
    stopped_by="bounds on bytes, rows and time while it is unpacked; nothing is kept of a row that is too "
    "long",
)
@pytest.mark.attack(
    "a row of few bytes becomes many values, fields or columns, or lists without end in each other",
    surface="task files",
    stopped_by="values are counted before anything is built of a row; so are faults before they are "
    "described",
)
def test_bombs_stop_at_their_bounds(opened: Open) -> None:
    bombs = {
        "tasks": (packed_tasks(160), "holds more than"),
        "one-line": (gzip.compress(b"{" + bytes(160 << 20), 1), "bytes of text"),
        "blank": (bz2.compress(b"\n" * (2 << 20), 1), "blank lines"),
        "nested": (gzip.compress(b'{"a":' * (1 << 19) + b"\n"), "not valid JSON"),
        "nested-list": (gzip.compress(b"[" * (7 << 20) + b"\n"), "the list does not end"),
        "one-item": (gzip.compress(b'[{"id": "' + b"a" * (160 << 20), 1), "bytes of text"),
        "one-cell": (gzip.compress(b'id,prompt\na,"' + b"a\n" * (80 << 20), 1), "bytes of text"),
        "values": (gzip.compress(b'{"metadata": [' + b"{}," * (8 << 20) + b"{}]}"), "1000000 values"),
        "fields": (
            gzip.compress(b"{%b}" % b",".join(b'"%x":0' % i for i in range(200_000))),
            "200001 faults",
        ),
        "columns": (gzip.compress(b",".join(b"c%x" % i for i in range(2000)) + b"\n"), "1024 are allowed"),
        "many-columns": (
            gzip.compress(b",".join(b"%x" % i for i in range(500_000)) + b"\n"),
            "not valid JSON",
        ),
        "cut": (gzip.compress(TASK)[:-9], "damaged"),
        "memory": (
            lzma.compress(TASK, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 512 << 20}]),
            "damaged",
        ),
    }
    # The server's own code is loaded before, so the figures below show only the attack.
    assert opened.plane.submit((opened.folder / "tasks.jsonl").as_uri(), name="first").status_code == 201
    before = opened.plane.megabytes()
    for place, (name, (data, why)) in enumerate(bombs.items()):
        assert len(data) < 2 << 20
        (opened.folder / name).write_bytes(data)
        url = (opened.folder / name).as_uri() if place % 2 else opened.plane.upload(data)
        answer = opened.plane.submit(url, name=f"bomb-{name}")
        assert answer.status_code == 422, answer.text
        assert why in answer.text
    grown = opened.plane.megabytes() - before
    assert grown < ROWS_MEGABYTES, f"{grown:.0f} MiB"


@pytest.mark.attack(
    "rows of 60 MiB use up the memory of the control plane",
    surface="task files",
    stopped_by="one row is in memory at a time, and tasks wait in a temporary file",
)
def test_rows_of_60_mebibytes(closed: Plane) -> None:
    """A row becomes a task of this size, or one that has little of it."""
    assert closed.submit(closed.upload(TASK), name="small").status_code == 201
    before = closed.megabytes()
    cases = [{"input": "7 " * (8 << 20), "output": "1"}] * 3
    rows = [
        {"id": "a", "prompt": "≤ 😀", "tests": {"cases": cases}, "metadata": {"x": "8" * (7 << 20)}},
        {"id": "b", "prompt": "?", "x": "y" * (60 << 20)},
    ]
    line, dropped = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    answer = closed.submit(closed.upload(gzip.compress(line, 1)), name="large")
    assert answer.status_code == 201, answer.text
    mixed = [line, dropped, b'{"id": "c"}\n']
    for data in (b"".join(mixed), b"[%b]" % b",".join(mixed)):
        answer = closed.submit(closed.upload(gzip.compress(data, 1)), name="mixed")
        assert answer.status_code == 422
        assert re.search(r"(line|item) 2: x: unknown field", answer.text)
    grown = closed.megabytes() - before
    assert grown < ROWS_MEGABYTES, f"{grown:.0f} MiB"


@pytest.mark.attack(
    "a file of nothing but bad rows, or of huge ones, fills memory, the database or answers",
    surface="`tasks.onBadRow: skip`",
    stopped_by="ten reasons of 256 characters are kept, and rows that are skipped count as rows of the file",
)
def test_bad_rows_without_end_that_are_skipped(opened: Open) -> None:
    """What is kept of a row that is no task is bounded, whatever it holds, and so is the number of rows."""
    assert opened.plane.submit((opened.folder / "tasks.jsonl").as_uri(), name="warm").status_code == 201
    before = opened.plane.megabytes()
    wrong = b'{"id": "a b", "%s": 1}\n' % (b"x" * 3_000)
    data = gzip.compress(TASK + wrong * 10_000, 1)
    answer = opened.plane.submit(opened.plane.upload(data), name="bad", onBadRow="skip")
    assert answer.status_code == 201, answer.text
    skipped = answer.json()["status"]["skippedRows"]
    assert (skipped["count"], skipped["read"]) == (10_000, 10_001)
    assert len(skipped["reasons"]) == 10
    assert len(answer.content) < 8_000
    endless = gzip.compress(TASK + wrong * 25_000, 1)
    answer = opened.plane.submit(opened.plane.upload(endless), name="endless", onBadRow="skip")
    assert answer.status_code == 422, answer.text
    assert "bytes of text" in answer.text
    grown = opened.plane.megabytes() - before
    assert grown < 30, f"{grown:.0f} MiB"


@pytest.mark.attack(
    "the reasons, which stay with the job, show what a listed source holds",
    surface="`status.skippedRows`",
    stopped_by="they name number and field of such a source, and nothing else",
)
def test_skipped_rows_of_a_file_that_may_not_be_shown(opened: Open) -> None:
    """Nothing of the rows that are no tasks is in the reasons, which stay with the job."""
    rows = [SECRET, json.dumps([SECRET]), json.dumps({"id": "b", "prompt": "?", SECRET: 1})]
    rows += [json.dumps({"id": SECRET, "prompt": 5}), json.dumps({"id": f"{SECRET} x", "prompt": "?"})]
    (opened.folder / "mixed").write_bytes(TASK + "\n".join(rows).encode())
    answer = opened.plane.submit((opened.folder / "mixed").as_uri(), name="mixed", onBadRow="skip")
    assert answer.status_code == 201, answer.text
    assert answer.json()["status"]["skippedRows"]["count"] == len(rows)
    for path in ("/v1/rolloutjobs/mixed", "/v1/rolloutjobs"):
        assert SECRET not in opened.plane.http.get(path).text
    others = opened.plane.submit((opened.outside / "secret.txt").as_uri(), name="out", onBadRow="skip")
    assert (others.status_code, others.json()["reason"]) == (422, "TasksNotAllowed")


@pytest.mark.attack(
    "a row moves the cursor of a terminal, forges a line, or is markup in the page",
    surface="`status.skippedRows`",
    stopped_by="every reason is one line of visible characters",
)
def test_skipped_rows_on_a_terminal(
    closed: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that show the reasons move no cursor and begin no line that a row has chosen."""
    hostile = "\x1b[2J\x1b]0;x\x07\r\nrollyard: done\u2028\u202e\u200b"
    bad = json.dumps({"id": "b", "prompt": "?", hostile: 1}).encode()
    (tmp_path / "tasks.jsonl").write_bytes(TASK + bad)
    tasks = {"url": "tasks.jsonl", "onBadRow": "skip"}
    spec = {"tasks": tasks, "handler": "math", "agent": {"type": "oracle"}, "suspend": True}
    meta = {"name": "shown"}
    path = tmp_path / "job.json"
    manifest = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": meta, "spec": spec}
    path.write_text(json.dumps(manifest))
    monkeypatch.setenv("ROLLYARD_URL", str(closed.http.base_url))
    monkeypatch.setenv("ROLLYARD_TOKEN", closed.tokens["admin"])
    for command in (["validate", "-f", str(path)], ["submit", "-f", str(path)], ["describe", "shown"]):
        assert main(command) == 0
        said = capsys.readouterr()
        lines = (said.out + said.err).split("\n")
        assert all(line.isprintable() for line in lines)
        assert sum("1 of 2 rows of the task list are skipped:" in line for line in lines) == 1
        assert sum("line 2: \\x1b[2J\\x1b]0;x\\x07\\r\\nrollyard: done\\u2028" in line for line in lines) == 1
        assert not any(line.startswith("rollyard: done") for line in lines)


@pytest.mark.attack(
    "an upload of another namespace is used, or looked for",
    surface="`/v1/blobs`",
    stopped_by="uploads are found by namespace and hash; the answer is that for an unknown one",
)
def test_an_upload_of_another_namespace(closed: Plane) -> None:
    url = closed.upload(TASK, namespace="team-a")
    unknown = f"blob:sha256:{'0' * 64}"
    answers = [closed.submit(one, namespace="team-b") for one in (url, unknown)]
    assert [(a.status_code, a.json()["reason"]) for a in answers] == [(422, "BlobNotFound")] * 2
    assert answers[0].text.replace(url.removeprefix("blob:"), "") == answers[1].text.replace(
        unknown.removeprefix("blob:"), ""
    )
    for given in (url, unknown):
        path = f"/v1/blobs/{given.removeprefix('blob:sha256:')}"
        assert closed.http.head(path, params={"namespace": "team-b"}).status_code == 404
    assert closed.submit(url, namespace="team-a").status_code == 201


@pytest.mark.attack(
    "other bytes are stored under a hash",
    surface="`/v1/blobs`",
    stopped_by="the hash is verified before anybody sees the upload",
)
def test_an_upload_under_anothers_hash(closed: Plane) -> None:
    """A tenant who could store other bytes under a hash would change the tasks of those who trust it."""
    digest = hashlib.sha256(b"the real file").hexdigest()
    answer = closed.http.put(f"/v1/blobs/{digest}", content=b"another")
    assert (answer.status_code, answer.json()["reason"]) == (422, "BlobHashMismatch")
    assert closed.http.head(f"/v1/blobs/{digest}").status_code == 404


@pytest.mark.attack(
    "a body without end, or larger than allowed",
    surface="`/v1/blobs`",
    stopped_by="it is counted as it comes, and the connection of a refused one is closed",
)
def test_uploads_without_end(tmp_path: Path) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield os.urandom(1 << 16)

    with a_plane(tmp_path / "state", f"--max-blob-bytes={4 << 20}") as plane:
        before = plane.megabytes()
        for number in range(2):
            try:
                answer = plane.http.put(f"/v1/blobs/{number:064x}", content=endless())
                assert (answer.status_code, answer.json()["reason"]) == (413, "BodyTooLarge")
            except httpx.TransportError:
                pass  # The server closed the connection while the body was still being sent.
        assert plane.http.put("/v1/blobs/x", content=b"x").status_code == 422
        assert plane.submit(plane.upload(TASK)).status_code == 201
        assert plane.megabytes() - before < 60


@pytest.mark.attack("a worker or driver uploads", surface="`/v1/blobs`", stopped_by="uploads are the admin's")
def test_who_may_not_upload(closed: Plane) -> None:
    path = f"/v1/blobs/{hashlib.sha256(TASK).hexdigest()}"
    for role, token in closed.tokens.items():
        if role != "admin":
            answer = closed.http.put(path, content=TASK, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 403, role
