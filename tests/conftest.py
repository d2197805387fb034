"""Fixtures that every folder of tests shares: real components exist, or their absence is reported."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from hypothesis import HealthCheck, settings

if importlib.util.find_spec("rollyard_testing") is None:
    raise pytest.UsageError(
        "rollyard_testing is not on the path: the installation is older than this checkout. "
        "Run `make setup`, or `python -m pip install --no-deps -e .` in the virtual environment."
    )
pytest.register_assert_rewrite("rollyard_testing")
pytest_plugins = ["rollyard_testing.levels"]

# A machine that stands still for a moment makes no example wrong: pytest's limit bounds a test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

Missing = Callable[[str], NoReturn]


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Let HTTP clients of the tests share the default TLS context.

    Thousands of them are made, most for plain HTTP, and each would read all authorities again, for 25 ms.
    """
    shared = httpx.create_ssl_context(trust_env=False)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        named = trust_env and {"SSL_CERT_FILE", "SSL_CERT_DIR"} & set(os.environ)
        if verify is True and cert is None and not named:
            return shared
        return httpx.create_ssl_context(verify, cert, trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _entry_points_are_read_once() -> Iterator[None]:
    """Let the tests of one process share what the installed distributions declare, per module search path.

    Each control plane asks for it, and reading all metadata again would take a good part of a short test.
    """
    read = metadata.entry_points
    known: dict[tuple[str, ...], Any] = {}

    def entry_points(**params: Any) -> Any:
        path = tuple(sys.path)
        if path not in known:
            known[path] = read()
        return known[path].select(**params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "entry_points", entry_points)
        yield


@pytest.fixture(autouse=True)
def _signals_stay_as_they_are() -> Iterator[None]:
    """Fail a test that leaves a signal ignored, handled or blocked which was not before, and undo that.

    Programs that later tests of the same process start inherit ignored and blocked signals. Ctrl-C could not
    stop them, and nothing in those tests would say why.
    """
    before = {number: signal.getsignal(number) for number in _STOPPING}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    changed = [number for number in _STOPPING if signal.getsignal(number) != before[number]]
    for number in changed:
        signal.signal(number, before[number])
    newly_blocked = signal.pthread_sigmask(signal.SIG_SETMASK, blocked) - blocked
    names = ", ".join(sorted(signal.Signals(number).name for number in {*changed, *newly_blocked}))
    assert not names, f"the test leaves {names} handled otherwise than before"


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE)


@pytest.fixture(scope="session")
def missing() -> Missing:
    """Return a function to call with a reason where a real component is absent.

    It skips the test, or fails it under ROLLYARD_REQUIRE_REAL=1.
    """

    def tell(reason: str) -> NoReturn:
        if os.environ.get("ROLLYARD_REQUIRE_REAL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return tell


@pytest.fixture(scope="session")
def bubblewrap_problem() -> str | None:
    """Return why bubblewrap makes no sandbox here, or None where it does."""
    from rollyard_testing.pace import patience  # Its asserts are not rewritten if this file imports it first.

    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (Debian: apt install bubblewrap)"
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=patience(20))
    return None if probe.returncode == 0 else f"bubblewrap is not usable here: {probe.stderr.strip()}"


@pytest.fixture(scope="session")
def bubblewrap_works(bubblewrap_problem: str | None, missing: Missing) -> None:
    """Require that bubblewrap makes sandboxes here."""
    if bubblewrap_problem is not None:
        missing(bubblewrap_problem)


@pytest.fixture(scope="session")
def apptainer_works(missing: Missing) -> None:
    """Require that an ordinary user may start Apptainer here."""
    if os.geteuid() == 0:
        missing(
            "Apptainer sandboxes are an ordinary user's: scripts/slurm-lab run .venv/bin/python -m pytest …"
        )
    if shutil.which("apptainer") is None and shutil.which("singularity") is None:
        missing("neither apptainer nor singularity is on the PATH")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        missing("/dev/fuse is closed to this user")


@pytest.fixture(scope="session")
def podman_works(missing: Missing) -> None:
    """Require that this user may start Podman here, with limits."""
    from rollyard_testing.pace import patience

    program = shutil.which("podman")
    if program is None or os.geteuid() != 0:
        missing("Podman is not installed (Debian: apt install podman), or this is not root")
    probe = subprocess.run([program, "info"], capture_output=True, text=True, timeout=patience(30))
    if probe.returncode != 0:
        missing(f"podman is not usable here: {probe.stderr.strip()}")


_ATTACKS = re.compile(r"tests/(adversary/|kubernetes/release/test_(policy_attacks|hostile_tenants)\.py)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the attacks took, whose time is bounded (CONTRIBUTING.md)."""
    stats = terminalreporter.stats
    reports = [each for kind in ("", "passed", "failed", "error") for each in stats.get(kind, ())]
    phases = [each for each in reports if isinstance(each, pytest.TestReport) and _ATTACKS.match(each.nodeid)]
    if phases:
        count = len({each.nodeid for each in phases})
        seconds = sum(each.duration for each in phases)
        terminalreporter.write_line(f"attacks: {count} tests took {seconds:.1f} s, all processes together")


_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@pytest.fixture(scope="session")
def even_scheduling() -> Iterator[None]:
    """Share the cores by process instead of by session (sched(7), autogroup), where that is permitted.

    On some virtual machines a session that sleeps and wakes gets no core for seconds while another one, such
    as that of an inference server, is busy. That is longer than whole turns of the test model, so nothing
    could happen in the middle of one.
    """
    try:
        before = _AUTOGROUP.read_text()
        _AUTOGROUP.write_text("0")
    except OSError:
        yield
        return
    yield
    _AUTOGROUP.write_text(before)
