"""The bridge runs or joins a control plane, and reconciles jobs and pools with Slurm.

All state of a bridge is in its home folder: the database of the control plane, one file for each Slurm job,
and the identity of the home, which every job carries in its comment. When a bridge was killed, the next
bridge on the same home finds all of this again. `scripts` previews the batch scripts, for `--dry-run`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
from rollyard_client.unixsocket import LONGEST_PATH, socket_url
from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.security.job_token import job_token
from rollyard_crds.security.ready_token import ready_token
from rollyard_drivers.host.child import sweep
from rollyard_drivers.host.control_plane import (
    ControlPlaneProcess,
    ControlPlaneSettings,
    HostedControlPlane,
    JoinedControlPlane,
)
from rollyard_drivers.host.errors import StartFailed
from rollyard_drivers.host.home import Home, read_json, write_json
from rollyard_drivers.host.private_files import write_private
from rollyard_drivers.loop.driver import Driver, Store, replace_pool, run_passes, unless_stopped
from rollyard_drivers.reconcile.job import job_workloads
from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_process.hub_names import hub_name

from rollyard_slurm.addresses import checked_address
from rollyard_slurm.calls.rest import RestCalls, slurm_calls
from rollyard_slurm.errors import SlurmError, SlurmUnavailable
from rollyard_slurm.node import base_url
from rollyard_slurm.options import (
    CA_NAME,
    COMMAND,
    DEFAULT_TIMEOUT,
    SOCKET_NAME,
    UNIX,
    BridgeOptions,
    reconcile_profile,
    served,
)
from rollyard_slurm.profile import RestProfile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import BatchScript, batch_script
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.polling import PollInterval
from rollyard_slurm.submissions.ready_workers import DEFAULT_NAMESPACE, ready_workload
from rollyard_slurm.submissions.workloads import SlurmWorkloads

TURN_SECONDS: Final = 0.5
"""The longest pause between two passes of the loop, in seconds."""
WORKER_GRACE_SECONDS: Final = 20.0
"""The time that stage workers have to drain when the bridge ends, in seconds."""
BACKEND_GRACE_SECONDS: Final = 5.0
"""The time that backends have to end by themselves when the bridge ends, in seconds."""
END_SECONDS: Final = 60.0
"""The time that Slurm has to end the jobs that were cancelled, in seconds."""
PLANE_GRACE_SECONDS: Final = 3.0
"""The time that the control plane has to end by itself, in seconds."""
SAMPLE_FOLDER: Final = "/HF_HOME/hub/models--OWNER--NAME/snapshots/COMMIT"
"""What stands for the folder of a model of the hub in scripts that are only shown."""
KEPT_LOGS: Final = 500
"""The number of logs of ended jobs that are kept."""
PRUNE_SECONDS: Final = 600.0
"""The time between two removals of old logs, in seconds."""


@dataclass(frozen=True, slots=True)
class BridgeReady:
    """The report that the bridge makes once it runs."""

    url: str
    home: Home
    continuing: int
    """The number of Slurm jobs that an earlier run submitted and that continue."""


class Bridge:
    """Runs one home until it is stopped.

    Args:
        on_ready: A function that is called once the bridge runs.
        say: A function that is called with each line for the user of the bridge.
    """

    def __init__(
        self,
        options: BridgeOptions,
        on_ready: Callable[[BridgeReady], None] = lambda ready: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._options = options
        self._on_ready = on_ready
        self._say = say
        profile = options.profile
        self._calls = slurm_calls(profile.rest, options.timeout, options.home, profile.pass_env)
        self._home = Home(options.home, COMMAND)
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._keep_jobs = False

    def stop(self, keep_jobs: bool) -> None:
        """Make `run` return.

        Args:
            keep_jobs: Whether the Slurm jobs continue. The next bridge on this home finds them again.
        """
        self._keep_jobs = keep_jobs
        self._stop.set()

    async def run(self) -> None:
        """Lock the home, start the control plane, and reconcile until `stop` is called.

        Raises:
            HostError: Another bridge runs on this home.
            StartFailed: The control plane cannot be started or does not become ready.
            SlurmError: The address of this host in the cluster cannot be determined.
        """
        with self._home.locked():
            sweep(self._home.pids)
            self._home.remove_context()
            self._home.write_supervisor(os.getpid())
            try:
                trusted = self._trusted()
                async with httpx.AsyncClient(trust_env=False, verify=trusted or True) as http:
                    await self._serve(http, trusted)
            finally:
                self._home.remove_context()
                self._home.supervisor_file.unlink(missing_ok=True)

    def _trusted(self) -> ssl.SSLContext | None:
        """Return the certificate authorities to trust for `https:`, or None if no file was given.

        The file is copied into the home for the workers, because the nodes may not see the original.

        Raises:
            StartFailed: The file cannot be read, holds no certificate, or cannot be copied.
        """
        file = self._options.ca_file
        if file is None:
            return None
        try:
            trusted = ssl.create_default_context(cafile=file)
            write_private(self._home.root / CA_NAME, file.read_text())
        except (OSError, ValueError) as error:  # An SSLError is an OSError.
            words = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise StartFailed(f"--ca-file {file}: cannot be used: {words}") from error
        return trusted

    async def _serve(self, http: httpx.AsyncClient, trusted: ssl.SSLContext | None) -> None:
        """Start or join the control plane, run the loop until `stop` is called, and clean up."""
        options, known = self._options, read_json(self._home.root / "bridge.json") or {}
        instance = str(known.get("instance") or secrets.token_hex(4))
        if isinstance(self._calls, RestCalls):
            self._calls.server.check()
            try:
                await self._calls.server.api()
            except SlurmUnavailable as trouble:
                self._say(f"Slurm does not answer: {trouble}")
        plane, advertised = await self._plane(http, int(known.get("port") or 0))
        workloads: SlurmWorkloads | None = None
        store: Store | None = None
        try:
            if not await unless_stopped(plane.start(), self._stop):
                return
            scheme = plane.url.partition(":")[0]
            url = plane.url if not advertised else base_url(advertised, plane.port, scheme)
            known_next: dict[str, Any] = {
                "instance": instance,
                "url": url,
                "port": plane.port,
                "host": socket.gethostname(),
            }
            if options.join:
                known_next["serves"] = served(options.namespaces)
            if options.profile.rest is not None:
                known_next["rest"] = options.profile.rest.model_dump(exclude_none=True)
            write_json(self._home.root / "bridge.json", known_next)
            site = self._site(instance, url)
            token_of, wake = token_maker(plane.token), self._wake.set
            workloads = SlurmWorkloads(
                *(site, self._calls, http, token_of, wake, self._say),
                namespaces=options.namespaces or (DEFAULT_NAMESPACE,),
            )
            token = plane.token("driver" if options.join else "admin")
            store = Store(plane.url, token, trusted)
            for pool in options.pools:
                await replace_pool(store, pool)
            if isinstance(plane, ControlPlaneProcess):
                self._home.write_context(plane.url, plane.tokens_file)
            write_json(self._home.root / "bridge.json", {**known_next, "pid": os.getpid()})
            self._on_ready(BridgeReady(plane.url, self._home, len(workloads.jobs)))
            profile = reconcile_profile(site, options.max_jobs)
            driver = Driver(
                store,
                workloads,
                profile,
                lambda trouble: self._say(f"trouble: {trouble}"),
                takes=options.serves,
                serves=options.serves,
                alone=not options.join,
            )
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(plane.keep(self._wake.set), name="control plane")
                turning = group.create_task(self._loop(driver, workloads, store), name="reconcile")
                watching = group.create_task(store.watch(self._wake.set), name="new jobs")
                await self._stop.wait()
                watching.cancel()
                turning.cancel()
                await asyncio.wait([turning])
                if not self._keep_jobs:
                    await self._end(workloads)
                keeping.cancel()
            self._say(str(self._calls.counts))
        finally:
            if workloads is not None:
                await workloads.close()
            await plane.stop(PLANE_GRACE_SECONDS)
            if store is not None:
                await store.close()

    async def _plane(self, http: httpx.AsyncClient, port: int) -> tuple[HostedControlPlane, str]:
        """Return the control plane, and the host name or address by which the nodes reach it.

        An empty host means that the nodes use the URL of the control plane.

        Raises:
            StartFailed: The options lack the tokens, or name a socket whose path is too long.
            SlurmError: The address of this host in the cluster cannot be determined.
        """
        options = self._options
        if options.join:
            if options.tokens is None:
                raise StartFailed("--join needs --token-file, with the tokens of driver and worker")
            return JoinedControlPlane(options.join, options.tokens, http), ""
        if options.listen == UNIX:
            path = str(self._home.state / SOCKET_NAME)
            if len(os.fsencode(path)) > LONGEST_PATH:
                raise StartFailed(
                    f"--listen unix: a socket's path may have {LONGEST_PATH} bytes, and {path} has more; "
                    "choose a shorter --home"
                )
            return self._own_plane(path, 0, http), ""
        if options.listen:
            listen = checked_address(options.listen)
        else:
            listen = await self._calls.address()
        # Workers that still run know the port of the last run. Therefore the bridge uses it again.
        return self._own_plane(listen, options.port or port, http), options.advertise or listen

    def _own_plane(self, listen: str, port: int, http: httpx.AsyncClient) -> ControlPlaneProcess:
        """Return a control plane that this bridge starts."""
        settings = ControlPlaneSettings(listen, port, self._options.plane)
        return ControlPlaneProcess(self._home, settings, http)

    def _site(self, instance: str, url: str) -> Site:
        """Return the site, after making the folders of the home.

        Raises:
            StartFailed: A folder cannot be made.
        """
        site = self._options.site(instance, url)
        for folder in (site.logs, site.endpoints, site.tokens, site.troubles):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StartFailed(f"{folder} cannot be made: {error.strerror}") from error
        return site

    async def _loop(self, driver: Driver, workloads: SlurmWorkloads, store: Store) -> None:
        """Poll Slurm, make passes of the driver and remove old logs, until it is cancelled."""
        interval, clock, pruned = PollInterval(), asyncio.get_running_loop().time, float("-inf")
        trouble, submissions = "", workloads.submissions

        async def run_pass() -> None:
            nonlocal pruned, trouble
            now = datetime.now(UTC)
            try:
                workloads.find_endpoints()
                if interval.due(clock(), submissions.changed):
                    submissions.changed = False
                    await workloads.poll(now)
                    interval.polled(
                        clock(), submissions.changed, not workloads.jobs, bool(workloads.availability.trouble)
                    )
                if workloads.ready:
                    await driver.run_pass(now)
                    await workloads.keep_ready(now, store.offer)
                    await workloads.act(now)
                if clock() - pruned > PRUNE_SECONDS:
                    pruned = clock()
                    await asyncio.to_thread(prune_logs, self._home.logs, workloads.logs())
            except OSError as error:
                # The disk is full, a quota is reached, or the file server does not answer. Running jobs
                # continue, and the next pass tries again.
                if str(error) != trouble:
                    trouble = str(error)
                    self._say(f"trouble: {error.filename or 'the home'}: {error.strerror or error}")
            else:
                trouble = ""

        await run_passes(run_pass, self._wake, TURN_SECONDS)

    async def _end(self, workloads: SlurmWorkloads) -> None:
        """End every job of this home. The workers end first, and hand over their rollouts."""
        for kind, grace in (("stage-worker", WORKER_GRACE_SECONDS), ("backend", BACKEND_GRACE_SECONDS)):
            left = await end_jobs(workloads, kind, grace)
            if left:
                numbers = ", ".join(str(job) for job in left)
                self._say(f"Slurm has not ended these jobs yet: {numbers}; `scancel` was sent")


def token_maker(token: Callable[[str], str]) -> Callable[[Owner], str]:
    """Return a function that makes the token of the workers of one RolloutJob, or of a ready worker.

    Args:
        token: A function that returns the token of a role.
    """

    def token_of(owner: Owner) -> str:
        if owner.kind == "ReadyWorker":
            return ready_token(token("worker"), owner.namespace, owner.name)
        return job_token(token("worker"), owner.namespace, owner.name, owner.uid)

    return token_of


async def end_jobs(workloads: SlurmWorkloads, kind: str, grace: float) -> list[int]:
    """Drain and cancel every job of one kind, and wait until these jobs have ended.

    Args:
        kind: The kind of the jobs, `stage-worker` or `backend`.
        grace: The time that the jobs have before they are cancelled, in seconds.

    Returns:
        The numbers of the jobs that Slurm has not ended within END_SECONDS after the grace.
    """
    clock = asyncio.get_running_loop().time
    workloads.stop_kind(kind, grace, datetime.now(UTC))
    deadline, delay = clock() + grace + END_SECONDS, 0.2
    while workloads.left(kind) and clock() < deadline:
        now = datetime.now(UTC)
        await workloads.poll(now)
        if workloads.left(kind):
            await workloads.act(now)
            await asyncio.sleep(delay)
            delay = min(2.0, delay * 1.5)
    return [submission.job for submission in workloads.left(kind) if submission.job is not None]


def rest_of(known: dict[str, Any]) -> RestProfile | None:
    """Return the slurmrestd that the last bridge of a home used, or None if it used Slurm's commands.

    Args:
        known: The content of the home's `bridge.json`.
    """
    return RestProfile.model_validate(known["rest"]) if "rest" in known else None


async def end_home(home: Home, options: BridgeOptions, say: Callable[[str], None]) -> int:
    """End the Slurm jobs of a home on which no bridge runs, and return the number of these jobs.

    Raises:
        SlurmError: Slurm does not answer, or some jobs do not end.
    """
    known = read_json(home.root / "bridge.json") or {}
    if "instance" not in known:
        return 0
    calls = slurm_calls(rest_of(known), options.timeout, home.root, options.profile.pass_env)
    site = Site(home.root, str(known["instance"]), str(known["url"]), options.profile)
    async with httpx.AsyncClient(trust_env=False) as http:
        workloads = SlurmWorkloads(site, calls, http, lambda owner: "", lambda: None, say)
        await workloads.poll(datetime.now(UTC))
        if workloads.availability.trouble:
            raise SlurmError(f"Slurm does not answer: {workloads.availability.trouble}")
        count = len(workloads.jobs)
        left = [*await end_jobs(workloads, "stage-worker", 0.0), *await end_jobs(workloads, "backend", 0.0)]
        await workloads.close()
    if left:
        raise SlurmError(f"Slurm has not ended these jobs yet: {', '.join(map(str, left))}")
    return count


async def overview(home: Home) -> list[str]:
    """Return the lines that describe a bridge and its Slurm jobs.

    If Slurm does not answer, one of the lines says so.
    """
    known, running = read_json(home.root / "bridge.json"), home.supervisor()
    if known is None:
        return [f"no bridge has run on {home.root}"]
    where = f"process {running.pid}, {known['url']}" if running is not None else "not running on this host"
    lines = [f"bridge   {where} (home {home.root}, instance {known['instance']})"]
    if "serves" in known:
        lines.append(f"serves   {known['serves']}")
    calls = slurm_calls(rest_of(known), DEFAULT_TIMEOUT, home.root, keeps=False)
    try:
        listed = await calls.queue()
    except SlurmError as error:
        return [*lines, f"jobs     not known: {error}"]
    assignments = _assignments(home)
    rows = [("JOB", "STATE", "TIME LEFT", "NODE OR REASON", "FOR", "WORKLOAD")]
    for job in listed:
        who = SlurmJobIdentity.parse(job.comment)
        if who is None or who.instance != known["instance"]:
            continue
        left = "-" if job.left is None else f"{job.left / 60:.0f} min"
        owner, workload = assignments.get(who.launch, (who.owner, who.workload))
        rows.append((str(job.id), job.state, left, job.nodes or job.reason, owner, workload))
    if len(rows) == 1:
        return [*lines, "jobs     none"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return lines + [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _assignments(home: Home) -> dict[str, tuple[str, str]]:
    """Return the owners and workloads of the jobs that stood ready, keyed by their launches.

    The comments of these jobs still say that they belong to no RolloutJob.
    """
    assignments = {}
    for path in (home.root / "submissions").glob("*.json"):
        record = read_json(path) or {}
        if record.get("ready"):
            owner = record["workload"]["owner"]
            job = f"{owner['kind'].lower()}/{owner['namespace']}/{owner['name']}"
            assignments[path.stem] = (job, record["workload"]["name"])
    return assignments


def install_signals(bridge: Bridge) -> None:
    """Install the signal handlers of a bridge.

    SIGINT (Ctrl-C, `down`) ends the bridge and its jobs. SIGTERM and SIGHUP end the bridge alone. If SIGHUP
    is ignored when the bridge starts, it stays ignored.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, bridge.stop, False)
    loop.add_signal_handler(signal.SIGTERM, bridge.stop, True)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, bridge.stop, True)


