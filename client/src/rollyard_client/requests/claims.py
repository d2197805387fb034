"""The calls of drivers on sandbox claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, segment

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.claims import Claim, ClaimList, ClaimStatus

CLAIMS: Final = "/v1/claims"


def claims(namespace: str | None, revision: int | None, wait: float) -> Call[ClaimList]:
    """Return the call that lists sandbox claims.

    It waits up to `wait` seconds for an answer that differs from that of `revision`.
    """

    def parse(answer: httpx.Response) -> ClaimList:
        return crds.ClaimList.model_validate_json(answer.content)

    query = {"namespace": namespace, "revision": revision, "wait": wait}
    return Call("GET", CLAIMS, parse, query=query, wait=wait)


def put_claim_status(name: str, status: ClaimStatus) -> Call[Claim | None]:
    """Return the call that reports the state of a claim. Its result is None if the claim is gone."""

    def parse(answer: httpx.Response) -> Claim | None:
        return None if answer.status_code == 204 else crds.Claim.model_validate_json(answer.content)

    body = status.model_dump_json().encode()
    return Call("PUT", f"{CLAIMS}/{segment(name)}/status", parse, body=body)
