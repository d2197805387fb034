"""The command `rollyard logs`: the log files of a home on this machine, or the logs of pods in a cluster.

What a log holds may come from a policy or a model, so control characters are printed escaped.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

import click

from rollyard import terminal
from rollyard.arguments import duration, kind_of
from rollyard.connection import KUBERNETES, Server, server_options
from rollyard.errors import CliError, LookupFailed, UsageProblem

CONTROL_PLANE: Final = "control-plane"
"""The name of the control plane's log."""
POLL_SECONDS: Final = 0.25
MAX_READ: Final = 16 << 20
"""The part at the end of a file that is read, in bytes. The files of Slurm jobs have no bound."""
MAX_LINE: Final = 16 << 10
"""The part of a line that is printed, in bytes; the next part counts as another line."""
STAGES: Final = ("init", "run", "eval")
_OWNED: Final = re.compile(
    r"(?P<owner>.+)-(?P<uid>[0-9a-f]{8})-(?P<role>worker|init|run|eval|backend)-(?P<index>\d+)(-(?P<job>\d+))?"
)
"""The name of the log of a worker or a backend. The number of its Slurm job follows, if it has one."""
_STOOD_READY: Final = re.compile(
    r"(?P<workload>\S+): Slurm job (?P<job>\d+), which stood ready, works for it"
)
"""The line by which the bridge says what a worker that stood ready is used for."""
_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class LogTarget:
    """What has the wanted logs: `kind` is `rj`, `bp`, `process`, or empty for a name alone."""

    kind: str
    name: str
    stage: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}" if self.kind in ("rj", "bp") else self.name


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a log that is printed first, and whether what follows is printed, too."""

    tail: int
    """The number of lines; negative: all."""
    since: float | None
    """The age of the oldest line in seconds, or None for any."""
    following: bool


@click.command()
@click.argument("words", nargs=-1, metavar="[control-plane | JOB | bp/POOL | worker/NAME]")
@click.option("-f", "--follow", "following", is_flag=True, help="Print what follows, until Ctrl-C.")
@click.option(
    "--tail", metavar="N", type=int, default=200, show_default=True, help="The last N lines of each; -1: all."
)
@click.option("--since", type=duration, help="Only what is newer, as 10m.")
@click.option("--stage", type=click.Choice(STAGES), help="With JOB: only the workers of this stage.")
@server_options
def logs(
    words: tuple[str, ...],
    following: bool,
    tail: int,
    since: float | None,
    stage: str | None,
    server: Server,
) -> None:
    """Print the logs of the control plane, of a job's workers or of a pool's backends; else list all logs.

    On one machine and with Slurm these are files of the home (--home), which stay when a process has ended.
    In a cluster they are those of pods, which kubectl reads. A name alone is that of a log, a job or a pool.
    What a sandbox printed is in the rollout: `rollyard view JOB ROLLOUT`.
    """
    target = _target(words, stage)
    wanted = Wanted(tail, since, following)
    place = _place(server)
    if isinstance(place, Path):
        if target is None:
            _list(place)
        else:
            _print_files(place, target, wanted)
        return
    if target is None:
        raise UsageProblem("in a cluster, give control-plane, operator, JOB, bp/POOL or worker/POD")
    _print_pods(place, target, wanted, server.namespace)


def _target(words: Sequence[str], stage: str | None) -> LogTarget | None:
    """Return whose logs the words name, or None without words.

    Raises:
        UsageProblem: They name nothing that has a log.
    """
    if len(words) == 2 and kind_of(words[0]) is not None:
        words = ("/".join(words),)
    if len(words) > 1:
        raise UsageProblem(f"give one of control-plane, JOB, bp/POOL and worker/NAME (got {' '.join(words)})")
    if not words:
        if stage is not None:
            raise UsageProblem("--stage goes with JOB")
        return None
    before, slash, name = words[0].rpartition("/")
    kind = kind_of(before) or {"worker": "process", "backend": "process", "pod": "process"}.get(before, "")
    if before == "sandbox":
        raise UsageProblem(
            "no log is kept of a sandbox. What a rollout's tools printed is in its conversation: `rollyard "
            f"view JOB {name}`, or `rollyard watch JOB --rollout {name}` while it runs. Why a sandbox did "
            "not start is in the rollout's reason, and in `rollyard logs JOB`"
        )
    if slash and not kind:
        raise UsageProblem(f"{before!r} has no logs: give rj, bp, worker or backend (got {words[0]!r})")
    if not _NAME.fullmatch(name):
        raise UsageProblem(f"{name!r} is not a name of letters, digits, '-', '.' and '_'")
    if stage is not None and kind not in ("", "rj"):
        raise UsageProblem("--stage goes with JOB")
    return LogTarget(kind, name, stage)


def _place(server: Server) -> Path | str:
    """Return the folder of the logs on this machine, or the URL of the installation in a cluster.

    Raises:
        UsageProblem: The server that is named may run on another machine.
        CliError: This machine has no logs.
    """
    from rollyard_drivers.host.home import Home, default_home, read_json

    from rollyard import cluster

    url = server.url or ("" if server.home else os.environ.get("ROLLYARD_URL", ""))
    scope = os.environ.get("ROLLYARD_KUBERNETES")
    if not url and not server.home and scope:
        url = KUBERNETES + scope
    if url.startswith(KUBERNETES):
        return url
    home = Home((server.home or default_home()).expanduser().resolve())
    here = str((read_json(home.context_file) or {}).get("url", ""))
    if url and url.rstrip("/") != here.rstrip("/"):
        raise UsageProblem(
            f"the logs of {url} are on the machine where it runs: call `rollyard logs` there, with the "
            "--home of its `rollyard up` or `rollyard slurm-bridge up`; in a cluster, give --kubernetes"
        )
    if home.logs.is_dir():
        return home.logs
    if server.home is None and cluster.configured():
        return KUBERNETES
    raise CliError(
        f"{home.root} has no logs, because nothing has run there: give --home of a `rollyard up`, or "
        "--kubernetes",
        reason="NoServer",
    )


# Files of a home


def _list(folder: Path) -> None:
    from rollyard.render.tables import age, plain_table, print_table

    table = plain_table(["log", "of", "bytes", "changed"])
    now = datetime.now(UTC)
    paths = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        match = _OWNED.fullmatch(path.stem)
        of = "" if match is None else f"{'bp' if match['role'] == 'backend' else 'rj'}/{match['owner']}"
        state = path.stat()
        changed = age(datetime.fromtimestamp(state.st_mtime, UTC), now)
        table.add_row(path.stem, of, str(state.st_size), changed)
    print_table(terminal.console(), table)


def _files(folder: Path, target: LogTarget) -> tuple[list[Path], int]:
    """Return the log files of a target, and how many earlier objects of its name have logs, too."""
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if target.kind in ("", "process") and target.name in paths:
        return [paths[target.name]], 0
    for kind in (target.kind,) if target.kind else ("rj", "bp"):
        groups: dict[str, list[Path]] = {}
        for stem, path in paths.items():
            match = _OWNED.fullmatch(stem)
            if match is not None and _is_of(match, kind, target.name):
                groups.setdefault(match["uid"], []).append(path)
        if groups:
            newest = max(groups, key=lambda uid: max(path.stat().st_mtime for path in groups[uid]))
            stages = (target.stage, "worker") if target.stage is not None else None
            own = [path for path in groups[newest] if stages is None or _role(path) in stages]
            return own + _stood_ready(paths, groups[newest]), len(groups) - 1
    return [], 0


def _is_of(match: re.Match[str], kind: str, name: str) -> bool:
    """Return whether the name of a log belongs to an object; long names are cut, see `child_name`."""
    from rollyard_drivers.reconcile.naming import NAME_LIMIT

    tail = f"-{match['uid']}-{match['role']}-{match['index']}"
    owner = name[: NAME_LIMIT - len(tail)].rstrip("-")
    return (match["role"] == "backend") == (kind == "bp") and match["owner"] == owner


def _role(path: Path) -> str:
    match = _OWNED.fullmatch(path.stem)
    return match["role"] if match is not None else ""


def _stood_ready(paths: dict[str, Path], own: Iterable[Path]) -> list[Path]:
    """Return the logs of Slurm jobs that stood ready before they worked for the same object as `own`."""
    bridge = paths.get("bridge")
    if bridge is None:
        return []
    prefixes = {path.stem[: match.start("role")] for path in own if (match := _OWNED.fullmatch(path.stem))}
    jobs = [
        match["job"]
        for match in _STOOD_READY.finditer(_last_bytes(bridge)[0].decode(errors="replace"))
        if any(match["workload"].startswith(prefix) for prefix in prefixes)
    ]
    stood = {stem: path for stem, path in paths.items() if stem.startswith("ready-")}
    return [path for stem, path in stood.items() if stem.rpartition("-")[2] in jobs]


def _last_bytes(path: Path) -> tuple[bytes, int]:
    """Return the end of a file, and the place at which it was read to."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_READ))
            data = file.read(MAX_READ)
            return data, file.tell()
    except FileNotFoundError:
        return b"", 0


