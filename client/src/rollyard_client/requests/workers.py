"""The calls of drivers about stage workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollyard_crds as crds

from rollyard_client.call import Call

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.workers import AssignmentOffer, AssignmentOffered, WorkerDeath, WorkerDied


def worker_died(report: WorkerDied) -> Call[WorkerDeath]:
    """Return the call with which a driver reports that a stage worker has died."""

    def parse(answer: httpx.Response) -> WorkerDeath:
        return crds.WorkerDeath.model_validate_json(answer.content)

    # The call is idempotent: a repeat finds no lease of the worker.
    return Call("POST", "/v1/workers/died", parse, body=report.model_dump_json().encode())


def offer(offered: AssignmentOffer) -> Call[AssignmentOffered]:
    """Return the call with which a driver offers a job to a ready worker."""

    def parse(answer: httpx.Response) -> AssignmentOffered:
        return crds.AssignmentOffered.model_validate_json(answer.content)

    # The call is idempotent: a repeat of the same offer changes nothing.
    return Call("POST", "/v1/workers/offers", parse, body=offered.model_dump_json().encode())
