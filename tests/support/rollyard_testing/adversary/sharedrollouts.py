"""Attacks that share a rollout, and with it a sandbox, because a pod for each of them would take long.

A policy may try one attack after the other in any case. Each begins in a new shell and is judged by its own
observations, and the hidden test asks all of their questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollyard_crds.task import FunctionCall
from rollyard_crds.trajectory import Trajectory

from rollyard_testing.adversary.attacks import Attack, Outcome, Step, Verdict, judge

BETWEEN = ("kill -9 $$", "cd /work")
"""The commands between two attacks: variables, functions and traps of a session end with its shell, but its
folder stays.
"""


@dataclass(frozen=True, slots=True)
class SharedRollout:
    """One rollout, and the attacks that it plays in this order.

    An attack that hands in an answer, or that writes the reward file in its hidden test, is the last one.
    """

    name: str
    attacks: tuple[Attack, ...]

    def __post_init__(self) -> None:
        for attack in self.attacks[:-1]:
            calls = [step.name for step in attack.steps if isinstance(step, FunctionCall)]
            assert "submit" not in calls, f"{attack.name} ends the rollout, and must be the last one"
            assert '> "$ROLLYARD_REWARD_FILE"' not in attack.test_script, (
                f"{attack.name} must be the last one"
            )
        assert len({attack.reward for attack in self.attacks}) == 1, "one rollout has one reward"

    @property
    def reward(self) -> float:
        """Return the reward that the rollout deserves."""
        return self.attacks[0].reward

    def steps(self) -> tuple[Step, ...]:
        """Return the turns of the policy."""
        turns: list[Step] = []
        for attack in self.attacks:
            turns += [*attack.steps, *BETWEEN]
        return tuple(turns[: -len(BETWEEN)])

    def sandbox(self) -> dict[str, Any]:
        """Return the task's `sandbox`, which has the environment variables of all attacks.

        Raises:
            AssertionError: Two attacks give a variable different values, or one needs more than variables.
        """
        env: dict[str, str] = {}
        for attack in self.attacks:
            assert attack.sandbox.keys() <= {"env"}, f"{attack.name} needs a sandbox of its own"
            for name, value in attack.sandbox.get("env", {}).items():
                assert env.setdefault(name, value) == value, f"{attack.name} needs another {name}"
        return {"env": env} if env else {}

    def test_script(self) -> str:
        """Return the hidden test, which passes if that of any attack does."""
        tries = (f"(\n{attack.test_script}\n) && exit 0\n" for attack in self.attacks)
        return "".join(tries) + "exit 1\n"

    def observed(self, outcome: Outcome) -> Iterator[tuple[Attack, Outcome]]:
        """Yield each attack with what it was shown."""
        begin = 0
        for attack in self.attacks:
            end = begin + len(attack.steps)
            yield attack, replace(outcome, observations=outcome.observations[begin:end])
            begin = end + len(BETWEEN)

    def judge(self, trajectory: Trajectory, left: Sequence[str], secrets: Mapping[str, str]) -> list[str]:
        """Return what the attacks have gained, in words.

        If it is empty, they gained nothing, and each was really tried.
        """
        shown = tuple(each.content for each in trajectory.messages if each.role == "tool")
        problems = []
        for attack, outcome in self.observed(Outcome(trajectory, shown, tuple(left))):
            try:
                judge(attack, outcome, dict(secrets))
            except Verdict as verdict:
                problems.append(str(verdict))
        return problems
