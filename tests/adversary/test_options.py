"""Options in files and variables: who may write and read a file, hostile files, and where passwords go."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.declared import ControlPlaneOptions, PlaneOptions, document
from rollyard_api.options.sources import MAX_FILE_BYTES, load
from rollyard_api.settings import Settings
from rollyard_drivers.host.control_plane import ControlPlaneProcess, ControlPlaneSettings
from rollyard_drivers.host.errors import StartFailed
from rollyard_drivers.host.home import Home
from rollyard_testing.pace import patience

PASSWORD = "hunter-2-is-secret"
URL = f"postgresql+psycopg://me:{PASSWORD}@127.0.0.1:1/none"
SOMEBODY = 12345

pytestmark = pytest.mark.attack(boundary="control plane", surface="options")

WRITERS = pytest.mark.attack(
    "another user can write or owns the file of `--config`, and chooses programs of the control plane",
    stopped_by="it must be the caller's own or root's, and nobody else may write it",
)
READERS = pytest.mark.attack(
    "others read a password in a file",
    stopped_by="such a file is refused unless it is private; the group of a file of root may read it",
)
PASSWORDS = pytest.mark.attack(
    "others read a password in a command line, a message, a log or the environment of a process",
    stopped_by="URLs with a password are refused on command lines and never quoted; no child inherits "
    "the variables; a driver writes a private file",
)
HOSTILE = pytest.mark.attack(
    "the file is a pipe, a device, huge, or YAML that grows or makes objects",
    stopped_by="regular files of at most 1 MiB; no aliases and no objects",
)


def read(file: Path | None = None, **given: Any) -> ControlPlaneOptions:
    return load(ControlPlaneOptions, {"state_dir": Path("s"), **given}, file, "rollyard control-plane")


def written(folder: Path, text: str, mode: int) -> Path:
    file = folder / "options.yaml"
    file.write_text(text)
    file.chmod(mode)
    return file


@WRITERS
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666], ids=oct)
def test_a_file_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match=r"other users can write it .*chmod go-w"):
        read(written(tmp_path, "verify-python: /tmp/theirs", mode))
    assert read(written(tmp_path, "verify-python: /tmp/mine", 0o644)).verify_python == "/tmp/mine"


@WRITERS
def test_a_file_of_another_user_is_refused(tmp_path: Path, missing: Any) -> None:
    if os.geteuid() != 0:
        missing("only root gives files to other users")
    file = written(tmp_path, "verify-python: /tmp/theirs", 0o644)
    os.chown(file, SOMEBODY, SOMEBODY)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(OptionInvalid, match=f"belongs to user {SOMEBODY}"):
            read(path)


@READERS
@pytest.mark.parametrize("key", ["db", "trajectories"])
@pytest.mark.parametrize(
    "url", [URL, "s3://bucket/x?secret=" + PASSWORD, "ftp://u:" + PASSWORD + "@h/x", "http://[" + PASSWORD]
)
def test_a_password_that_others_can_read_is_refused_and_not_quoted(
    key: str, url: str, tmp_path: Path
) -> None:
    text = json.dumps({key: url})
    with pytest.raises(OptionInvalid, match=r"other users can read the file .*chmod 600") as raised:
        read(written(tmp_path, text, 0o604))
    assert PASSWORD not in str(raised.value)
    assert getattr(read(written(tmp_path, text, 0o600)), key) == url


@READERS
def test_the_group_reads_the_passwords_of_no_users_file(tmp_path: Path, missing: Any) -> None:
    """A mounted Secret is root's, and its group may read it; a user's file has no such reason."""
    if os.geteuid() != 0:
        missing("only root takes the place of another user")
    folder = tmp_path / "users"
    folder.mkdir()
    file = written(folder, json.dumps({"db": URL}), 0o640)
    assert read(file).db == URL
    os.chown(file, SOMEBODY, SOMEBODY)
    for parent in (folder, *folder.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(SOMEBODY)
    try:
        with pytest.raises(OptionInvalid, match="other users can read the file"):
            read(file)
    finally:
        os.seteuid(0)


@PASSWORDS
@pytest.mark.parametrize("key", ["db", "trajectories"])
def test_a_password_on_a_command_line_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(
        OptionInvalid, match=f"--{key}: has a password, and every user .*CONTROL_PLANE_"
    ) as raised:
        read(**{key: URL})
    assert PASSWORD not in str(raised.value)
    assert read(db="postgresql+psycopg://me@db.example.org/x?sslmode=require").db


@PASSWORDS
def test_no_message_and_no_form_of_the_settings_shows_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLYARD_CONTROL_PLANE_DB", URL)
    options = read()
    assert options.db == URL
    assert PASSWORD not in f"{options!r} {options}"
    settings = Settings(state_dir=tmp_path, db=URL)
    assert PASSWORD not in f"{settings!r} {settings}"
    for text in (
        f"db: [{PASSWORD}]",
        f"trajectories: {{a: {PASSWORD}}}",
        f"db: {{{PASSWORD}: 1}}",
        f"db: '{URL}",
        f"db: {URL}: {URL}",
    ):
        monkeypatch.delenv("ROLLYARD_CONTROL_PLANE_DB", raising=False)
        with pytest.raises(OptionInvalid) as raised:
            read(written(tmp_path, text, 0o600))
        assert PASSWORD not in str(raised.value)
        assert raised.value.__suppress_context__


@HOSTILE
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    began = time.monotonic()
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OptionInvalid, match=f"--config {path}: is not a file"):
            read(path)
    assert time.monotonic() - began < patience(5)


@HOSTILE
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("#" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
        ("a: &a [x, x]\nb: [*a, *a]\n", "the alias"),
        ("db: !!python/object/apply:os.system [id]\n", "is not YAML that is accepted"),
        ("[" * 500, "is not YAML that is accepted"),
        ("\0", "is not YAML that is accepted"),
    ],
    ids=["large", "aliases", "objects", "deep", "zero"],
)
def test_a_hostile_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="(?s)" + problem):
        read(written(tmp_path, text, 0o600))


class Starts:
    """What the control plane is started with. The process is not started."""

    def __init__(self) -> None:
        self.arguments: list[str] = []

    async def start(self, program: str, name: str, arguments: list[str], **more: Any) -> Any:
        """Note the arguments."""
        self.arguments = arguments
        raise OSError("not started")


@PASSWORDS
async def test_a_driver_gives_its_control_plane_passwords_by_a_private_file(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.make()
    home.state.chmod(0o755)
    starts = Starts()
    settings = ControlPlaneSettings("127.0.0.1", 0, document(PlaneOptions(db=URL)))
    async with httpx.AsyncClient(trust_env=False) as http:
        plane = ControlPlaneProcess(home, settings, http, starts)  # type: ignore[arg-type]
        with pytest.raises(StartFailed):
            await plane.start()
    assert PASSWORD not in " ".join(starts.arguments)
    file = Path(starts.arguments[starts.arguments.index("--config") + 1])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["db"] == URL


@PASSWORDS
def test_no_program_that_is_started_inherits_a_password(tmp_path: Path) -> None:
    """`rollyard up` reads it from a variable; no argument, variable or log of its processes has it."""
    home = tmp_path / "h"
    mark = f"{tmp_path}/mark"
    trajectories = f"file://{tmp_path}/t?token={PASSWORD}"
    command = [sys.executable, "-m", "rollyard", "up", "--home", str(home), "--port", "0"]
    command += ["--sandbox", "process", "--replicas", "0"]
    env = {**os.environ, "ROLLYARD_CONTROL_PLANE_TRAJECTORIES": trajectories, "ROLLYARD_TEST_MARK": mark}
    with (tmp_path / "log").open("wb") as log:
        up = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + patience(120)
        while not (home / "context.json").exists():
            assert up.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = [pid for pid in processes(mark.encode()) if pid != up.pid]
        assert children
        for pid in children:
            assert PASSWORD.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        for pid in (up.pid, *children):
            assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        given = json.loads((home / "state" / "control-plane.json").read_text())
        assert given["trajectories"] == trajectories
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(patience(60))
    logs = [tmp_path / "log", *(home / "logs").iterdir()]
    assert [file for file in logs if PASSWORD in file.read_text()] == []


def processes(mark: bytes) -> list[int]:
    """Return the processes with a mark in their environment."""
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                marked.append(int(folder.name))
        except OSError:
            continue
    return marked


@PASSWORDS
def test_a_database_that_does_not_answer_is_reported_without_its_password(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollyard", "control-plane", "--state-dir", str(tmp_path), "--port", "0"]
    env = {**os.environ, "ROLLYARD_CONTROL_PLANE_DB": URL}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(90))
    assert ended.returncode == 2
    assert "the control plane cannot start" in ended.stderr
    assert PASSWORD not in ended.stdout + ended.stderr
