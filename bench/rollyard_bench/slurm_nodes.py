"""Throughput on 1, 16 and more Slurm nodes with 8 rollouts at once on each, and the model of fixed latency.

Each node is a real slurmd, and the stage worker on it is a real batch job of the bridge. All nodes share the
cores of one machine with the control plane, the bridge and the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from rollyard_bench import lab
from rollyard_bench.bridge import Bridge, bridge, shared_folder, submitted
from rollyard_bench.harness import external_pool
from rollyard_bench.latency_model import MODEL
from rollyard_bench.memory import counts, manifest, posted
from rollyard_bench.pipeline import model_server
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline

MODULE = "rollyard_bench.slurm_nodes"
POOL = "latency"
LATENCY = 2.0
COMMAND = "ls /"
AT_ONCE = 8
"""The number of rollouts on a node."""
NODES = 16
GOAL = 0.95
INSTANCE_BYTES = 45 << 20
"""The memory of one sandbox, its FUSE helper included."""
READY_SECONDS = 150.0
ENTER_SECONDS = 30.0
LEASING_SECONDS = 8.0
SPARE_SECONDS = 60.0
"""The time beyond the ideal one within which a round must be over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of what is measured."""

    sizes: tuple[int, ...]
    """The numbers of nodes. Those after NODES are tried as long as the efficiency reaches the goal."""
    turns: int

    @property
    def ideal(self) -> float:
        """Return the seconds of a rollout in which nothing but the model takes time."""
        return self.turns * LATENCY


def plan(settings: Settings) -> Plan:
    """Return the plan of this run. A quick one stops at the size that the goal is about."""
    return Plan((1, NODES), 6) if settings.quick else Plan((1, 8, NODES, 24, 32), 20)


@dataclass(frozen=True, slots=True)
class Round:
    """One wave of rollouts, from the moment when the model may be asked until the last has its reward."""

    nodes: int
    turns: float
    """The turns per second while all places were taken, by the times of the model's answers."""
    turns_each: int
    """The number of turns of a rollout."""
    seconds: float
    turn: float
    """The seconds of a turn, as the median over rollouts."""
    command: float
    """The part of a turn's seconds that the tool call took."""
    busy: float
    """The share of the machine's cores that were busy."""
    cpu: dict[str, float] = field(default_factory=dict)
    """The busy cores by program."""

    @property
    def throughput(self) -> float:
        """Return the rollouts per second."""
        return self.turns / self.turns_each

    def efficiency(self, one: Round) -> float:
        """Return throughput / (nodes × throughput of one node)."""
        return self.throughput / (self.nodes * one.throughput)

    def text(self, one: Round) -> str:
        """Return all of it for readers."""
        programs = ", ".join(f"{name} {cores:.2f}" for name, cores in self.cpu.items() if cores >= 0.005)
        wave = one.seconds / self.seconds
        return (
            f"{self.nodes} nodes: {self.turns:.2f} turns/s, efficiency {self.efficiency(one):.3f}, a turn "
            f"{self.turn:.3f} s (command {1e3 * self.command:.1f} ms), cores busy {100 * self.busy:.0f}% "
            f"({programs}); the whole wave {self.seconds:.2f} s (efficiency {wave:.3f})"
        )


def _job(name: str, nodes: int, image: str) -> dict[str, Any]:
    stage = {"replicas": nodes, "concurrency": AT_ONCE}
    return manifest(
        name,
        tasks={"stream": True},
        handler="shell",
        samplesPerTask=1,
        agent={"type": "tools", "tools": ["bash", "submit"], "maxTurns": 64},
        sampling={"maxTokens": 256},
        backendRef={"name": POOL},
        # One sandbox is kept warm from the first rollout on. The others are started for their rollouts.
        sandbox={"image": image, "warm": 1, "resources": {"memory": "256Mi", "disk": "32Mi"}},
        stages={"init": stage, "run": stage, "eval": stage},
    )


