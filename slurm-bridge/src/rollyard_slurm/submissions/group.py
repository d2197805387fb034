"""A group holds the submissions of one workload, and decides which of them counts as the workload."""

from __future__ import annotations

from rollyard_slurm.submissions.submission import Submission


class SubmissionGroup:
    """The submissions of one workload, oldest first. At most one of them has the workload's name."""

    def __init__(self, members: list[Submission]) -> None:
        self.members = members

    @property
    def front(self) -> Submission:
        """The submission that counts as the workload.

        This is the newest one that serves. If none serves, it is the oldest one that will serve, or else one
        that is ending or has ended.
        """
        staying = [one for one in self.members if one.living and not one.stopping and not one.retired]
        serving = [one for one in staying if one.serving]
        if serving:
            return serving[-1]
        # A submission that runs, such as a backend that is unhealthy at the moment, takes precedence over one
        # that only waits.
        running = [one for one in staying if one.running]
        if running or staying:
            return (running or staying)[0]
        own = [one for one in self.members if not one.retired] or self.members
        living = [one for one in own if one.living]
        return (living or own)[-1]

    @property
    def successors(self) -> list[Submission]:
        """The submissions that have not ended and were made after the front."""
        place = self.members.index(self.front)
        return [one for one in self.members[place + 1 :] if one.living]

    @property
    def predecessors(self) -> list[Submission]:
        """The submissions that have not ended and whose place the front has taken."""
        place = self.members.index(self.front)
        return [one for one in self.members[:place] if one.living]
