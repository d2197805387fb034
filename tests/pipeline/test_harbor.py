"""The handler `harbor` over the example's task folders, and over folders that break or bend the rules."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_pipeline.errors import PipelineError, RewardUnusable, SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.harbor.handler import HarborHandler
from rollyard_pipeline.handlers.harbor.rewards import below, combined, read_rewards
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack, read_folder
from rollyard_testing.pipeline.stagelab import SMALL, StageLab, stage_lab
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif

EXAMPLES = Path(__file__).parents[2] / "examples/harbor"
TOML = '[environment]\nnetwork_mode = "no-network"\n'
SOLVED = "[ -f done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def example(name: str) -> Task:
    row = {"path": name, "task_binary": pack(read_folder(EXAMPLES / "tasks" / name))}
    return Task.model_validate(HarborFormat().task(Row(row, 1)))


def folder(test: str = SOLVED, toml: str = TOML, **files: str) -> Task:
    texts = {"task.toml": toml, "instruction.md": "Make the file done.", "tests/test.sh": test, **files}
    contents = {path: (text.encode(), False) for path, text in texts.items() if text}
    row = {"path": "task", "task_binary": pack(contents)}
    return Task.model_validate(HarborFormat().task(Row(row, 1)))


@pytest.fixture
async def lab(bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StageLab]:
    async with stage_lab("bubblewrap", tmp_path_factory.mktemp("h")) as lab:
        yield lab


@pytest.fixture(params=["bubblewrap", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def each_lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[StageLab]:
    """Provide sandboxes of each kind that isolates on one node."""
    request.getfixturevalue(f"{request.param}_works")
    options: dict[str, Any] = {}
    if request.param == "apptainer":
        image = make_sif(make_image(tmp_path_factory.mktemp("image") / "root"))
        options["apptainer"] = ApptainerOptions(default_image=str(image))
    async with stage_lab(request.param, tmp_path_factory.mktemp("h"), **options) as lab:
        yield lab


PLANTED = ["echo '{\"reward\": 1}' > /logs/verifier/reward.json", "echo 1 > /logs/verifier/reward.txt"]


async def test_the_example(each_lab: StageLab) -> None:
    """Each task has the same rewards in all kinds of sandboxes: solved, untouched, and planted."""
    for name in ("planted", "separate", "single", "steps"):
        solved = await each_lab.play(example(name))
        assert (solved.reward, solved.reward_reason) == (1.0, ""), (name, each_lab.observed)
        for steps in ([[]], [PLANTED, PLANTED, PLANTED]):
            found = await each_lab.play(example(name), steps)
            assert (found.reward, found.reward_reason) == (0.0, ""), name


async def test_steps(lab: StageLab) -> None:
    """The oracle solves three of them; a policy that fails the second one does not read the third one."""
    task = example("steps")
    solved = await lab.play(task)
    assert solved.reward == 1.0, lab.observed
    assert solved.reward_components == dict.fromkeys(
        ("words", "step.first", "step.second", "step.third"), 1.0
    )
    first = await lab.play(task, [["echo apple > words.txt"], ["ls -A /tests /logs/verifier /solution"]])
    assert (first.reward, len(lab.said)) == (0.5, 2)
    assert lab.observed[-1].split() == ["/logs/verifier:", "/solution:", "/tests:"]
    idle = await lab.play(task, [[]])
    assert (idle.reward, len(lab.said)) == (0.0, 1)


async def test_only_artifacts_reach_a_separate_verifier(lab: StageLab) -> None:
    answer = "cd /app; echo 42 > answer.txt; touch other; ln -s /etc/passwd link"
    found = await lab.play(example("separate"), [[answer, "echo n > /logs/artifacts/notes.txt"]])
    assert (found.reward, found.reward_components) == (1.0, {"answer": 1.0, "notes": 1.0, "alone": 1.0})


async def test_tests_find_what_they_need(lab: StageLab) -> None:
    """They get their variables and the modules beside them, and begin in the working folder."""
    toml = (
        'artifacts = []\n[verifier]\nenv = {A = "${B:-b}"}\n[environment]\nworkdir = "/data"\n'
        'env = {C = "c"}\n[environment.healthcheck]\ncommand = "test -w /data"\n'
    )
    test = """
