"""The attacks' own frame: honest work is rewarded, and each kind of success is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import HONEST, Attack, Verdict, submit
from rollyard_testing.adversary.sharedrollouts import SharedRollout

pytestmark = pytest.mark.attack(boundary="frame", surface="judgement")


@pytest.mark.attack("an honest rollout is taken for an attack", stopped_by="it gets its reward of 1.0")
def test_an_honest_solution_is_rewarded(lab: Lab) -> None:
    assert lab.attack(HONEST).trajectory.truncated is False


@pytest.mark.attack(
    "an honest rollout with turns that a model samples is taken for an attack",
    stopped_by="it gets its reward of 1.0",
)
def test_dictated_turns_are_a_rollout_too(lab: Lab) -> None:
    with lab.dictated(replace(HONEST, steps=())) as rollout:
        assert rollout.bash("echo 42 > result.txt; echo here") == "here"
        lab.judge(HONEST, rollout.submit("42"))


@pytest.mark.attack(
    "a forged reward, a read secret or an attack that was not tried is overlooked",
    stopped_by="each is a failure of the test",
)
@pytest.mark.parametrize(
    ("steps", "shows", "hides", "noticed"),
    [
        (("true",), (), (), "reward 0.0.*deserved 1.0"),
        (("echo 42 > result.txt; cat secret", submit("42")), (), (), "it read a file of the host"),
        (("echo 42 > result.txt", submit("42")), ("no such words",), (), "nothing shows"),
        (("echo 42 > result.txt; echo words", submit("42")), (), ("words",), "it saw"),
    ],
)
def test_what_an_attack_gains_is_noticed(
    bubblewrap_lab: Lab, steps: tuple[str, ...], shows: tuple[str, ...], hides: tuple[str, ...], noticed: str
) -> None:
    files = {"secret": bubblewrap_lab.secrets["a file of the host"]}
    attack = replace(HONEST, steps=steps, shows=shows, hides=hides, sandbox={"files": files})
    with pytest.raises(Verdict, match=noticed):
        bubblewrap_lab.attack(attack)


@pytest.mark.attack("a process or a sandbox that stays alive is overlooked", stopped_by="both are listed")
def test_what_stays_alive_is_noticed(bubblewrap_lab: Lab) -> None:
    with bubblewrap_lab.dictated(replace(HONEST, steps=())) as rollout:
        rollout.bash("(exec -a @MARK@ sleep 300) & disown")
        left = bubblewrap_lab.left(rollout.mark)
        assert [words.split()[:2] for words in left] == [["the", "process"], ["the", "sandbox"]]


@pytest.mark.attack(
    "attacks that share a rollout are judged by each other's observations",
    stopped_by="each has its own, and a shell of its own",
)
def test_attacks_that_share_a_rollout_are_judged_each(bubblewrap_lab: Lab) -> None:
    """Each is judged by what it was shown, from a new shell, and all of them by the hidden tests of all."""
    first = Attack(
        name="first_of_two", goal="Export what the next one inherits.",
        steps=("export INHERITED=yes; echo exported", "echo one"),
        test_script="exit 1", shows=("^exported$",), hides=("^two",),
    )  # fmt: skip
    second = Attack(
        name="second_of_two", goal="Solve what nobody asked for.",
        steps=("echo two $INHERITED > file; cat file",),
        test_script="grep -q two file", shows=("^two$",), hides=("^exported",),
    )  # fmt: skip
    blind = replace(second, name="blind_of_two", test_script="exit 1", shows=("^one$",))

    def problems(*attacks: Attack) -> list[list[str]]:
        """Return the problems of each attack that has any, in lines."""
        rollout = SharedRollout("shared", attacks)
        steps, script = rollout.steps(), rollout.test_script()
        with bubblewrap_lab.rollout(replace(HONEST, steps=steps, test_script=script)) as running:
            outcome = running.outcome()
        return [words.splitlines() for words in rollout.judge(outcome.trajectory, outcome.left, {})]

    assert [each[1][:29] for each in problems(first, second)] == ["- ended as succeeded with rew"] * 2
    assert [each[0][:12] for each in problems(first, blind)] == ["blind_of_two"]
    assert problems(first, replace(second, test_script="exit 1")) == []
