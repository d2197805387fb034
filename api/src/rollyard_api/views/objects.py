"""The objects that the calls of people share in one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.machine.states import ENDED
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.views.fleet.feed import FleetFeed
from rollyard_api.views.fleet.reader import FleetReader
from rollyard_api.views.fleet.workers import SeenWorkers
from rollyard_api.views.job.folding import Folding
from rollyard_api.views.rollout.live import Watching
from rollyard_api.views.rollout.records import KeptRecords
from rollyard_api.views.rollout.texts import TokenTexts

HEARD_SECONDS: Final = 5.0
"""The time between two writes that a worker is still heard, in seconds."""
PARSE_SECONDS: Final = 30.0
_ENDS: Final = frozenset(state.status for state in ENDED)


class ViewObjects:
    """What is kept in memory for those who look.

    Args:
        database: The database.
        disk: The threads in which folders of models are read.
        fleet_seconds: The age up to which one read of the fleet is given to all.
    """

    def __init__(self, database: Database, disk: Bulkhead, fleet_seconds: float) -> None:
        self.fleet = FleetReader(database, fleet_seconds)
        self.feed = FleetFeed(self.fleet, database)
        self.folding = Folding(database)
        self.record_threads = Bulkhead("reading of records", threads=2, waiting=256, seconds=PARSE_SECONDS)
        """The threads in which records are parsed for those who look at a piece of one."""
        self.kept_records = KeptRecords()
        self.token_texts = TokenTexts(disk)
        self.watching = Watching(alone=database.sqlite)
        self.seen_workers = SeenWorkers(database, HEARD_SECONDS)

    def after_commit(self, tx: Transaction) -> None:
        """Note what a transaction that has just been committed ended, and which workers had trouble."""
        if tx.events:
            self.folding.note(job_id for job_id, data in tx.events if data["status"] in _ENDS)
        if tx.troubles:
            self.seen_workers.troubled(tx.troubles, tx.now)

    def rounds(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Return the work that is repeated in the background, each with a name for the log."""
        return [
            ("statistics", self.folding.round),
            ("workers", self.seen_workers.write),
            ("events of the fleet", self.feed.tick),
        ]

    def close(self) -> None:
        """Stop the threads, without waiting for those that hang."""
        self.record_threads.close()