python3 - <<'PY' > /logs/verifier/reward.json
import json, os, helper
seen = os.environ["A"] + os.environ["C"] + os.getcwd()
print(json.dumps({"reward": 0.25, "seen": float(seen == helper.WANTED)}))
PY
echo people see this
exit 3
"""
    task = folder(test, toml, **{"tests/helper.py": "WANTED = 'bc/data'"})
    found = await lab.play(task, [["pwd"]])
    assert (found.reward, found.reward_components) == (0.25, {"seen": 1.0})
    assert found.reward_output == "people see this"
    assert lab.observed == ["/data"]


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("true", "wrote neither reward.json nor reward.txt; test.sh exited with 0: it printed nothing"),
        ("echo no | tee /logs/verifier/reward.txt; exit 4", "no number; test.sh exited with 4: no"),
        ("rm -r /logs/verifier", "neither"),
    ],
)  # fmt: skip
async def test_a_task_without_a_reward_fails(lab: StageLab, test: str, reason: str) -> None:
    """It gives none where no policy has been, either, so this is no policy's fault."""
    with pytest.raises(RewardUnusable, match=reason):
        await lab.play(folder(test), [[]])


async def test_limits_of_time(lab: StageLab) -> None:
    slow = await lab.play(folder("sleep 60", TOML + "[verifier]\ntimeout_sec = 0.5\n"), [[]])
    assert (slow.reward, slow.reward_reason) == (0.0, "TestTimeout")
    # The agent's limit ends its turn, and what it has done is scored.
    late = await lab.play(folder(SOLVED, TOML + "[agent]\ntimeout_sec = 1\n"), [["touch done", "sleep 60"]])
    assert late.reward == 1.0


