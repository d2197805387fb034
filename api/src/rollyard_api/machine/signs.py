"""What the ended rollouts and groups of a job show about its settings, in a few counts that its row keeps.

`jobs.advice` makes sentences of them. Only words that are known here are counted, so nothing that a policy or
a server has written is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, structs

from rollyard_api.machine.events import RunCounts

MAX_TOKENS: Final = "MaxTokens"
MAX_CONTEXT: Final = "MaxContext"
MAX_TURNS: Final = "MaxTurns"
RUN_TIMEOUT: Final = "RunTimeout"
LIMITS: Final = (MAX_TOKENS, MAX_CONTEXT, MAX_TURNS, RUN_TIMEOUT)
"""The reasons of truncated rollouts for which a field of the job is the limit."""
RAW: Final = "raw_logprobs"
TEMPERATURE: Final = "temperature_logprobs"
MIXED: Final = "mixed"
UNKNOWN: Final = "unknown"
_PROCESSED: Final = ("", "processed_logprobs")
_KINDS: Final = (RAW, TEMPERATURE, MIXED)


def doubtful_kind(logprobs_mode: str) -> str:
    """Return the kind of log-probabilities that may not be those of the sampling distribution, or "".

    Args:
        logprobs_mode: The mode that a trajectory names, or "" if no model was asked.
    """
    if logprobs_mode in _PROCESSED:
        return ""
    return logprobs_mode if logprobs_mode in _KINDS else UNKNOWN


class Signs(Struct, frozen=True, omit_defaults=True):
    """What the rollouts with a reward and the ended groups of a job show."""

    lowest: float | None = None
    """The lowest reward, or None before the first one."""
    highest: float | None = None
    """The highest reward, or None before the first one."""
    truncated: Mapping[str, int] = {}
    """The truncated rollouts by their limit, one of LIMITS."""
    open_thoughts: int = 0
    """The rollouts that were cut inside a thought that had not ended."""
    logprobs: Mapping[str, int] = {}
    """The rollouts whose log-probabilities may be others than those of the sampling distribution, by kind."""
    equal_groups: int = 0
    """The delivered groups without a signal. With one rollout each, that is all of them."""
    informative_groups: int = 0
    malformed_rollouts: int = 0
    """The rollouts with tool calls, all of them malformed, until a well-formed call came."""
    malformed_calls: int = 0
    """The calls of these rollouts."""
    well_formed: bool = False

    def with_rollout(self, reward: float, counts: RunCounts) -> Signs:
        """Return the signs with a rollout that has ended with a reward.

        Args:
            reward: Its reward.
            counts: What was counted in its last complete Run.
        """
        calls: dict[str, Any] = {}
        if counts.written_calls and not self.well_formed:
            calls = {
                "malformed_rollouts": self.malformed_rollouts + 1,
                "malformed_calls": self.malformed_calls + counts.malformed_calls,
                "well_formed": counts.malformed_calls < counts.written_calls,
            }
        return structs.replace(
            self,
            lowest=reward if self.lowest is None else min(self.lowest, reward),
            highest=reward if self.highest is None else max(self.highest, reward),
            truncated=_counted(self.truncated, counts.cut if counts.cut in LIMITS else ""),
            open_thoughts=self.open_thoughts + counts.open_thought,
            logprobs=_counted(self.logprobs, counts.logprobs),
            **calls,
        )

    def with_group(self, *, informative: bool) -> Signs:
        """Return the signs with a group that is delivered."""
        if informative:
            return structs.replace(self, informative_groups=self.informative_groups + 1)
        return structs.replace(self, equal_groups=self.equal_groups + 1)


NO_SIGNS: Final = Signs()
"""The signs of a new job."""


def _counted(counts: Mapping[str, int], name: str) -> Mapping[str, int]:
    return {**counts, name: counts.get(name, 0) + 1} if name else counts
