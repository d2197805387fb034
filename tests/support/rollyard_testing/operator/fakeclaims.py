"""The claims of a control plane, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from rollyard_client import DriverClient, NotFound, ServerUnavailable
from rollyard_crds.claims import Claim, ClaimList, ClaimStatus, SandboxShape, WarmWant

SHAPE = SandboxShape(
    image="python:3.12-slim", cpu=1.0, memory_bytes=1 << 30, disk_bytes=1 << 30, processes=64
)


class ClaimDesk(DriverClient):
    """The claims of a control plane."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self.now = now
        self.claims_: dict[str, Claim] = {}
        self.filed: dict[str, datetime] = {}
        self.removed: set[str] = set()
        """The failed claims of which nothing is left. Their worker may still ask why."""
        self.warm: list[WarmWant] = []
        self.revision = 1
        self.changed = asyncio.Event()
        self.told: list[tuple[str, ClaimStatus]] = []
        self.fault: Callable[[], bool] = lambda: False
        self.count = 0

    def _change(self) -> None:
        self.revision += 1
        self.changed.set()
        self.changed = asyncio.Event()

    def file(self, shape: SandboxShape = SHAPE, job: str = "job", namespace: str = "team") -> str:
        self.count += 1
        claim = Claim(
            id=f"c{self.count}",
            namespace=namespace,
            job=job,
            job_uid="plane-1",
            rollout=f"r{self.count}",
            shape=shape,
            state="Pending",
        )
        self.claims_[claim.id] = claim
        self.filed[claim.id] = self.now()
        self._change()
        return claim.id

    def release(self, claim: str) -> None:
        if claim in self.removed:
            del self.claims_[claim]
        else:
            self.claims_[claim] = self.claims_[claim].model_copy(update={"state": "Released", "secret": ""})
        self._change()

    def want(
        self, count: int, shape: SandboxShape = SHAPE, job: str = "job", namespace: str = "team"
    ) -> None:
        want = WarmWant(namespace=namespace, job=job, job_uid="plane-1", shape=shape, count=count)
        self.warm = [want] if count else []
        self._change()

    async def claims(
        self, revision: int | None = None, wait: float = 0.0, namespace: str | None = None
    ) -> ClaimList:
        if self.fault():
            raise ServerUnavailable("nobody listens")
        if revision == self.revision:
            try:
                async with asyncio.timeout(wait):
                    await self.changed.wait()
            except TimeoutError:
                pass
        return ClaimList(
            revision=self.revision,
            claims=[
                claim.model_copy(update={"age_seconds": (self.now() - self.filed[claim.id]).total_seconds()})
                for claim in self.claims_.values()
                if claim.id not in self.removed
            ],
            warm=list(self.warm),
        )

    async def put_claim_status(self, claim: str, status: ClaimStatus) -> Claim | None:
        await asyncio.sleep(0)
        if self.fault():
            raise ServerUnavailable("nobody listens")
        known = self.claims_.get(claim)
        self.told.append((claim, status))
        if status.state == "Removed":
            if known is not None:
                assert known.state in ("Released", "Failed"), "removed while it is needed"
                if known.state == "Failed":
                    self.removed.add(claim)
                else:
                    del self.claims_[claim]
                self._change()
            return None
        if known is None:
            raise NotFound("no such claim", reason="ClaimNotFound", status=404)
        if known.state == "Released" or (status.state == "Bound" and known.state != "Pending"):
            return known
        changes: dict[str, Any] = {"state": status.state, "reason": status.reason, "message": status.message}
        if status.state == "Bound":
            changes |= {"address": status.address, "secret": status.secret}
        self.claims_[claim] = known.model_copy(update=changes | {"retryable": status.retryable})
        self._change()
        return self.claims_[claim]