@pytest.mark.parametrize(
    ("toml", "files", "error", "words"),
    [
        (TOML + "memory_mb = 4096\n", {}, TaskInvalid, "sandbox.resources.memory gives .*at least 4096Mi"),
        (TOML + "cpus = 64\n", {}, TaskInvalid, "environment.cpus .* sandbox.resources.cpu gives .*least 64"),
        (TOML + "storage_mb = 9999\n", {}, TaskInvalid, "sandbox.resources.disk gives .*at least 9999Mi"),
        (TOML + "[environment.healthcheck]\ncommand = 'false'\nretries = 1\n", {}, SetupFailed, "health"),
    ],
)  # fmt: skip
async def test_what_a_job_lacks_is_named(
    lab: StageLab, toml: str, files: dict[str, str], error: type[PipelineError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await lab.play(folder(SOLVED, toml, **files), [[]])


STEPS = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\nmin_reward = 1\n[[steps]]\nname = "c"\n'


def steps_folder(strategy: str) -> Task:
    files: dict[str, str] = {}
    for name in "abc":
        files[f"steps/{name}/instruction.md"] = f"Make the file {name}."
        files[f"steps/{name}/tests/test.sh"] = f"[ -f {name} ]; echo $((1 - $?)) > /logs/verifier/reward.txt"
    return folder("", f'multi_step_reward_strategy = "{strategy}"\n' + STEPS, **files)


@pytest.mark.parametrize(
    ("strategy", "steps", "reward"),
    [
        ("mean", [["touch a"], ["touch b"], []], 2 / 3),
        ("final", [["touch a"], ["touch b"], []], 0.0),
        ("final", [[], ["touch b"], ["touch c"]], 1.0),
        ("mean", [["touch a"], []], 0.5),  # The third step is not to be played, so it does not count.
        ("final", [["touch a"], []], 0.0),
    ],
)
async def test_rewards_of_steps(lab: StageLab, strategy: str, steps: list[list[str]], reward: float) -> None:
    found = await lab.play(steps_folder(strategy), steps)
    assert found.reward == pytest.approx(reward)


SETUP = "#!/bin/bash\n[ ! -e broken ] && touch ready\n"


def prepared_folder(second: str = "") -> Task:
    """Return a task of two steps. The second one needs what its setup script makes."""
    files = {f"steps/{name}/instruction.md": "Go on." for name in "ab"}
    files["steps/a/tests/test.sh"] = second + "echo 1 > /logs/verifier/reward.txt"
    files["steps/b/tests/test.sh"] = (
        "[ -f ready ] && [ ! -e setup.sh ]; echo $((1 - $?)) > /logs/verifier/reward.txt"
    )
    files["steps/b/workdir/setup.sh"] = SETUP
    steps = "".join(f'[[steps]]\nname = "{name}"\n[steps.verifier]\ntimeout_sec = 1\n' for name in "ab")
    return folder("", TOML + steps, **files)


async def test_a_policy_that_breaks_the_next_steps_setup_keeps_what_it_has(lab: StageLab) -> None:
    """Only what it has not reached counts as 0. A setup script that breaks alone is another matter."""
    good = await lab.play(prepared_folder(), [[], []])
    assert (good.reward, good.reward_reason, len(lab.said)) == (1.0, "", 2)
    broken = await lab.play(prepared_folder(), [["touch broken"], []])
    assert (broken.reward, broken.reward_reason, len(lab.said)) == (0.5, "SandboxSabotaged", 1)
    assert broken.reward_components == {"step.a": 1.0, "step.b": 0.0}


async def test_the_reason_of_an_earlier_step_stays(lab: StageLab) -> None:
    slow = await lab.play(prepared_folder("sleep 60\n"), [[], []])
    assert (slow.reward, slow.reward_reason, len(lab.said)) == (0.5, "TestTimeout", 2)
    assert slow.reward_components == {"step.a": 0.0, "step.b": 1.0}


async def test_a_setup_script_that_breaks_alone_is_named(lab: StageLab) -> None:
    files = {"steps/a/instruction.md": "Go on.", "steps/a/tests/test.sh": "true"}
    files["steps/a/workdir/setup.sh"] = "echo no disk; exit 4"
    with pytest.raises(SetupFailed, match=r"setup\.sh exited with 4: no disk"):
        await lab.play(folder("", TOML + '[[steps]]\nname = "a"\n', **files), [[]])


@pytest.mark.parametrize("size", [65_536, 65_537])
async def test_a_reward_file_has_a_largest_size(lab: StageLab, size: int) -> None:
    test = f"printf '%{size}s' 0.5 > /logs/verifier/reward.txt"
    if size == 65_536:
        assert (await lab.play(folder(test), [[]])).reward == 0.5
    else:
        with pytest.raises(RewardUnusable, match=r"reward\.txt is longer than 65536 bytes"):
            await lab.play(folder(test), [[]])


async def test_steps_have_no_network(lab: StageLab) -> None:
    """The tests of earlier steps run in Run, and must not have a network that a policy's files could use."""
    network = {"network": "allowlist", "allowedHosts": ["example.org"], **SMALL}
    with pytest.raises(TaskInvalid, match="a task of several steps needs"):
        await lab.play(steps_folder("mean"), [[]], sandbox=network)


async def test_a_policy_that_ends_early_gets_nothing_for_later_steps(lab: StageLab) -> None:
    task = steps_folder("mean")
    stages = {"run": {"timeoutSeconds": 4}, "eval": {"timeoutSeconds": 20}}
    found = await lab.play(task, [["touch a", "sleep 60"]], stages=stages)
    assert (found.reward, len(lab.said)) == (pytest.approx(1 / 3), 1)


LARGEST = json.dumps({"reward": 1, **{f"{number:0128}": 1 for number in range(63)}}).encode()
"""The largest number of the longest keys."""


MANY = json.dumps({**{f"t{number}": 1 for number in range(100)}, "reward": 0.5}).encode()
NOTED = [*(f"t{number}" for number in range(64))]


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards"),
    [
        (b'{"reward": 0.5, "x": 2}', b"1", {"reward": 0.5, "x": 2.0}),
        (b'{"score": 1}', None, {"score": 1.0, "reward": 1.0}),
        (None, b" 0.25\n", {"reward": 0.25}),
        (None, b"-3", {"reward": -3.0}),
        (None, b"-1e6", {"reward": -1e6}),
        (b'{"a": 2, "reward": 1000000}', None, {"a": 2.0, "reward": 1e6}),
        (LARGEST, None, dict.fromkeys(json.loads(LARGEST), 1.0)),
        (b"0.5", None, {"reward": 0.5}),
        (b" 1\n", b"0", {"reward": 1.0}),
        # What is no number is a diagnostic.
        (b'{"reward": 1.0, "resolved": true}', None, {"reward": 1.0}),
        (b'{"reward": 1, "why": "no", "cases": {"a": [1]}, "left": null, "l": []}', None, {"reward": 1.0}),
        (b'{"accuracy": 0.9, "resolved": false}', None, {"accuracy": 0.9, "reward": 0.9}),
        # A report without `reward` stands beside the number in reward.txt.
        (b'{"accuracy": 0.9, "format": 1.0}', b"0.7", {"accuracy": 0.9, "format": 1.0, "reward": 0.7}),
        (b'{"resolved": true}', b"1", {"reward": 1.0}),
        (b"{}", b"1", {"reward": 1.0}),
    ],
)
def test_reward_files(as_json: bytes | None, as_text: bytes | None, rewards: dict[str, float]) -> None:
    found = read_rewards(as_json, as_text)
    assert (found.rewards, found.note) == (rewards, "")


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards", "note"),
    [
        (b"", b"1", {"reward": 1.0}, "reward.json is not JSON, so reward.txt counts"),
        (b"[" * 60_000, b"0.5", {"reward": 0.5}, "reward.json is not JSON, so reward.txt counts"),
        (b'{"reward": 0,', b"1", {"reward": 1.0}, "reward.json is not JSON, so reward.txt counts"),
        (b"\xff", b"1", {"reward": 1.0}, "reward.json is not JSON, so reward.txt counts"),
        ("it is a folder", b"1", {"reward": 1.0}, "it is a folder, so reward.txt counts"),
        (b'{"reward": 1, "reward": 0}', b"0", {"reward": 0.0}, "reward.json has a key twice, so reward.txt"),
        (b'{"reward": 1, "a": Infinity}', b"1", {"reward": 1.0}, "reward.json: no components are 'a'"),
        (b'{"reward": 1, "ns": 5000000}', None, {"reward": 1.0}, "reward.json: no components are 'ns'"),
        (b'{"reward": 1, "' + b"a" * 129 + b'": 1}', None, {"reward": 1.0}, "no components are 'aaa"),
        (b'{"reward": 1, "b\\u0007": 1, "c": 1}', None, {"reward": 1.0, "c": 1.0}, r"are 'b\x07'"),
        (
            MANY,
            None,
            {"reward": 0.5, **dict.fromkeys(NOTED, 1.0)},
            "'t64', 't65', 't66', 't67', 't68', 't69'",
        ),
    ],
)
def test_what_of_reward_files_is_left_out(
    as_json: bytes | str, as_text: bytes | None, rewards: dict[str, float], note: str
) -> None:
    found = read_rewards(as_json, as_text)
    assert found.rewards == rewards
    assert note in found.note
    assert found.note.isprintable()
    assert len(found.note) < 1500


