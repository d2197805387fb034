"""The restart counts that a driver remembers for workloads that it stops in order to start them again."""

from __future__ import annotations

from rollyard_drivers.reconcile.plan import Launch, Stop

REMEMBERED = 1024


class Replacements:
    """A record that keeps the counts of restarts while workloads are stopped.

    A workload that has ended by itself is still observed when it is launched again. Of a workload that was
    stopped because it did not answer, nothing is left at that time. The record is in memory only, so a driver
    that is restarted in the meantime counts from 0 again.
    """

    def __init__(self) -> None:
        self._launches: dict[str, Launch] = {}

    def note(self, stop: Stop) -> None:
        """Note that a workload is being stopped.

        It is stopped either for good or to be launched again, as the stop says.
        """
        self._launches.pop(stop.name, None)
        if stop.again is not None:
            self._launches[stop.name] = stop.again
        while len(self._launches) > REMEMBERED:
            self._launches.pop(next(iter(self._launches)))

    def counted(self, launch: Launch) -> Launch:
        """Return the launch of a plan, completed with what was noted when its predecessor was stopped."""
        noted = self._launches.get(launch.workload.name)
        # Another spec may run without failing, so the failures of the previous spec do not count.
        if noted is None or launch.restarts or noted.workload.spec_hash != launch.workload.spec_hash:
            return launch
        return Launch(launch.workload, noted.restarts, noted.last_end)

    def launched(self, name: str) -> None:
        """Discard what was noted, because it is now kept with the new workload."""
        self._launches.pop(name, None)
