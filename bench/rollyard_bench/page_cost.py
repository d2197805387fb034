"""What open pages cost the control plane while a job ends rollouts at an even pace."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final

import httpx
import psutil
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Browser, Page, Request
from rollyard_testing.browser.plane import Plane
from rollyard_testing.browser.signin import Served, a_context
from rollyard_testing.page.worker import Puppet, untended_job

from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement

PAGES: Final = 20
BROWSERS: Final = 2
"""The number of pages that are open in a real browser; the others repeat all calls of these."""
PACE: Final = 5
"""The number of rollouts that end in a second."""
LEAST_PACE: Final = 3.0
"""A machine on which fewer rollouts end in a second is too busy for this measurement."""
SETTLE_SECONDS: Final = 3.0
NAME: Final = "pace"
SAMPLES: Final = 8


class _Job(threading.Thread):
    """A job that ends PACE rollouts each second, together, until `stop` is called."""

    def __init__(self, served: Served, rollouts: int) -> None:
        super().__init__(name="pace", daemon=True)
        self._served = served
        self._halt = threading.Event()
        self._groups = rollouts // SAMPLES
        self.ended = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        """Submit the job, and end its rollouts at their time."""
        try:
            with self._served.http() as http:
                job = untended_job(NAME, self._groups, SAMPLES)
                http.post("/v1/rolloutjobs", json=job).raise_for_status()
                worker = Puppet(http, NAME)
                begin = time.monotonic()
                while not self._halt.is_set():
                    worker.show()
                    for stage in ("init", "run", "eval"):
                        leases = worker.lease_some(stage, PACE)
                        worker.complete_some([(lease, number % 2) for number, lease in enumerate(leases)])
                    self.ended += PACE
                    self._halt.wait(max(0.0, begin + self.ended / PACE - time.monotonic()))
        except Exception as error:
            self.problem = error

    def stop(self) -> None:
        """Let the thread end, and wait for it."""
        self._halt.set()
        self.join(30.0)


class _Readers:
    """Pages without a browser: each has a stream of events open, and repeats calls that it is given."""

    def __init__(self, portal: BlockingPortal, client: httpx.AsyncClient) -> None:
        self._portal = portal
        self._client = client
        self.events = 0
        self.calls = 0
        self.refused: list[str] = []

    async def stream(self, params: dict[str, str], *, task_status: TaskStatus[None]) -> None:
        """Read a stream of events until cancelled. It has started once the stream is open."""
        async with self._client.stream("GET", "/v1/events", params=params) as answer:
            if answer.status_code != 200:
                self.refused.append(f"{answer.status_code} /v1/events")
            task_status.started()
            async for line in answer.aiter_lines():
                self.events += line.startswith("event:")

    def repeat(self, url: str, times: int) -> None:
        """Send a call so many times, beside everything else."""
        for _ in range(times):
            self._portal.start_task_soon(self._call, url)

    async def _call(self, url: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            answer = await self._client.get(url)
            self.calls += 1
            if answer.status_code != 200:
                self.refused.append(f"{answer.status_code} {url}")


@contextmanager
def _readers(served: Served, cookies: dict[str, str], count: int) -> Iterator[_Readers]:
    """Yield so many readers on a thread of their own, whose streams are open."""
    client = httpx.AsyncClient(
        base_url=served.url,
        cookies=cookies,
        timeout=httpx.Timeout(60.0, read=None),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):
        readers = _Readers(portal, client)
        streams = []
        try:
            for number in range(count):
                job = {"job": f"default/{NAME}"} if number % BROWSERS == 0 else {}
                stream, _ = portal.start_task(readers.stream, job)
                streams.append(stream)
            yield readers
        finally:
            for stream in streams:
                stream.cancel()


@contextmanager
def _pages(plane: Plane, browser: Browser, cookies: Any) -> Iterator[_Readers]:
    """Open PAGES pages, half of them at the job and half at the overview."""
    served = plane.served
    jar = {cookie["name"]: cookie["value"] for cookie in cookies["cookies"]}
    with (
        _readers(served, jar, PAGES - BROWSERS) as readers,
        # Each page has a window of its own, so that none of them rests because it is hidden.
        a_context(browser, served, storage_state=cookies) as (context, witness),
        a_context(browser, served, storage_state=cookies) as (other, _),
    ):

        def called(request: Request) -> None:
            if request.method == "GET" and "/v1/" in request.url and "/v1/events" not in request.url:
                readers.repeat(request.url, (PAGES - BROWSERS) // BROWSERS)

        first, second = context.new_page(), other.new_page()
        first.goto(served.job(NAME))
        second.goto(f"{served.url}/")
        first.wait_for_timeout(SETTLE_SECONDS * 1e3)
        for page in (first, second):
            page.on("request", called)
        yield readers
        if faults := witness.faults():
            raise ProgramFailed("; ".join(faults))


def _pump(page: Page, seconds: float) -> None:
    # Playwright hands over the requests of pages only while it waits itself.
    page.wait_for_timeout(seconds * 1e3)


def _share(plane: Plane, seconds: float, wait: Any) -> float:
    """Return the share of a core, in percent, that the control plane uses while something waits."""
    process = psutil.Process(plane.pid)
    before, begin = sum(process.cpu_times()[:2]), time.monotonic()
    wait(seconds)
    return 100.0 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begin)


def measure(plane: Plane, browser: Browser, cookies: Any, *, seconds: float, rounds: int) -> Measurement:
    """Measure the control plane with open pages and without, in turns, while the same job runs."""
    job = _Job(plane.served, 8 * (int(PACE * 2 * rounds * (seconds + 30)) // 8 + 8))
    job.start()
    with_pages, without, events, calls = [], [], 0, 0
    paces: list[float] = []
    refused: list[str] = []
    try:
        time.sleep(SETTLE_SECONDS)
        for _ in range(rounds):
            without.append(_share(plane, seconds, time.sleep))
            with _pages(plane, browser, cookies) as readers:
                page = browser.contexts[0].pages[0]
                ended = job.ended
                before = readers.events, readers.calls
                with_pages.append(_share(plane, seconds, partial(_pump, page)))
                events += readers.events - before[0]
                calls += readers.calls - before[1]
                refused += readers.refused
                paces.append((job.ended - ended) / seconds)
                if job.problem or paces[-1] < LEAST_PACE:
                    raise ProgramFailed(
                        f"the job ended {job.ended - ended} rollouts in {seconds:.0f} s: {job.problem}"
                    )
    finally:
        job.stop()
    if refused:
        raise ProgramFailed(f"{len(refused)} calls were refused, as {refused[0]}")
    if not events:
        raise ProgramFailed("no event reached a page")
    costs = [some - none for some, none in zip(with_pages, without, strict=True)]
    streams = rounds * (PAGES - BROWSERS) * seconds
    how = (
        f"the control plane's CPU time with {PAGES} pages less without, while a job ends {median(paces):.1f} "
        f"rollouts a second, {rounds} × {seconds:.0f} s each in turns; {BROWSERS} pages are in a real "
        f"browser, at the job and at the overview, and {PAGES - BROWSERS} have a stream each and repeat "
        f"these pages' calls; per page {events / streams:.2f} events and {calls / streams:.2f} calls a "
        f"second; with {', '.join(f'{share:.1f}' for share in with_pages)} %, without "
        f"{', '.join(f'{share:.1f}' for share in without)} %; the baseline is the same job without a page"
    )
    baseline = Baseline("no page", median(without))
    return Measurement("page_server_cost", max(0.01, median(costs)), baseline, how)