SEVERAL = b'{"accuracy": 0.9, "format": 1.0, "reward": 0.1}'


@pytest.mark.parametrize(
    ("as_json", "as_text", "rewards"),
    [
        (SEVERAL, b"0", {"accuracy": 0.9, "format": 1.0, "reward": 0.9}),
        (b'{"accuracy": 0.5, "why": "x"}', None, {"accuracy": 0.5, "reward": 0.5}),
        (b"0.25", None, {"reward": 0.25}),
        (None, b"0.25", {"reward": 0.25}),
    ],
)
def test_a_job_names_the_key_of_the_reward(
    as_json: bytes | None, as_text: bytes | None, rewards: dict[str, float]
) -> None:
    assert read_rewards(as_json, as_text, "accuracy").rewards == rewards


@pytest.mark.parametrize(
    ("as_json", "as_text", "key", "words"),
    [
        (None, b"", "", "reward.txt holds no number"),
        (None, b"nan", "", "reward.txt is not finite"),
        (None, b"1e9", "", "reward.txt is not finite, or larger than 1,000,000"),
        (None, b"\xff", "", "reward.txt holds no number"),
        (None, b"-1000001", "", "reward.txt is not finite"),
        (None, b"inf", "", "reward.txt is not finite"),
        (None, "reward.txt is longer than 65536 bytes", "", "reward.txt is longer than 65536 bytes"),
        (b"", None, "", "reward.json is not JSON"),
        (b"", b"no", "", "reward.json is not JSON"),
        (b"[" * 60_000, None, "", "reward.json is not JSON"),
        (b'{"reward": 1' + b"0" * 5000 + b"}", None, "", "reward.json is not JSON"),
        ("reward.json cannot be read (NotAFile)", None, "", "reward.json cannot be read"),
        (b"[1]", b"1", "", "reward.json is a list, and must be a number"),
        (b"true", b"1", "", "reward.json is a truth value, and must be a number"),
        (b'"0.5"', b"1", "", "reward.json is a text, and must be a number"),
        (b"null", b"1", "", "reward.json is null, and must be a number"),
        (b"NaN", b"1", "", "reward.json is not finite"),
        (b'{"reward": NaN}', b"1", "", "reward.json: 'reward' is not finite"),
        (b'{"reward": 1000000000}', b"1", "", "reward.json: 'reward' is not finite, or larger"),
        (b'{"reward": 1' + b"0" * 400 + b"}", None, "", "reward.json: 'reward' is not finite, or larger"),
        (b'{"reward": {"a": 1}}', b"1", "", "reward.json: 'reward' is an object"),
        (b'{"reward": true}', b"1", "", "reward.json: 'reward' is a truth value, and must be a number"),
        (b'{"reward": "0.5"}', b"1", "", "reward.json: 'reward' is a text, and must be a number"),
        (b'{"reward": null}', b"1", "", "reward.json: 'reward' is null"),
        (b'{"reward": 1, "reward": 1}', None, "", "reward.json has a key twice"),
        (b"{}", None, "", "reward.json has no number that can be the reward"),
        (b'{"resolved": true}', None, "", "reward.json has no number that can be the reward"),
        (b'{"a": 5000000}', None, "", "reward.json has no number that can be the reward"),
        (
            b'{"accuracy": 0.9, "format": 1.0}',
            None,
            "",
            "none of them is 'reward': 'accuracy', 'format'; say in",
        ),
        (b'{"a": 1, "b": 0}', b"no", "", "tasks.harbor.rewardKey"),
        (b'{"a": 1, "reward": 0}', b"1", "x", "reward.json has no 'x', which tasks.harbor.rewardKey names"),
        (b'{"reward": 1, "x": "1"}', None, "x", "reward.json: 'x' is a text, and must be a number"),
    ],
)
def test_reward_files_that_cannot_be_used(
    as_json: bytes | str | None, as_text: bytes | str | None, key: str, words: str
) -> None:
    with pytest.raises(RewardUnusable, match=re.escape(words)) as refused:
        read_rewards(as_json, as_text, key)
    assert refused.value.reward_reason == "RewardInvalid"


