"""The room for things of one kind in the database: a limit for each namespace, and one for all together."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_api.core.problems import QueueFull


@dataclass(frozen=True, slots=True)
class Room:
    """The largest numbers of things of one kind, so that no namespace takes the room of all others.

    Args:
        total: The largest number in all.
        each: The largest number for one namespace.
    """

    total: int
    each: int

    def without(self, part: int) -> Room:
        """Return the room that is left if one in `part` things is reserved for others."""
        return Room(self.total - self.total // part, self.each - self.each // part)

    def check(
        self, what: str, namespace: str, *, total: int, own: int, adding: int, retry_after: int
    ) -> None:
        """Check that there is room for more.

        Args:
            what: The name of the things in the plural, for messages.
            namespace: The namespace to which the new ones belong.
            total: How many there are now.
            own: How many of these belong to the namespace.
            adding: The number of new ones.
            retry_after: The seconds after which a caller should ask again.

        Raises:
            QueueFull: There is no room for so many.
        """
        if own + adding > self.each:
            where, there, most = f"namespace {namespace!r} has", own, self.each
        elif total + adding > self.total:
            where, there, most = "there are", total, self.total
        else:
            return
        raise QueueFull(
            f"{where} {there} {what}, at most {most} may be; {adding} more do not fit",
            headers={"Retry-After": str(retry_after)},
        )