class Cpu:
    """The CPU time by program, of this user's processes and of Slurm's."""

    def __init__(self) -> None:
        self._tick = os.sysconf("SC_CLK_TCK")
        self._begin = time.perf_counter()
        self._before = self._now()
        self._machine = self._busy()

    def spent(self) -> tuple[float, dict[str, float]]:
        """Return the share of the machine's cores that were busy since then, and the cores by program."""
        seconds = time.perf_counter() - self._begin
        after = self._now()
        cores: Counter[str] = Counter()
        for pid, (name, ticks) in after.items():
            cores[name] += ticks - self._before.get(pid, ("", 0.0))[1]
        shares = {name: value / self._tick / seconds for name, value in cores.most_common() if value > 0}
        busy = (self._busy() - self._machine) / self._tick / seconds / (os.cpu_count() or 1)
        return busy, shares

    def _busy(self) -> float:
        user, nice, system, _idle, _wait, irq, softirq, *_ = map(
            float, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
        return user + nice + system + irq + softirq

    def _now(self) -> dict[int, tuple[str, float]]:
        """Return the ticks of each process, those of its ended children included."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                own = entry.stat().st_uid == os.getuid()
            except OSError:
                continue
            # Processes of others are left out, because a child that they reap in between may have worked long
            # before.
            if line and (name := _program(line) or ("sandboxes" if own else "")):
                found[int(entry.name)] = (name, float(sum(map(int, fields[11:15]))))
        return found


def _program(line: str) -> str:
    """Return which program of ours a command line is. It is empty for all others, also in sandboxes."""
    for mark, name in (
        ("-m rollyard_pipeline", "workers"),
        ("-m rollyard_api", "control plane"),
        ("rollyard_bench.latency_model", "model"),
        ("rollyard_bench", "benchmark"),
        ("slurm-bridge up", "bridge"),
        ("squashfuse", "FUSE"),
        ("fuse-overlayfs", "FUSE"),
        ("Apptainer", "Apptainer"),
        ("slurm", "Slurm"),
    ):
        if mark in line and "bash" not in line.split(" ")[0]:
            return name
    return ""


def instances() -> int:
    """Return the number of running sandboxes that this user has started."""
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            found += entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(
                b"Apptainer instance"
            )
        except OSError:
            continue
    return found


def connected_workers(port: int) -> int:
    """Return the number of this user's stage workers that are connected to the control plane at `port`."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid() and "rollyard_pipeline" in process.cmdline():
                found += any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp"))
    return found


def memory_available() -> int:
    """Return the bytes that programs may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


class Nodes:
    """The jobs that bring the nodes in, set by set, each kept open between two rounds."""

    def __init__(self, running: Bridge, client: httpx.AsyncClient, url: str, image: str, work: Plan) -> None:
        self._bridge = running
        self._client = client
        self._url = url
        self._image = image
        self._work = work
        self._sets: dict[str, int] = {}
        self._cursors: dict[str, str] = {}
        self._rounds = 0

    async def grow(self, nodes: int) -> float:
        """Make so many workers ready, and return the seconds that it took."""
        begin = time.perf_counter()
        before = sum(self._sets.values())
        more = nodes - before
        name = f"nodes-{nodes}"
        await submitted(self._client, _job(name, more, self._image))
        self._sets[name] = more
        port = urlsplit(self._bridge.url).port
        await self._until(lambda: connected_workers(port or 80) == nodes, f"{nodes} connected workers")
        took = time.perf_counter() - begin
        # One warm sandbox of the last round stays on each node. The number is compared exactly, so the others
        # are gone.
        await self._until(lambda: instances() == before, f"{before} warm sandboxes")
        # A worker that is connected asks for leases at once; a worker that is not would get too few.
        await asyncio.sleep(LEASING_SECONDS)
        return took

    async def round(self) -> Round:
        """Run one wave on all nodes. The sandboxes are ready before it begins."""
        self._rounds += 1
        nodes = sum(self._sets.values())
        await self._model("hold")
        for name, count in self._sets.items():
            lines = [
                f'{{"id": "r{self._rounds}-{number}", "prompt": "{name} {number}: look around.", '
                f'"test_script": "true"}}\n'
                for number in range(count * AT_ONCE)
            ]
            await posted(
                self._client,
                f"/v1/rolloutjobs/{name}/tasks",
                content="".join(lines).encode(),
                headers={"Content-Type": "application/x-ndjson"},
            )
        # The warm pool of one sandbox each is full again, so nothing is starting any more.
        await self._until(lambda: instances() == nodes * (AT_ONCE + 1), f"sandboxes of {nodes} nodes")
        for _ in range(int(ENTER_SECONDS)):
            if (waiting := await self._waiting()) == nodes * AT_ONCE:
                break
            await asyncio.sleep(1.0)
        else:
            raise ProgramFailed(
                f"{waiting} of {nodes * AT_ONCE} rollouts have entered Run: a node has too few"
            )
        begin = time.perf_counter()
        await self._model("release")
        await asyncio.sleep(2 * LATENCY)
        cpu = Cpu()
        await asyncio.sleep((self._work.turns - 3) * LATENCY)
        busy, programs = cpu.spent()
        ended = await self._delivered(begin + LATENCY + self._work.ideal + SPARE_SECONDS)
        seconds = time.perf_counter() - begin
        full = await self._model("full")
        if full["rollouts"] != nodes * AT_ONCE:
            raise ProgramFailed(
                f"{full['rollouts']} of {nodes * AT_ONCE} rollouts ran together for some turns"
            )
        tools = [one["timings"]["tool_seconds"] / len(one["turns"]) for one in ended]
        return Round(
            nodes,
            full["rate"],
            self._work.turns,
            seconds,
            median(map(_turn, ended)),
            median(tools),
            busy,
            programs,
        )

    async def _until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.perf_counter() + READY_SECONDS
        while not there():
            self._bridge.check()
            if time.perf_counter() > deadline:
                progress = {name: await counts(self._client, name) for name in self._sets}
                raise ProgramFailed(
                    f"{what}: not done within {READY_SECONDS:.0f} s; {instances()} sandboxes, {progress}"
                )
            await asyncio.sleep(0.25)

    async def _model(self, what: str) -> dict[str, Any]:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = (await http.post(f"{self._url}/{what}")).raise_for_status()
            return dict(answer.json())

    async def _waiting(self) -> int:
        """Return the number of rollouts in Run: those in their sandboxes that wait for the model's first
        answer.
        """
        return sum([(await counts(self._client, name))["run"]["active"] for name in self._sets])

    async def _delivered(self, deadline: float) -> list[dict[str, Any]]:
        """Return the trajectories of this round, once the last of them has its reward."""

        async def of_set(name: str, count: int) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            while len(found) < count:
                query = {"wait": "20"} | ({"cursor": self._cursors[name]} if name in self._cursors else {})
                answer = await self._client.get(f"/v1/rolloutjobs/{name}/trajectories", params=query)
                answer.raise_for_status()
                found += [json.loads(line) for line in answer.text.splitlines() if line]
                self._cursors[name] = answer.headers["Rollyard-Cursor"]
            return found

        try:
            async with asyncio.timeout(deadline - time.perf_counter()), asyncio.TaskGroup() as group:
                tasks = [group.create_task(of_set(name, AT_ONCE * n)) for name, n in self._sets.items()]
        except TimeoutError as error:
            progress = {name: await counts(self._client, name) for name in self._sets}
            raise ProgramFailed(f"not all rollouts have ended in time: {progress}") from error
        ended = [one for task in tasks for one in task.result()]
        if bad := [one for one in ended if one["reward"] != 1.0 or len(one["turns"]) != self._work.turns]:
            first = bad[0]
            raise ProgramFailed(
                f"{len(bad)} of {len(ended)} rollouts were not played to their end: {first['status']} "
                f"{first['reason']} {first['message'][:300]}, {len(first['turns'])} turns"
            )
        return ended


def _turn(trajectory: dict[str, Any]) -> float:
    """Return the seconds of a turn. The model's first answer was held back and is not counted."""
    turns, times = trajectory["turns"], trajectory["timings"]
    model = mean(turn["model_seconds"] for turn in turns[1:])
    return float(model + (times["tool_seconds"] + times["own_seconds"]) / len(turns))


async def _measured(settings: Settings) -> list[Measurement]:
    work, image = plan(settings), await lab.default_image()
    # There are as many rollouts as places in all, because no node may take what another one has room for.
    workers = {"cpus": 4, "memory": "3000M", "max_sandboxes": AT_ONCE}
    profile = {"partition": "debug", "time_limit": "30", "workers": workers}
    rounds: list[Round] = []
    growing: list[str] = []
    ended = ""
    async with (
        shared_folder() as folder,
        model_server(folder, LATENCY, work.turns, COMMAND) as url,
        bridge(folder, profile, ["--default-image", image, "--lease-seconds", "60"]) as running,
        running.client() as client,
    ):
        await external_pool(client, POOL, MODEL, folder / "model", [url], max_active=4096)
        nodes = Nodes(running, client, url, image, work)
        for size in work.sizes:
            if size > NODES and memory_available() < size * (AT_ONCE + 1) * INSTANCE_BYTES:
                ended = f"; {size} nodes were not tried, for want of memory"
                break
            try:
                growing.append(f"{size} in {await nodes.grow(size):.0f} s")
                rounds.append(await nodes.round())
            except (ProgramFailed, TimeoutError) as error:
                if size <= NODES:
                    raise
                ended = f"; {size} nodes: {error}"
                break
            if rounds[-1].efficiency(rounds[0]) < GOAL and size >= NODES:
                break
    one, asked = rounds[0], next(each for each in rounds if each.nodes == NODES)
    good = [each.nodes for each in rounds if each.efficiency(one) >= GOAL]
    shape = (
        f"{AT_ONCE} rollouts a node at once, each of {work.turns} turns of {LATENCY:g} s with the command "
        f"`{COMMAND}` in an Apptainer sandbox, then its test script; every node a slurmd of its own, the "
        f"worker on it a batch job of the bridge's; all of them, control plane and model on one machine of "
        f"{os.cpu_count()} cores; sandboxes are ready before the model, a server that answers after "
        f"{LATENCY:g} s, gives its first answers, spread over {LATENCY:g} s; turns are counted while all "
        f"places are taken, so the first commands, which start the sandboxes' shells, and the test scripts "
        f"count in the whole wave only: the time until the last reward was delivered"
    )
    figures = "; ".join(each.text(one) for each in rounds) + ended
    what = f"{figures}; {shape}; workers ready: {', '.join(growing)}"
    return [
        Measurement(
            "slurm_efficiency",
            asked.efficiency(one),
            Baseline(f"throughput of one node times {NODES}", 1.0),
            what,
        ),
        Measurement(
            "slurm_of_ideal",
            asked.throughput,
            Baseline("nothing but the model's time", NODES * AT_ONCE / work.ideal),
            what,
        ),
        Measurement(
            "slurm_nodes_at_95",
            float(max(good)),
            Baseline("nodes tried", float(rounds[-1].nodes)),
            f"the largest number of nodes tried that reached an efficiency of {GOAL}; {figures}; {shape}",
        ),
    ]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure as an ordinary user, in a lab of as many nodes."""
    return await lab.on_slurm(MODULE, settings, _measured, nodes=max(plan(settings).sizes))


if __name__ == "__main__":
    lab.program(MODULE, _measured)