def prune_logs(folder: Path, living: Collection[Path], kept: int = KEPT_LOGS) -> int:
    """Remove all but the newest logs, and return the number of removed logs.

    Args:
        folder: The folder of the logs.
        living: The logs of jobs that have not ended. They are never removed.
        kept: The number of other logs that are kept.

    Raises:
        OSError: The folder cannot be read.
    """
    logs = []
    for path in folder.glob("*-*.log"):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and path not in living:
            logs.append((int(number), path))
    old = [path for _, path in sorted(logs, key=lambda log: log[0], reverse=True)[kept:]]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


def sample_job() -> RolloutJob:
    """Return a minimal job, whose only purpose is to show the script of a worker."""
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "sample"}, "spec": spec})


def _url(options: BridgeOptions) -> str:
    if options.join:
        return options.join.rstrip("/")
    if options.listen == UNIX:
        return socket_url(str(options.home / "state" / SOCKET_NAME))
    scheme = "https" if options.plane.get("tls-cert") else "http"
    return base_url(options.advertise or options.listen or "BRIDGE-ADDRESS", options.port or 8765, scheme)


def batches(options: BridgeOptions, things: Iterable[RolloutJob | BackendPool]) -> list[BatchScript]:
    """Return the batch script of each worker and backend of some jobs and pools, and of ready workers.

    Sample values stand for what is not known yet, such as a port.
    """
    site = options.site("00000000", _url(options))
    profile = reconcile_profile(site, options.max_jobs)
    scripts = []
    for thing in things:
        workloads = (
            job_workloads(thing, profile) if isinstance(thing, RolloutJob) else pool_workloads(thing, profile)
        )
        scripts += [_batch(workload, site) for workload in workloads]
    if options.profile.workers.ready:
        namespaces = options.namespaces or (DEFAULT_NAMESPACE,)
        scripts += [
            _batch(ready_workload(namespace, "ready-0000000000000000", site), site)
            for namespace in namespaces
        ]
    return scripts


