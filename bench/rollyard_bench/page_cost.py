"""What open pages cost the control plane while a job ends rollouts at an even pace."""

from __future__ import annotations

import asyncio
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
                http.post(
                    "/v1/rolloutjobs", json=untended_job(NAME, self._groups, SAMPLES)
                ).raise_for_status()
                worker = Puppet(http, NAME)
                begin = time.monotonic()
                while not self._halt.is_set():
                    worker.show()
                    for stage in ("init", "run", "eval"):
                        leases = worker.lease_some(stage, PACE)
                        worker.complete_some([(lease, place % 2) for place, lease in enumerate(leases)])
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

    def __init__(self, served: Served, cookies: dict[str, str], count: int) -> None:
        self._served = served
        self._cookies = cookies
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="readers", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.events = 0
        self.calls = 0
        self.refused: list[str] = []

    def start(self) -> None:
        """Open the streams, and return once all of them are."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(60.0)

    async def _open(self) -> None:
        self._client = httpx.AsyncClient(
            base_url=self._served.url,
            cookies=self._cookies,
            timeout=httpx.Timeout(60.0, read=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        opened = [asyncio.Event() for _ in range(self._count)]
        for number, event in enumerate(opened):
            job = {"job": f"default/{NAME}"} if number % BROWSERS == 0 else {}
            self._keep(self._stream(job, event))
        async with asyncio.timeout(60.0):
            for event in opened:
                await event.wait()

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, params: dict[str, str], opened: asyncio.Event) -> None:
        async with self._client.stream("GET", "/v1/events", params=params) as answer:
            if answer.status_code != 200:
                self.refused.append(f"{answer.status_code} /v1/events")
            opened.set()
            async for line in answer.aiter_lines():
                self.events += line.startswith("event:")

    def repeat(self, url: str, times: int) -> None:
        """Send a call so many times, beside everything else."""
        for _ in range(times):
            self._loop.call_soon_threadsafe(lambda: self._keep(self._call(url)))

    async def _call(self, url: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            answer = await self._client.get(url)
            self.calls += 1
            if answer.status_code != 200:
                self.refused.append(f"{answer.status_code} {url}")

    def stop(self) -> None:
        """Close the streams."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


@contextmanager
def _pages(plane: Plane, browser: Browser, cookies: Any) -> Iterator[_Readers]:
    """Open PAGES pages, half of them at the job and half at the overview."""
    served = plane.served
    jar = {cookie["name"]: cookie["value"] for cookie in cookies["cookies"]}
    readers = _Readers(served, jar, PAGES - BROWSERS)
    readers.start()

    def called(request: Request) -> None:
        if request.method == "GET" and "/v1/" in request.url and "/v1/events" not in request.url:
            readers.repeat(request.url, (PAGES - BROWSERS) // BROWSERS)

    try:
        with a_context(browser, served, storage_state=cookies) as (context, witness):
            # Each page has a window of its own, so that none of them rests because it is hidden.
            first = context.new_page()
            first.goto(served.job(NAME))
            with a_context(browser, served, storage_state=cookies) as (other, _):
                second = other.new_page()
                second.goto(f"{served.url}/")
                first.wait_for_timeout(SETTLE_SECONDS * 1e3)
                for page in (first, second):
                    page.on("request", called)
                yield readers
                if faults := witness.faults():
                    raise ProgramFailed("; ".join(faults))
    finally:
        readers.stop()


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
    return Measurement(
        "page_server_cost", max(0.01, median(costs)), Baseline("no page", median(without)), how
    )
