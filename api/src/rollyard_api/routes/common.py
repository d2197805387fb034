"""Shared parts of the routes: the control plane, the namespace, request bodies and JSON answers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy.engine import Connection
from starlette.responses import Response
from starlette.routing import BaseRoute

from rollyard_api.access import permissions
from rollyard_api.access.bearer_tokens import Caller
from rollyard_api.access.permissions import BoundJob
from rollyard_api.core.codec import check_plain, decode, dumps
from rollyard_api.core.problems import Forbidden, Invalid
from rollyard_api.service import ControlPlane
from rollyard_api.storage.rows import ClaimRow

MAX_WAIT = 60.0
"""The longest time that a long poll may take, in seconds."""

Namespace = Annotated[str, Query(max_length=63)]
DefaultNamespace = Annotated[str | None, Query(max_length=63)]
"""The namespace of a manifest that names none."""
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT)]


class StrictRoute(APIRoute):
    """A route that refuses query parameters which it does not have, so that no typing error is ignored.

    Raises:
        Invalid: There is one. The message suggests the parameter that was probably meant.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler behind the check."""
        handle = super().get_route_handler()
        known = sorted(_query_names(self.dependant))

        async def checked(request: Request) -> Response:
            problems = [_unknown(name, known) for name in request.query_params if name not in known]
            if problems:
                raise Invalid.of(*problems)
            return await handle(request)

        return checked


def _query_names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*map(_query_names, dependant.dependencies))


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return f"{name[:80]}: unknown query parameter; {hint}"


def plane_of(request: Request) -> ControlPlane:
    """Return the control plane of this application."""
    plane: ControlPlane = request.app.state.plane
    return plane


def caller_of(request: Request) -> Caller:
    """Return the holder of the token that the request carries."""
    caller: Caller = request.state.caller
    return caller


def refuse_other_job(request: Request, namespace: str, name: str | None) -> None:
    """Refuse other jobs if the request's token belongs to one job's workers.

    Raises:
        Forbidden: The request names another job, or none.
    """
    job = bound_of(request)
    if job is not None and (job.identity.namespace, job.identity.name) != (namespace, name):
        raise _of_other(job)


async def refuse_others(request: Request, rollouts: Collection[str], sandboxes: Collection[str] = ()) -> None:
    """Refuse rollouts of other jobs, and sandboxes of such rollouts, in the same way.

    Unknown rollouts and sandboxes belong to no job.

    Raises:
        Forbidden: One of them belongs to another job.
    """
    if bound_of(request) is not None and (rollouts or sandboxes):
        found = await plane_of(request).database.read(others_among(request, rollouts, sandboxes))
        if found is not None:
            raise found


def others_among(
    request: Request, rollouts: Collection[str], sandboxes: Collection[str] = ()
) -> Callable[[Connection], Forbidden | None]:
    """Return a query for the refusal of `refuse_others`, to be asked in the transaction of the change."""
    job = bound_of(request)

    def query(conn: Connection) -> Forbidden | None:
        if job is not None and permissions.reaches_others(conn, job.identity, rollouts, sandboxes):
            return _of_other(job)
        return None

    return query


def refuse_other_claim(request: Request, claim: ClaimRow) -> None:
    """Refuse a claim of another job in the same way.

    Raises:
        Forbidden: The claim belongs to another job.
    """
    job = bound_of(request)
    if job is not None and claim.job_uid != job.uid:
        raise _of_other(job)


def bound_of(request: Request) -> BoundJob | None:
    """Return the only job that the request's token may access, or None if it may access any job."""
    job: BoundJob | None = request.state.bound
    return job


def _of_other(job: BoundJob) -> Forbidden:
    who = job.identity
    return Forbidden(f"this token is for the workers of job {who.namespace}/{who.name} only")


async def _plane(request: Request) -> ControlPlane:
    # This is not `plane_of` itself, because FastAPI calls functions that are not coroutines in a thread.
    return plane_of(request)


Plane = Annotated[ControlPlane, Depends(_plane)]


def from_query(model: type[BaseModel]) -> Any:
    """Return a dependency whose value is a model, with a query parameter for each of its fields."""

    async def made(**values: Any) -> BaseModel:
        return model(**values)

    made.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
    return Depends(made)


async def body_of(request: Request) -> Any:
    """Return the decoded JSON or msgpack body, after a check of its value types and its depth."""
    document = decode(await request.body(), request.headers.get("content-type", ""))
    check_plain(document)
    return document


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(dumps(document), status_code=status, media_type="application/json", headers=headers)


def page_answer(items: list[dict[str, Any]], more: str | None, **fields: Any) -> Response:
    """Return a page of a list, whose `metadata.continue` begins the next page unless `more` is None."""
    return answer({**fields, "items": items, "metadata": {} if more is None else {"continue": more}})


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route reads by itself.

    The model takes the place of its JSON schema until `describe_bodies` is called, because a process that
    nobody asks for its OpenAPI document need not generate the schemas.
    """
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model}}}}


def describe_bodies(routes: Iterable[BaseRoute]) -> None:
    """Replace the models in the descriptions of bodies by their JSON schemas."""
    for route in routes:
        extra = getattr(route, "openapi_extra", None) or {}
        for content in extra.get("requestBody", {}).get("content", {}).values():
            model = content["schema"]
            if isinstance(model, type) and issubclass(model, BaseModel):
                content["schema"] = model.model_json_schema()