def _print_files(folder: Path, target: LogTarget, wanted: Wanted) -> None:
    paths, earlier = _files(folder, target)
    if not paths:
        raise LookupFailed(f"{folder} has no log of {target}; `rollyard logs` lists those that are there")
    if earlier:
        click.echo(f"rollyard: {earlier} earlier logs of this name: `rollyard logs` lists them", err=True)
    shown = len(paths) > 1
    read = {}
    for path in paths:
        lines, read[path] = last_lines(path, wanted)
        for line in lines:
            _print_line(path, line, shown)
        if not lines:
            terminal.echo_line(f"rollyard: {path} has no lines to show", err=True)
    if wanted.following:
        with ExitStack() as stack:
            _follow(read, stack, lambda: _files(folder, target)[0])


def _follow(read: dict[Path, int], stack: ExitStack, find: Callable[[], list[Path]]) -> None:
    """Print what follows in some logs after the places that were read, and in those that begin later."""
    followed = {path: stack.enter_context(closing(FollowedLog(path, place))) for path, place in read.items()}
    while True:
        time.sleep(POLL_SECONDS)
        for path, log in followed.items():
            for line in log.lines():
                _print_line(path, line, len(followed) > 1)
        for path in find():
            if path not in followed:
                followed[path] = stack.enter_context(closing(FollowedLog(path, 0)))