def test_tests_without_a_reward_file() -> None:
    with pytest.raises(RewardUnusable, match=r"neither reward\.json nor reward\.txt") as refused:
        read_rewards(None, None)
    assert refused.value.reward_reason == "RewardMissing"


def keyed(test: str, **options: str) -> Task:
    """Return a task with what its job says about all task folders."""
    made = folder(test)
    made.harbor.options = HarborOptions.model_validate(options)
    return made


async def test_the_key_and_the_diagnostics_of_a_reward_file(lab: StageLab) -> None:
    """The named number is the reward, and people see what was no component."""
    write = 'echo \'{"accuracy": 0.75, "ns": 5e9, "passed": true}\' > /logs/verifier/reward.json'
    found = await lab.play(keyed(f"{write}; echo seen", rewardKey="accuracy"), [[]])
    assert (found.reward, found.reward_components) == (0.75, {"accuracy": 0.75})
    assert found.reward_output == "seen\nreward.json: no components are 'ns'"
    broken = "cd /logs/verifier; echo '{' > reward.json; echo 0.5 > reward.txt"
    found = await lab.play(folder(broken), [[]])
    assert (found.reward, found.reward_output) == (0.5, "reward.json is not JSON, so reward.txt counts")
    with pytest.raises(
        RewardUnusable, match=r"has no 'b', which tasks\.harbor\.rewardKey names; it has 'accuracy'"
    ):
        await lab.play(keyed(write, rewardKey="b"), [[]])


