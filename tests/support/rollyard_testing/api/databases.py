"""Databases for tests: a private PostgreSQL, and databases that are empty or have all tables."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa
from rollyard_api.storage.database import Database, upgrade

from rollyard_testing.pace import patience

POSTGRES_BIN = max(
    Path("/usr/lib/postgresql").glob("[0-9]*/bin"),
    key=lambda folder: int(folder.parent.name),
    default=Path("/usr/lib/postgresql/bin"),
)
"""The folder of Debian's newest installed version."""
START_SECONDS = patience(90.0)


def _as_postgres() -> dict[str, Any]:
    # initdb and postgres refuse to run as root.
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str], NoReturn]) -> Iterator[str]:
    """Yield the URL prefix of a private PostgreSQL cluster, to which a database's name is appended."""
    if not (POSTGRES_BIN / "initdb").exists():
        missing(f"PostgreSQL is not installed ({POSTGRES_BIN})")
    # A Unix socket's path is bounded (107 bytes), and pytest's temporary folders are long.
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30
    base = Path(tempfile.mkdtemp(prefix="ry-pg-", dir=memory if roomy else "/tmp"))
    base.chmod(0o777)
    data = base / "data"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    initdb = [str(POSTGRES_BIN / "initdb"), "-D", str(data), "-U", "rollyard", "-A", "trust", "--no-sync"]
    subprocess.run(initdb, check=True, capture_output=True, cwd=base, **_as_postgres())
    options = [
        "-c",
        "fsync=off",
        "-c",
        f"unix_socket_directories={base}",
        "-c",
        "listen_addresses=",
        "-c",
        f"port={port}",
    ]
    command = [str(POSTGRES_BIN / "postgres"), "-D", str(data), *options]
    with (base / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=base, **_as_postgres())
    try:
        _until_ready(base, port, process)
        yield f"postgresql+psycopg://rollyard@/{{name}}?host={base}&port={port}"
    finally:
        # It is stopped at once, without a last checkpoint, because the cluster is thrown away.
        process.send_signal(signal.SIGQUIT)
        process.wait(patience(40))
        shutil.rmtree(base)


def _until_ready(base: Path, port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    command = [str(POSTGRES_BIN / "pg_isready"), "-q", "-h", str(base), "-p", str(port)]
    while subprocess.run(command).returncode != 0:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"PostgreSQL did not start: {(base / 'log').read_text()[-2000:]}")
        time.sleep(0.05)


def _create(prefix: str, *clauses: str) -> str:
    """Create a PostgreSQL database, and return its name."""
    name = f"t{os.urandom(6).hex()}"
    engine = sa.create_engine(prefix.format(name="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        conn.execute(sa.text(" ".join((f"CREATE DATABASE {name}", *clauses))))
    engine.dispose()
    return name


def _migrated(url: str) -> None:
    """Create all tables in an empty database, as a control plane does when it starts."""

    async def make() -> None:
        database = Database(url)
        try:
            await asyncio.to_thread(upgrade, database.writer)
        finally:
            await database.close()

    # The thread has no event loop of a test.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, make()).result(START_SECONDS)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite database with all tables, which is copied because that is faster."""
    path: Path = tmp_path_factory.mktemp("migrated") / "rollyard.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres: str) -> str:
    """Return the name of a PostgreSQL database with all tables, which serves as a template."""
    name = _create(postgres)
    _migrated(postgres.format(name=name))
    return name


@pytest.fixture
def fresh_postgres(postgres: str) -> str:
    """Return the URL of an empty PostgreSQL database."""
    return postgres.format(name=_create(postgres))


def migrated_database(request: pytest.FixtureRequest, kind: str, folder: Path) -> str:
    """Return the URL of a new database with all tables; an SQLite database is `rollyard.db` in the folder."""
    if kind == "sqlite":
        path = folder / "rollyard.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), path)
        return f"sqlite:///{path}"
    prefix: str = request.getfixturevalue("postgres")
    template: str = request.getfixturevalue("migrated_postgres")
    return prefix.format(name=_create(prefix, f"TEMPLATE {template}"))
