"""The calls of stage workers beside their leases: apart from the others, whose models they never need."""

from __future__ import annotations

import httpx
from rollyard_crds.claims import Claim, ClaimRequest
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_client.call import Call, as_json, nothing, segment

CLAIMS = "/v1/claims"


def job_spec(namespace: str, name: str, uid: str | None) -> Call[RolloutJobSpec]:
    """Return the call that reads the spec of a job; with `uid` only of the job that has this uid."""

    def parse(answer: httpx.Response) -> RolloutJobSpec:
        return RolloutJobSpec.model_validate(as_json(answer)["spec"])

    return Call("GET", "/v1/leases/job", parse, query={"namespace": namespace, "name": name, "uid": uid})


def claim_of(answer: httpx.Response) -> Claim:
    """The claim that an answer holds."""
    return Claim.model_validate_json(answer.content)


def file_claim(asked: ClaimRequest) -> Call[Claim]:
    """Return the call that claims a sandbox for a leased rollout."""
    # The same rollout and token again is the same claim.
    return Call("POST", CLAIMS, claim_of, body=asked.model_dump_json().encode(), wait=asked.wait)


def claim(name: str, wait: float) -> Call[Claim]:
    """Return the call that reads a claim; it waits up to `wait` seconds for its sandbox."""
    return Call("GET", f"{CLAIMS}/{segment(name)}", claim_of, query={"wait": wait}, wait=wait)


def release_claim(name: str) -> Call[None]:
    """Return the call that gives a claimed sandbox back."""
    return Call("DELETE", f"{CLAIMS}/{segment(name)}", nothing)