def _print_line(path: Path, line: bytes, shown: bool) -> None:
    prefix = f"[{path.stem}] " if shown else ""
    terminal.echo(prefix + line.decode(errors="replace"))


def _split(data: bytes) -> list[bytes]:
    """Return the lines of some data, the longest ones in parts."""
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return [
        line.removesuffix(b"\r")[start : start + MAX_LINE]
        for line in lines
        for start in range(0, max(1, len(line)), MAX_LINE)
    ]


def last_lines(path: Path, wanted: Wanted) -> tuple[list[bytes], int]:
    """Return the wanted last lines of a log, and the place in the file to which it was read.

    A log that was full has begun again, and the lines before are in a file beside it.
    """
    earlier, _ = _last_bytes(path.with_name(f"{path.name}.1"))
    latest, place = _last_bytes(path)
    lines = _split(earlier + latest)
    if wanted.since is not None:
        lines = _newer(lines, time.time() - wanted.since, path.stat().st_mtime)
    if wanted.tail >= 0:
        lines = lines[max(0, len(lines) - wanted.tail) :]
    return lines, place


def _newer(lines: Sequence[bytes], oldest: float, changed: float) -> list[bytes]:
    """Return the lines since a time. A line without a time goes with the one before it.

    If no line has a time, all are as old as the last change of the file.
    """
    times = [_time_of(line) for line in lines]
    is_new = changed >= oldest and not any(times)
    kept = []
    for line, moment in zip(lines, times, strict=True):
        is_new = is_new if moment is None else moment >= oldest
        if is_new:
            kept.append(line)
    return kept


def _time_of(line: bytes) -> float | None:
    """Return the time with which a line of our programs begins, in seconds since the epoch."""
    text = line[:256].decode(errors="replace")
    try:
        if text.startswith('{"time": "'):
            return datetime.fromisoformat(json.loads(text[len('{"time": ') :].partition(",")[0])).timestamp()
        stamp = _STAMP.match(text)
        return None if stamp is None else datetime.fromisoformat(stamp[0]).timestamp()
    except ValueError:
        return None


class FollowedLog:
    """A log file whose new lines are read, also after it was full and another file has its name.

    Args:
        path: The file.
        place: Where what is new begins.
    """

    def __init__(self, path: Path, place: int) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open()
        # A smaller file has taken the name of the one that was read.
        if self._file is not None and os.fstat(self._file.fileno()).st_size >= place:
            self._file.seek(place)

    def _open(self) -> None:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that have come since the last call. A long line is yielded in parts."""
        while True:
            if self._file is None:
                self._open()
            if self._file is None:
                return
            while data := self._file.read(MAX_LINE):
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line.removesuffix(b"\r")
                if len(self._rest) >= MAX_LINE:
                    yield self._rest
                    self._rest = b""
            if self._is_current(self._file):
                return
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _is_current(self, file: BinaryIO) -> bool:
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return True
        state = os.fstat(file.fileno())
        return (named.st_dev, named.st_ino) == (state.st_dev, state.st_ino)


# Pods of a cluster


def _print_pods(url: str, target: LogTarget, wanted: Wanted, namespace: str | None) -> None:
    from rollyard import cluster

    if target.name in (CONTROL_PLANE, "operator") and target.kind in ("", "process"):
        installation = cluster.find(url)
        component = "api" if target.name == CONTROL_PLANE else target.name
        namespace = installation.namespace
        which = ["--selector", f"{cluster.INSTANCE}={installation.release},{_COMPONENT}={component}"]
    elif target.kind == "process":
        which = [target.name]
    else:
        which = ["--selector", _selector(target)]
    options = ["--all-containers", "--prefix", f"--tail={wanted.tail}", f"--max-log-requests={MAX_PODS}"]
    if wanted.since is not None:
        options.append(f"--since={max(1, round(wanted.since))}s")
    if wanted.following:
        options.append("--follow")
    where = namespace or cluster.current_namespace()
    for line in cluster.output_lines("logs", "--namespace", where, *which, *options, limit=MAX_LINE):
        terminal.echo(line.decode(errors="replace"))


_COMPONENT: Final = "app.kubernetes.io/component"
MAX_PODS: Final = 64
"""The largest number of pods whose logs are followed at once."""


def _selector(target: LogTarget) -> str:
    if target.kind == "bp":
        return f"rollyard.dev/pool={target.name},{_COMPONENT}=backend"
    stage = "" if target.stage is None else f",rollyard.dev/stage in ({target.stage},{'-'.join(STAGES)})"
    return f"rollyard.dev/job={target.name},{_COMPONENT}=stage-worker{stage}"
