"""No sandbox leaks and none is taken away: seeded workers and a driver act on the control plane.

Workers on Kubernetes lease, claim, complete, fail, die and repeat old calls; a driver binds, fails and
removes sandboxes, repeats old reports and loses its memory; rollouts are cancelled, and the control plane is
closed and opened again. All the time, a rollout has at most one sandbox after a sweep, and a sandbox is never
taken from a rollout that holds it. At the end no sandbox is left.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.machine import failure_policy
from rollyard_api.rollouts import sweeps
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import claims as claim_table
from rollyard_testing.api.plane import Worker, serving

ROLLOUTS = 12
STEPS = 160
SHAPE = {"cpu": 1.0, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30, "processes": 64}


class Driver:
    """A driver that runs sandboxes: `pods` are the ids of claims with a sandbox."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pods: set[str] = set()
        self.said: list[tuple[str, dict[str, Any]]] = []

    async def say(self, http: Any, claim: str, **status: Any) -> Any:
        self.said.append((claim, status))
        answer = await http.put(f"/v1/claims/{claim}/status", json=status)
        assert answer.status_code in (200, 204, 404), answer.text
        return answer

    async def round(self, http: Any) -> None:
        """Run one level-based pass: whatever it did before, the list alone says what is to be done."""
        listed = (await http.get("/v1/claims")).json()["claims"]
        known = {claim["id"] for claim in listed}
        self.pods &= known  # pods that belong to no claim are deleted
        for claim in listed:
            name, state = claim["id"], claim["state"]
            if self.rng.random() < 0.2:
                continue  # It does not exist yet.
            if state == "Pending" and self.rng.random() < 0.15:
                await self.say(http, name, state="Failed", reason="QuotaExceeded")
            elif state == "Pending":
                self.pods.add(name)
                bound = {"state": "Bound", "address": "tcp://10.0.0.1:7411", "secret": "s"}
                told = (await self.say(http, name, **bound)).json()
                assert told["state"] in ("Bound", "Failed", "Released")
            elif state == "Bound" and self.rng.random() < 0.05:
                await self.say(http, name, state="Failed", reason="OutOfMemory")
            elif state in ("Failed", "Released"):
                self.pods.discard(name)
                await self.say(http, name, state="Removed")

    async def repeat(self, http: Any) -> None:
        """Deliver a report late that was under way for long.

        A report of a Pending claim would be no repeat.
        """
        late = [(claim, status) for claim, status in self.said if status["state"] != "Removed"]
        if late:
            claim, status = self.rng.choice(late)
            before = await http.get(f"/v1/claims/{claim}")
            if before.status_code == 200 and before.json()["state"] in ("Pending", "Bound"):
                return
            await self.say(http, claim, **status)
            after = await http.get(f"/v1/claims/{claim}")
            assert after.status_code == before.status_code
            assert before.status_code == 404 or after.json()["state"] == before.json()["state"]