def _batch(workload: Workload, site: Site) -> BatchScript:
    identity = SlurmJobIdentity.of(workload, site.instance, "000000000000", 0)
    folder = SAMPLE_FOLDER if workload.model and hub_name(workload.model) is not None else ""
    return batch_script(workload, site, identity, folder=folder)


async def scripts(options: BridgeOptions, things: Iterable[RolloutJob | BackendPool]) -> list[str]:
    """Return the text of each script. With slurmrestd, the text also contains the fields of the submission.

    slurmrestd is asked for its version, because the fields depend on it.

    Raises:
        SlurmError: slurmrestd does not have the wanted version.
    """
    batch_scripts = batches(options, things)
    calls = slurm_calls(options.profile.rest, options.timeout, options.home, options.profile.pass_env)
    if not isinstance(calls, RestCalls):
        return [script.text() for script in batch_scripts]
    texts = []
    for script in batch_scripts:
        try:
            body = await calls.fields(script)
            version = (await calls.server.api()).version
        except SlurmUnavailable as trouble:
            texts.append(f"{script.text()}\n# fields for slurmrestd: not known: {trouble}\n")
            continue
        # The environment is left out: it may hold private values, and users may show the preview to others.
        job = {name: value for name, value in body["job"].items() if name != "environment"}
        text = json.dumps(job, indent=2)
        texts.append(
            f"{body['script']}\n# fields for slurmrestd (v0.0.{version}), beside an environment:\n{text}\n"
        )
    return texts
