"""What a driver remembers of workloads that it stops in order to start them again."""

from __future__ import annotations

from rollyard_drivers.reconcile.plan import Launch, Stop

REMEMBERED = 1024


class Replacements:
    """Keeps the counts of restarts over a stop.

    One that has ended by itself is still observed when it is launched again; of one that was stopped,
    because it did not answer, nothing is left at that time. In memory only: a driver that is itself restarted
    in between counts from 0 again.
    """

    def __init__(self) -> None:
        self._launches: dict[str, Launch] = {}

    def note(self, stop: Stop) -> None:
        """Notes that a workload is being stopped: for good, or to be launched again as the stop says."""
        self._launches.pop(stop.name, None)
        if stop.again is not None:
            self._launches[stop.name] = stop.again
        while len(self._launches) > REMEMBERED:
            self._launches.pop(next(iter(self._launches)))

    def counted(self, launch: Launch) -> Launch:
        """The launch of a plan, with what was noted when its predecessor was stopped."""
        noted = self._launches.get(launch.workload.name)
        # Another spec may well run: it does not pay for the failures of the last one.
        if noted is None or launch.restarts or noted.workload.spec_hash != launch.workload.spec_hash:
            return launch
        return Launch(launch.workload, noted.restarts, noted.last_end)

    def launched(self, name: str) -> None:
        """Forgets what was noted: it is kept with the new workload now."""
        self._launches.pop(name, None)
