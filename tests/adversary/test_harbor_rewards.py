"""What a policy tries against the tests of a task folder in the format of Harbor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds import Task
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_pipeline.errors import TaskInvalid
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack
from rollyard_testing.invariants import deserves_nothing
from rollyard_testing.pipeline.stagelab import SMALL, StageLab, stage_lab
from rollyard_testing.sandboxes.outside import HOST, PUBLIC, Outside

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `harbor`")


TOML = '[environment]\nnetwork_mode = "no-network"\n[verifier]\ntimeout_sec = 10\n'
TEST = """
secret=$(cat /tests/expected.txt)
if [ "$(cat /work/answer)" = "$secret" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
SECRET = "the expected answer"
ONE = "echo '{\"reward\": 1}'"
DAEMON = """
nohup setsid bash -c 'while :; do for name in reward.json reward.txt; do
cp /work/one /logs/verifier/$name; done; done' > /dev/null 2>&1 &
"""


def task(test: str = TEST, toml: str = TOML, options: HarborOptions | None = None, **files: str) -> Task:
    texts = {"task.toml": toml, "instruction.md": "Guess.", "tests/expected.txt": SECRET, **files}
    contents = {path: (text.encode(), False) for path, text in ({"tests/test.sh": test} | texts).items()}
    row = {"path": "task", "task_binary": pack(contents)}
    reader = HarborFormat()
    reader.harbor = options
    return Task.model_validate(reader.task(Row(row, 1)))


@pytest.fixture
async def lab(bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StageLab]:
    async with stage_lab("bubblewrap", tmp_path_factory.mktemp("h")) as lab:
        yield lab


NESTED = """
cat > nest.py <<END
import os, sys
os.chdir(sys.argv[1])
for _ in range(5000):
    os.mkdir("d")
    os.chdir("d")
END
"""
ATTACKS = {
    "plants reward files": [f"{ONE} > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"],
    "plants several rewards": ['echo \'{"accuracy": 1, "format": 1}\' > /logs/verifier/reward.json'],
    "plants a folder": ["mkdir /logs/verifier/reward.json /logs/verifier/reward.txt"],
    "links reward files": [f"{ONE} > one; ln -s /work/one /logs/verifier/reward.json"],
    "links the folder of rewards": [
        f"mkdir mine; {ONE} > mine/reward.json; rm -r /logs/verifier; ln -s /work/mine /logs/verifier"
    ],
    "makes the folder of rewards a file": ["rm -r /logs/verifier; echo 1 > /logs/verifier"],
    "plants tests": [f"echo '{ONE} > /logs/verifier/reward.json' > /tests/test.sh; chmod 555 /tests/test.sh"],
    "links tests to files of its own": [
        f"echo '{ONE} > /logs/verifier/reward.json' > mine; ln -s /work/mine /tests/test.sh",
        "echo guess > answer; ln -s /work/answer /tests/expected.txt",
    ],
    "leaves a daemon that writes rewards": [f"{ONE} > one", DAEMON],
    "plants programs and start-up files": [
        "printf '#!/bin/bash\\necho the expected answer' > cat; chmod +x cat; cp cat /tmp",
        "export PATH=/work:$PATH",
        f"echo '{ONE} > /logs/verifier/reward.json' | tee .bashrc .profile .bash_profile > /tmp/env",
        "export BASH_ENV=/tmp/env ENV=/tmp/env",
    ],
    "looks for the tests": [
        "cat /tests/* /solution/* > answer; find / -path /usr -prune -o -name expected.txt -print",
        "grep -rs 'expected answer' /tests /solution /logs /tmp /dev/shm /run /proc/*/environ > answer",
    ],
    "locks the folder of the tests": ["chmod 0 /tests /logs"],
    "fills the disk": ["cat /dev/zero > /work/a; cat /dev/zero > /logs/a; cat /dev/zero > /tests/a"],
    "fills the folder of the tests": ["cd /tests; mkdir -p d{1..2000}/d"],
    "nests folders in the folder of the tests": [NESTED, "python3 nest.py /tests && echo nested"],
    "nests folders in the folder of rewards": [NESTED, "python3 nest.py /logs/verifier && echo nested"],
    "removes the working folder": ["rm -rf /work/* /work/.[a-z]*; rmdir /work"],
}


@pytest.mark.attack(
    "reward files, links, folders, tests, programs or start-up files are planted, a daemon writes "
    "rewards, the tests are searched for, their folders are filled, locked or nested 5,000 deep",
    stopped_by="every process of the policy is dead and the folders are emptied before the tests arrive; "
    "Eval's environment",
)
@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_but_the_answer_is_rewarded(lab: StageLab, name: str) -> None:
    """Each attack scores 0 at once: none is an infrastructure failure, which would be a new try."""
    found = await lab.play(task(**{"solution/solve.sh": f"# {SECRET}"}), [ATTACKS[name]])
    deserves_nothing(found.reward)
    assert not any(SECRET in text for text in lab.observed)


BREAKS = {
    "no reward file": ("python3 /work/a.py || exit 1\n" + TEST, "RewardMissing"),
    "a reward that is none": ("cp /work/answer /logs/verifier/reward.txt", "RewardInvalid"),
    "a reward beyond all bounds": ("cp /work/large /logs/verifier/reward.json", "RewardInvalid"),
}


@pytest.mark.attack(
    "a policy that would score 0 makes the tests end without a reward, for another try",
    stopped_by="the tests run once more where no policy has been: if they give a reward there, 0",
)
@pytest.mark.parametrize("name", BREAKS)
async def test_a_policy_cannot_trade_a_zero_for_a_failure(lab: StageLab, name: str) -> None:
    """The tests give a reward where no policy has been, so what is missing here is the policy's doing."""
    test, reason = BREAKS[name]
    setup = {"a.py": "pass", "answer": "0", "large": '{"reward": 0}'}
    lines = [f"echo '{text}' > /work/{path}" for path, text in setup.items()]
    found_task = task(test)
    found_task.sandbox.setup = "\n".join(lines)
    honest = await lab.play(found_task, [[]])
    assert (honest.reward, honest.reward_reason) == (0.0, "")
    steps = ["echo 'raise SystemExit(1)' > a.py; echo nan > answer; echo '{\"reward\": 1e9}' > large"]
    found = await lab.play(found_task, [steps])
    assert (found.reward, found.reward_reason) == (0.0, reason)


WRITES = """
bash /work/a.sh
cd /logs/verifier
[ -e reward.json -o -L reward.json ] || echo '{"reward": 0}' > reward.json
"""
REWARD_FILES = {
    "many keys": "python3 -c 'print({str(n): 1 for n in range(10**5)})' | tr \\' '\"' > reward.json",
    "a huge number": "echo '{\"reward\": 1'$(head -c 4000 /dev/zero | tr '\\0' 0)'}' > reward.json",
    "a number that is none": "echo '{\"reward\": Infinity}' > reward.json",
    "deep nesting": "head -c 60000 /dev/zero | tr '\\0' '[' > reward.json",
    "a reward in another one": 'echo \'{"reward": {"reward": 1}}\' > reward.json',
    "a truth value": "echo '{\"reward\": true}' > reward.json",
    "a text": 'echo \'{"reward": "1"}\' > reward.json',
    "several rewards": 'echo \'{"a": 1, "b": 1}\' > reward.json',
    "a link to itself": "ln -s reward.json reward.json",
    "a link without an end": "ln -s /dev/zero reward.json",
    "a pipe that nobody writes": "mkfifo reward.json",
    "a folder": "mkdir -p reward.json/reward.txt",
    "a file that changes while it is read": "setsid nohup bash -c 'while :; do "
    "head -c 60000 /dev/zero > reward.json; echo > reward.json; done' > /dev/null 2>&1 & "
    "until [ -e reward.json ]; do :; done",
}


@pytest.mark.attack(
    "a program of the policy's that the tests run writes a `reward.json` which is huge, deep, endless, a "
    "pipe, a link, changes while it is read or holds what is no number, for another try or for more than "
    "its due",
    stopped_by="every process is killed before the files are read, within 64 KiB; only a finite number "
    "within bounds is a reward; else 0",
)
@pytest.mark.parametrize("name", REWARD_FILES)
async def test_a_reward_file_that_cannot_be_used_is_the_policys_doing(lab: StageLab, name: str) -> None:
    """The tests run a program of the policy's, which writes what no reader should take for a reward."""
    found_task = task(WRITES)
    found_task.sandbox.setup = "echo true > /work/a.sh"
    steps = [f"cat > a.sh <<'END'\ncd /logs/verifier\n{REWARD_FILES[name]}\nEND"]
    found = await lab.play(found_task, [steps])
    assert (found.reward, found.reward_reason) == (0.0, "RewardInvalid")


INJECTED = {
    "a second reward": 'x", "reward": 1, "y": "',
    "the end of the file": 'x", "reward": 1}',
    "a comment": 'x"} // ',
}


@pytest.mark.attack(
    "an answer that the tests paste into their `reward.json` adds a second reward",
    stopped_by="a file with a key twice cannot be used; a key that the tests do not write themselves is "
    "**not** recognized, unless the job names the key",
)
@pytest.mark.parametrize("name", INJECTED)
async def test_a_diagnostic_adds_no_second_reward(lab: StageLab, name: str) -> None:
    """Tests that write the policy's answer into their JSON do not let it decide."""
    test = (
        """echo "{\\"reward\\": 0, \\"answer\\": \\"$(cat /work/answer)\\"}" > /logs/verifier/reward.json"""
    )
    found_task = task(test)
    found_task.sandbox.setup = "echo none > /work/answer"
    honest = await lab.play(found_task, [["echo guess > answer"]])
    assert (honest.reward, honest.reward_reason) == (0.0, "")
    found = await lab.play(found_task, [[f"echo '{INJECTED[name]}' > answer"]])
    assert (found.reward, found.reward_reason) == (0.0, "RewardInvalid")


STEPS = "".join(f'[[steps]]\nname = "{name}"\n' for name in "ab")
INSTRUCTIONS = {f"steps/{name}/instruction.md": "Guess." for name in "ab"}


@pytest.mark.attack(
    "the tests of one step are read in the next one, by a process that waits for them",
    stopped_by="every process is killed before the tests arrive; they are removed before the agent continues",
)
async def test_a_later_step_learns_nothing_of_earlier_tests(lab: StageLab) -> None:
    look = "ls -RA /tests /logs/verifier /solution; find / -name expected.txt -not -path '/proc/*'"
    daemon = "nohup setsid bash -c 'while :; do cp -r /tests /work/copy; done' > /dev/null 2>&1 &"
    plant = f"{ONE} > /logs/verifier/reward.json; {ONE} > one"
    found = await lab.play(
        task(TEST, TOML + STEPS, **INSTRUCTIONS),
        [[daemon, plant, DAEMON], [look, "cat copy/* /tests/* > answer"]],
    )
    assert (found.reward, found.reward_reason, len(lab.said)) == (0.0, "", 2)
    assert not any(SECRET in text or "expected.txt" in text for text in lab.observed)


@pytest.mark.attack(
    "a link keeps the setup script of the next step, which is removed after its run",
    stopped_by="what is at the path of a file is removed before the file is written",
)
async def test_a_later_step_keeps_no_setup_script(lab: StageLab) -> None:
    """A link at the path of the script, which is removed after its run, is not written through."""
    setup = {"steps/b/workdir/setup.sh": f"touch /work/ready # {SECRET}"}
    found = await lab.play(
        task(TEST, TOML + STEPS, **INSTRUCTIONS, **setup),
        [["ln -s kept setup.sh; ls"], ["cat kept setup.sh 2> /dev/null; ls -1"]],
    )
    deserves_nothing(found.reward)
    assert lab.observed == ["setup.sh", "ready"]


LATER = {
    "in Run": [["touch made"], ["echo exit > conf"]],
    "in Eval": [["touch made"], [], ["echo exit > conf"]],
}


@pytest.mark.attack(
    "a bad score becomes a failure in a later step, which needs what the policy has left, so that it "
    "cannot be repeated without the policy",
    stopped_by="such a step is not repeated: 0",
)
@pytest.mark.parametrize("name", LATER)
async def test_a_later_step_without_a_reward_is_the_policys_doing(lab: StageLab, name: str) -> None:
    """Its setup script needs what the policy left, so it cannot be repeated where no policy has been."""
    steps = STEPS + '[[steps]]\nname = "c"\n'
    setup = {f"steps/{step}/workdir/setup.sh": "cat /work/made" for step in "bc"}
    instructions = {**INSTRUCTIONS, "steps/c/instruction.md": "Guess."}
    found_task = task(
        "touch /work/conf; . /work/conf; echo 1 > /logs/verifier/reward.txt",
        TOML + steps,
        **instructions,
        **setup,
    )
    honest = await lab.play(found_task, [["touch made"], [], []])
    assert (honest.reward, honest.reward_reason) == (1.0, "")
    found = await lab.play(found_task, LATER[name])
    assert (found.reward, found.reward_reason) == (0.0, "RewardMissing")


@pytest.mark.attack(
    "a process that the tests of one step have started waits for the reward of the next one",
    stopped_by="every process of a step's tests is killed before the next step",
)
async def test_what_the_tests_left_running_is_gone_in_the_next_step(lab: StageLab) -> None:
    """The policy's own code, which the tests start, cannot wait for a time at which its reward would stay."""
    test = f"bash /work/a.sh\n{TEST}"
    waits = "setsid nohup sleep 1000 > /dev/null 2>&1 & echo $! > /work/pid"
    look = "if kill -0 $(cat pid); then echo it is there; else echo it is gone; fi"
    found = await lab.play(task(test, TOML + STEPS, **INSTRUCTIONS), [[f"echo '{waits}' > a.sh"], [look]])
    deserves_nothing(found.reward)
    assert "it is gone" in lab.observed[-1]


SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
ARTIFACTS = {
    "a link": "ln -s /etc/hostname /logs/artifacts/answer; ln -s / /logs/artifacts/root",
    "too much": "cd /logs/artifacts; echo done > answer; for i in {1..6}; do head -c 3M /dev/zero > $i; done",
    "too many": "cd /logs/artifacts; echo done > answer; touch $(seq 501)",
    "a pipe": "mkfifo /logs/artifacts/answer",
    "a program": "printf '#!/bin/sh\\necho done' | tee /logs/artifacts/cat; chmod +x /logs/artifacts/cat",
    "nothing": "rm -r /logs/artifacts",
    "no folder": "rm -r /logs/artifacts; echo done > /logs/artifacts",
    "a locked folder": "mkdir /logs/artifacts/a; chmod 0 /logs/artifacts/a",
}


MEETS = """
[ -f /tests/test.sh ] && [ "$(cat /logs/artifacts/answer)" = done ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


ODD_ARTIFACTS = pytest.mark.attack(
    "artifacts for a separate verifier are links, pipes, programs, too large or too many",
    stopped_by="regular files are copied within bounds; what cannot be copied scores 0",
)


@ODD_ARTIFACTS
@pytest.mark.parametrize("name", ARTIFACTS)
async def test_artifacts_for_a_separate_verifier(
    lab: StageLab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.stages.eval_sandboxes.MAX_CARRIED", 500)
    found = await lab.play(task(MEETS, SEPARATE), [[ARTIFACTS[name]]])
    deserves_nothing(found.reward)


NAMES_OF_ARTIFACTS = pytest.mark.attack(
    "names of artifacts fill the worker's memory, or fit into no answer, for another try",
    stopped_by="paths count as content does, before they are made; a listing has 4 Mi characters of names "
    "at most; more scores 0",
)


@NAMES_OF_ARTIFACTS
async def test_paths_of_artifacts_count_as_their_content_does(
    lab: StageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty files in folders with long names would otherwise fill the worker's memory with paths."""
    monkeypatch.setattr("rollyard_pipeline.stages.eval_sandboxes.MAX_ARTIFACTS", 20_000)
    leave = "cd /logs/artifacts; echo done > answer; d=$(printf '%0200d' 0); mkdir $d; touch $d/{1..COUNT}"
    assert (await lab.play(task(MEETS, SEPARATE), [[leave.replace("COUNT", "9")]])).reward == 1.0
    found = await lab.play(task(MEETS, SEPARATE), [[leave.replace("COUNT", "400")]])
    deserves_nothing(found.reward)


MANY_NAMES = """python3 - <<'END'
import os
os.chdir("/logs/artifacts")
for number in range(46_000):
    os.close(os.open(b"\\xff" * 240 + b"%d" % number, os.O_CREAT))
print("made")
END"""


@NAMES_OF_ARTIFACTS
async def test_a_folder_whose_names_fit_into_no_answer_is_the_policys_doing(lab: StageLab) -> None:
    """The listing would have more than 64 MiB: each byte that is no text takes six there."""
    large = {**SMALL["resources"], "memory": "1Gi", "disk": "256Mi"}
    found = await lab.play(task(MEETS, SEPARATE), [[MANY_NAMES]], sandbox={**SMALL, "resources": large})
    assert lab.observed == ["made"]
    deserves_nothing(found.reward)


@ODD_ARTIFACTS
async def test_an_honest_artifact_is_rewarded(lab: StageLab) -> None:
    found = await lab.play(task(MEETS, SEPARATE), [["echo done > /logs/artifacts/answer"]])
    assert found.reward == 1.0
    honest = await lab.play(task(), [[f"echo '{SECRET}' > answer"]])
    assert honest.reward == 1.0


OTHER = "other.example.org"
AGENT = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{}"]\n'
ASK = "for host in {} {}; do curl -sf --max-time 5 http://$host:{}/ && echo ' from' $host; done; true"


@pytest.mark.attack(
    "a task, or a task folder, reaches a host that its job does not have, or one that it does not state",
    boundary="network",
    surface="`sandbox.allowedHosts` of a task",
    stopped_by="the worker takes from the job's list what the task names, and refuses the task if there "
    "is another host; tests never have a network",
)
async def test_a_task_has_no_more_network_than_it_states(lab: StageLab, tmp_path: Path) -> None:
    """It reaches those hosts of its job that it names, and its tests reach none."""
    async with Outside().serving(tmp_path) as world:
        world.names[OTHER] = [[PUBLIC]]
        hosts = [f"{name}:{world.port}" for name in (HOST, OTHER)]
        job = {**SMALL, "network": "allowlist", "allowedHosts": hosts}
        ask = ASK.format(HOST, OTHER, world.port)
        tests = f"({ask}) > /work/seen; [ -s /work/seen ]; echo $? > /logs/verifier/reward.txt"

        async def seen(toml: str, options: HarborOptions | None = None) -> str:
            lab.egress = world.egress()
            found = await lab.play(task(tests, toml, options), [[ask]], sandbox=job)
            assert (found.reward, found.reward_reason) == (1.0, ""), "the tests have reached a host"
            return lab.observed[0]

        assert await seen(AGENT.format(hosts[0])) == f"reached from {HOST}"
        assert await seen(TOML) == "(no output)"
        assert len(world.received) == 1
        # What the folder does not state is that of the job.
        assert await seen("") == f"reached from {HOST}\nreached from {OTHER}"
        with pytest.raises(TaskInvalid, match=f"a.org is not among the job's sandbox.allowedHosts .{HOST}"):
            await seen(AGENT.format("a.org"))
        assert len(world.received) == 3
        # Nor does its job give it more than its own list, or give it to the tests.
        every = TOML.replace("no-network", "public")
        assert await seen(every, HarborOptions(network="ignore")) == "(no output)"
        both = await seen(every, HarborOptions(network="allow"))
        assert both == f"reached from {HOST}\nreached from {OTHER}"
        assert len(world.received) == 5