class Simulation:
    """One seeded run."""

    def __init__(self, seed: int, served: Any) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver(self.rng)
        self.workers = [Worker(served.worker, f"w{i}", "kubernetes") for i in range(3)]
        self.held: list[tuple[Any, dict[str, Any]]] = []
        self.claimed: dict[tuple[str, int], str] = {}
        self.released: set[str] = set()
        self.connect(served)

    def connect(self, served: Any) -> None:
        self.served = served
        for worker in self.workers:
            worker.http = served.worker

    async def step(self) -> None:
        drive = [self.drive] * 4 + [self.repeat, self.look, self.look]
        work = [self.lease] * 4 + [self.claim] * 5 + [self.complete] * 6 + [self.fail, self.release]
        await self.rng.choice([*drive, *work, self.die, self.expire, self.cancel, self.audit])()

    async def drive(self) -> None:
        await self.driver.round(self.served.driver)

    async def repeat(self) -> None:
        await self.driver.repeat(self.served.driver)

    async def lease(self) -> None:
        worker = self.rng.choice(self.workers)
        stages = {stage: self.rng.randint(0, 3) for stage in ("init", "run", "eval")}
        self.held += [(worker, lease) for lease in await worker.lease(**stages)]

    async def claim(self) -> None:
        """File a claim for some Init lease, or file it once more; the lease may be held or long lost."""
        inits = [lease for _, lease in self.held if lease["stage"] == "init"]
        if inits:
            await self.file(self.rng.choice(inits))

    async def file(self, lease: dict[str, Any]) -> dict[str, Any] | None:
        body = {"rollout": lease["rollout"], "token": lease["token"], "shape": SHAPE}
        answer = await self.served.worker.post("/v1/claims", json=body)
        if answer.status_code == 409:
            return None
        assert answer.status_code == 200, answer.text
        claim: dict[str, Any] = answer.json()
        key = lease["rollout"], lease["token"]
        if self.claimed.get(key) not in (None, claim["id"]):
            assert self.claimed[key] in self.released, "a claim was lost"
        self.claimed[key] = claim["id"]
        return claim

    async def complete(self) -> None:
        if not self.held:
            return
        worker, lease = self.rng.choice(self.held)
        result = worker.result(lease)
        if lease["stage"] == "init":
            claim = await self.file(lease)
            if claim is None or claim["state"] == "Pending":
                return
            self.held.remove((worker, lease))
            if claim["state"] != "Bound":
                await worker.fail(lease, claim["reason"] or "Released", counts=False)
                return
            result["sandbox"] = {
                "provider": "kubernetes",
                "id": claim["id"],
                "node": "kubernetes",
                "address": claim["address"],
                "token": claim["secret"],
            }
        else:
            self.held.remove((worker, lease))
        await worker.complete(result)

    async def fail(self) -> None:
        if self.held:
            worker, lease = self.held.pop(self.rng.randrange(len(self.held)))
            await worker.fail(lease, "Draining", counts=False, return_to=self.rng.choice([None, "init"]))

    async def release(self) -> None:
        """Let a worker give up its Init lease and its sandbox; sometimes it reports this twice."""
        inits = [item for item in self.held if item[1]["stage"] == "init"]
        if inits:
            item = self.rng.choice(inits)
            self.held.remove(item)
            claim = self.claimed.get((item[1]["rollout"], item[1]["token"]))
            for _ in range(self.rng.randint(1, 2) if claim else 0):
                assert (await self.served.worker.delete(f"/v1/claims/{claim}")).status_code == 204
                self.released.add(claim or "")
            await item[0].fail(item[1], "Draining", counts=False)

    async def die(self) -> None:
        """Let a worker vanish with all that it held. Its leases run out some day."""
        worker = self.rng.choice(self.workers)
        self.held = [item for item in self.held if item[0] is not worker]

    async def expire(self) -> None:
        await self.served.later(3600, sweeps.expire)

    async def cancel(self) -> None:
        if self.held and self.rng.random() < 0.2:
            rollout = self.rng.choice(self.held)[1]["rollout"]
            await self.served.admin.post("/v1/rolloutjobs/job/cancel", json={"rollout": rollout})

    async def look(self) -> None:
        """Check that each holder of a lease has its sandbox, or learns that it failed."""
        if not self.held:
            return
        worker, lease = self.rng.choice(self.held)
        await self.served.plane.sweep()
        told = await worker.heartbeat(lease)
        if told["lost"] or told["cancelled"]:
            return
        mine = self.claimed.get((lease["rollout"], lease["token"]))
        name = mine if lease["stage"] == "init" else lease["sandbox"]["id"]
        if name is None or name in self.released:
            return
        answer = await self.served.worker.get(f"/v1/claims/{name}")
        assert answer.status_code == 200, "the sandbox of a held lease was forgotten"
        assert answer.json()["state"] != "Released", "the sandbox of a held lease was given away"

    async def audit(self) -> None:
        await self.served.plane.sweep()
        listed = (await self.served.driver.get("/v1/claims")).json()["claims"]
        owners = [claim["rollout"] for claim in listed if claim["state"] != "Released"]
        assert len(owners) == len(set(owners)), "a rollout has two sandboxes"


async def _stored(served: Any) -> int:
    def op(tx: Transaction) -> int:
        count: int = tx.conn.execute(sa.select(sa.func.count()).select_from(claim_table)).scalar_one()
        return count

    count: int = await served.plane.database.write(op)
    return count


@pytest.mark.parametrize("end", ["finish", "cancel", "delete"])
@pytest.mark.parametrize("seed", range(2))
async def test_no_sandbox_leaks(seed: int, end: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_policy, "MAX_EXPIRIES", 1000)
    tasks = [{"id": f"t{i}", "prompt": "p"} for i in range(ROLLOUTS)]
    simulation: Simulation | None = None
    for _ in range(2):
        async with serving(settings) as served:
            if simulation is None:
                await served.submit(tasks={"inline": tasks})
                simulation = Simulation(seed * 3 + len(end), served)
            simulation.connect(served)
            for _ in range(STEPS // 2):
                await simulation.step()
    assert simulation is not None
    async with serving(settings) as served:
        simulation.connect(served)
        assert len(simulation.claimed) > ROLLOUTS / 2, "the run says little: hardly anything was claimed"
        if end == "finish":
            await simulation.expire()
            await simulation.workers[0].finish_all()
        elif end == "cancel":
            await served.driver.post("/v1/rolloutjobs/job/cancel", json={})
        else:
            await served.driver.delete("/v1/rolloutjobs/job")
        await served.plane.sweep()
        listed = (await served.driver.get("/v1/claims")).json()["claims"]
        assert {claim["state"] for claim in listed} <= {"Released"}
        for _ in range(50):
            await simulation.drive()
            if not simulation.driver.pods and not await _stored(served):
                break
        assert simulation.driver.pods == set()
        assert await _stored(served) == 0