def test_rewards_are_combined_by_key() -> None:
    steps: list[dict[str, float]] = [{"reward": 1.0, "a": 4.0}, {"reward": 0.5}, {}]
    assert combined(steps, "mean") == {"reward": 0.5, "a": 4.0 / 3}
    assert combined(steps, "final") == {"reward": 0.0}
    assert combined(steps[:2][::-1], "final") == {"reward": 1.0, "a": 4.0}
    assert combined([{}, {"a": 1.0, "reward": 0.5}], "mean") == {"reward": 0.25, "a": 0.5}
    assert below({"reward": 0.5}, {"reward": 0.6})
    assert below({"reward": 1.0}, {"words": 0.0})
    assert not below({"reward": 0.5}, {"reward": 0.5})
    assert below({"reward": 0.5, "a": 0.5}, {"reward": 0.5, "a": 0.6})
    assert below({"reward": 0.5, "a": 0.5}, {"reward": 0.6, "a": 0.5})
    assert not below({"reward": 0.0}, {})


@pytest.mark.skipif(shutil.which("git") is None, reason="this machine has no git")
async def test_git_in_the_working_folder_starts_nothing_of_the_policys(lab: StageLab) -> None:
    test = "git diff > /dev/null; cd /logs/verifier; [ -e reward.txt ] || echo 0 > reward.txt"
    hook = "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > hook; chmod +x hook"
    attack = (
        f"git init -q; echo one > a; git add a; echo two > a; {hook}; git config diff.external /data/hook"
    )
    toml = 'artifacts = []\n[environment]\nworkdir = "/data"\n'
    found = await lab.play(folder(test, toml), [[attack, "git config diff.external"]])
    assert lab.observed[-1] == "/data/hook"
    assert found.reward == 0.0


def test_the_handler_names_what_a_task_lacks() -> None:
    assert HarborHandler().check(Task(id="t", prompt="q"))[0].startswith("harbor: required")
    assert HarborHandler().check(folder()) == []
    broken: dict[str, Any] = {"id": "t", "prompt": "q", "harbor": {"files": {"task.toml": "a = "}}}
    assert "task.toml: is not TOML" in HarborHandler().check(Task.model_validate(broken))[0]
