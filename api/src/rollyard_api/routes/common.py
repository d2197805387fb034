"""Shared parts of the routes: the call with its body and its object, and JSON answers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar

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
from rollyard_api.core.codec import check_plain, decode, dumps, validated
from rollyard_api.core.problems import Forbidden, Invalid
from rollyard_api.service import ControlPlane
from rollyard_api.storage.database import Transaction

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")

MAX_WAIT: Final = 60.0
"""The longest time that a long poll may take, in seconds."""

Namespace = Annotated[str, Query(max_length=63)]
DefaultNamespace = Annotated[str | None, Query(max_length=63)]
"""The namespace of a manifest that names none."""
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT)]


class StrictRoute(APIRoute):
    """A route that refuses query parameters that it does not have, so that no typing error is ignored.

    Raises:
        Invalid: There is such a parameter, and the message suggests the one that was probably meant. Or a
            parameter has a NUL, which no text in PostgreSQL can have.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler behind the check."""
        handle = super().get_route_handler()
        known = sorted(_query_names(self.dependant))

        async def checked(request: Request) -> Response:
            problems = [_unknown(name, known) for name in request.query_params if name not in known]
            values = (*request.path_params.items(), *request.query_params.multi_items())
            problems += [f"{name[:80]}: must have no NUL" for name, value in values if "\0" in value]
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


class RestCall:
    """A request that a route answers, and the control plane that answers it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.plane: ControlPlane = request.app.state.plane

    @property
    def caller(self) -> Caller:
        """The holder of the token that the request carries."""
        caller: Caller = self.request.state.caller
        return caller

    @property
    def bound(self) -> BoundJob | None:
        """The only job that the request's token may access, or None if it may access any job."""
        job: BoundJob | None = self.request.state.bound
        return job

    async def document(self) -> Any:
        """Return the decoded JSON or msgpack body, after a check of its value types and its depth."""
        document = decode(await self.request.body(), self.request.headers.get("content-type", ""))
        check_plain(document)
        return document

    async def body(self, model: type[M]) -> M:
        """Return the body as an instance of its model.

        Raises:
            Malformed: The body is not what its Content-Type says.
            Invalid: A field is wrong; `errors` names each wrong field.
        """
        return validated(model, await self.document())

    async def poll(
        self,
        namespace: str,
        topic: str,
        query: Callable[[Connection], T],
        enough: Callable[[T], bool],
        wait: float,
    ) -> T:
        """Answer a long poll of a trainer or a driver for a namespace ("" stands for all); see `Bus.until`.

        Raises:
            LimitReached: The largest number of long polls is already open.
        """
        plane, look = self.plane, partial(self.plane.look, namespace, query)
        if wait <= 0:
            return await look()
        with plane.polls.held(namespace):
            return await plane.bus.until(topic, look, enough, wait, self.request.is_disconnected)

    def refuse_other_job(self, namespace: str, name: str | None) -> None:
        """Refuse other jobs if the request's token belongs to one job's workers.

        Raises:
            Forbidden: The request names another job, or none.
        """
        job = self.bound
        if job is not None and (job.identity.namespace, job.identity.name) != (namespace, name):
            raise permissions.of_other_job(job)

    def refusal(
        self, conn: Connection, rollouts: Collection[str], sandboxes: Collection[str] = ()
    ) -> Forbidden | None:
        """Return the refusal of rollouts of other jobs, or of sandboxes of such rollouts, if there are any.

        Unknown rollouts and sandboxes belong to no job.
        """
        job = self.bound
        if job is not None and permissions.reaches_others(conn, job.identity, rollouts, sandboxes):
            return permissions.of_other_job(job)
        return None

    async def write_own(
        self,
        op: Callable[[Transaction], T],
        rollouts: Collection[str],
        sandboxes: Collection[str] = (),
        *,
        durable: bool = True,
    ) -> T:
        """Make a change of these rollouts and sandboxes, unless one of them belongs to another job.

        Raises:
            Forbidden: The token belongs to one job's workers, and one of them belongs to another job.
        """

        def checked(tx: Transaction) -> T | Forbidden:
            # A refusal is returned, because an exception would make the writer run all other ops of the batch
            # again.
            return self.refusal(tx.conn, rollouts, sandboxes) or op(tx)

        result = await self.plane.database.write(checked, durable=durable)
        if isinstance(result, Forbidden):
            raise result
        return result


class NamedCall(RestCall):
    """A call about one object, whose name and namespace the request gives."""

    def __init__(self, request: Request, namespace: str, name: str) -> None:
        super().__init__(request)
        self.namespace = namespace
        self.name = name

    async def read(
        self, query: Callable[Concatenate[Connection, str, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a query about the object, which takes the namespace and the name first."""
        return await self.plane.database.read(
            lambda conn: query(conn, self.namespace, self.name, *args, **kwargs)
        )

    async def look(
        self, query: Callable[Concatenate[Connection, str, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the same as `read`, for a query that may take long; see `ControlPlane.look`."""
        return await self.plane.look(
            self.namespace, lambda conn: query(conn, self.namespace, self.name, *args, **kwargs)
        )

    async def follow(
        self, topic: str, query: Callable[[Connection, str, str], T], enough: Callable[[T], bool], wait: float
    ) -> T:
        """Return the same as `read` once it is `enough`, at the latest after `wait` seconds."""
        return await self.poll(
            self.namespace, topic, lambda conn: query(conn, self.namespace, self.name), enough, wait
        )

    async def write(
        self, op: Callable[Concatenate[Transaction, str, str, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Change the object by an op that takes the namespace and the name first, and return its result."""
        return await self.plane.database.write(lambda tx: op(tx, self.namespace, self.name, *args, **kwargs))


# FastAPI would call functions that are not coroutines in a thread.
async def _call(request: Request) -> RestCall:
    return RestCall(request)


async def _named(request: Request, name: str, namespace: Namespace = "default") -> NamedCall:
    return NamedCall(request, namespace, name)


async def _plane(request: Request) -> ControlPlane:
    return RestCall(request).plane


Call = Annotated[RestCall, Depends(_call)]
Named = Annotated[NamedCall, Depends(_named)]
"""A call whose path, or query, has the name of an object, and whose query may have its namespace."""
Plane = Annotated[ControlPlane, Depends(_plane)]


def from_query(model: type[BaseModel]) -> Any:
    """Return a dependency whose value is a model, with a query parameter for each of its fields."""

    async def made(**values: Any) -> BaseModel:
        return model(**values)

    made.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
    return Depends(made)


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(dumps(document), status_code=status, media_type="application/json", headers=headers)


def page_answer(items: list[dict[str, Any]], more: str | None, **fields: Any) -> Response:
    """Return a page of a list, whose `metadata.continue` begins the next page unless `more` is None."""
    return answer({**fields, "items": items, "metadata": {} if more is None else {"continue": more}})


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route itself reads.

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
