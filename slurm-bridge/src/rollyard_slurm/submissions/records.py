"""Records of the submissions of a home on disk.

Each submission has one JSON file, which is written before sbatch is run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, BaseModel, PlainSerializer
from rollyard_drivers.health import BackendHealth
from rollyard_drivers.host.home import read_json, write_json
from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.scheduling.time_limits import JobEnding
from rollyard_slurm.submissions.submission import Submission, fresh

_Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]


class _StoredEnding(BaseModel):
    code: int | None
    message: str
    at: _Time | None
    process_ended: bool


class _Record(BaseModel):
    """The content of one file. Each field that has the name of a submission's field holds the same value."""

    launch: str
    job: int | None
    restarts: int
    last_end: str
    submitted_at: _Time
    unsure_until: _Time | None
    started_at: _Time | None
    stop_by: _Time | None
    draining_since: _Time | None
    retired: bool
    restart_count: int | None
    queued_at: str
    nodes: str
    ready: str
    url: str
    """The URL of a backend that serves. It is empty for all other submissions."""
    ending: _StoredEnding | None
    workload: Workload


_COPIED: Final = tuple(_Record.model_fields.keys() - {"url", "ending"})


class Records:
    """The files with the submissions of one home."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[Submission]:
        """Return the submissions of earlier runs, oldest first.

        A file that cannot be read is renamed and left out.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(_submission(_Record.model_validate(read_json(path))))
            except (KeyError, TypeError, ValueError):  # A ValidationError is a ValueError.
                path.rename(path.with_suffix(".unreadable"))
        return sorted(found, key=lambda one: one.submitted_at)

    def save(self, one: Submission) -> None:
        """Write the file of a submission, either completely or not at all.

        Raises:
            OSError: The home cannot be written.
        """
        write_json(self._folder / f"{one.launch}.json", _record(one).model_dump(mode="json"))

    def forget(self, one: Submission) -> None:
        """Remove the file of a submission."""
        (self._folder / f"{one.launch}.json").unlink(missing_ok=True)


def _record(one: Submission) -> _Record:
    """Return the record of a submission."""
    values: dict[str, Any] = {name: getattr(one, name) for name in _COPIED}
    ending = one.ending
    if ending is not None:
        values["ending"] = _StoredEnding(
            code=ending.code, message=ending.message, at=one.ended_at, process_ended=ending.process_ended
        )
    return _Record.model_validate({"ending": None, "url": one.url if one.health.warmed_up else "", **values})


def _submission(record: _Record) -> Submission:
    """Return the submission that a record describes."""
    one = fresh(record.launch, record.workload, record.restarts, record.submitted_at)
    for name in _COPIED:
        value = getattr(record, name)
        setattr(one, name, value.astimezone(UTC) if isinstance(value, datetime) else value)
    if record.url:
        # The backend served when the last bridge ended. It counts as serving until its checks say otherwise.
        one.url = record.url
        one.health = BackendHealth(url=record.url, ready=True, warmed_up=True, message="")
    if record.ending is not None:
        stored = record.ending
        one.ending = JobEnding(stored.code, stored.message, False, stored.process_ended)
        one.ended_at = None if record.ending.at is None else record.ending.at.astimezone(UTC)
    return one
