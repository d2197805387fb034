"""The calls to a cluster that the operator needs, which a real API server and a fake one answer."""

from __future__ import annotations

from typing import Protocol

from rollyard_operator.kube.labels import Object


class Kube(Protocol):
    """The calls to a cluster that the operator's loops need. All methods raise KubeError."""

    async def apply(self, obj: Object, *, force: bool = True) -> Object:
        """Create or change an object by server-side apply."""
        ...

    async def create(self, obj: Object) -> Object:
        """Create an object. Raise KubeConflict if the name is taken."""
        ...

    async def delete(
        self, kind: str, namespace: str, name: str, *, grace: int | None = None, uid: str | None = None
    ) -> None:
        """Delete an object. It is no error if the object is gone or has another uid."""
        ...

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        ...

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Object]:
        """Return all objects of a namespace, or of all namespaces if `namespace` is None."""
        ...

    async def patch(
        self,
        kind: str,
        namespace: str,
        name: str,
        body: Object,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Object | None:
        """Apply a merge patch, and return None if the object is gone or has another uid.

        Raises KubeConflict if the object has another resource version than the given one.
        """
        ...

    async def patch_status(
        self, kind: str, namespace: str, name: str, status: Object, *, version: str | None = None
    ) -> Object | None:
        """Apply a merge patch to the status subresource, and return None if the object is gone.

        Raises KubeConflict if the object has another resource version than the given one. The API server
        checks no uid when it writes a status.
        """
        ...

    async def event(self, obj: Object, type: str, reason: str, message: str) -> None:
        """Create an event about an object. `type` is `Normal` or `Warning`."""
        ...
