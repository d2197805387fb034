"""What a task folder in the format of Harbor asks for: its steps, limits, images and environment."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rollyard_crds.fields.allowed_hosts import MAX_HOSTS, HostRule
from rollyard_crds.fields.harbor import IGNORED_KEYS, UNKNOWN_KEYS, HarborFolder
from rollyard_crds.fields.quantity import parse_quantity
from rollyard_crds.fields.sandbox import SandboxResources
from rollyard_crds.task import TaskSandbox, folder_problem

from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE, image_name, last_workdir
from rollyard_tasks.harbor.table import HarborRefused, Reading, Table

VERIFIER_SECONDS: Final = 600.0
MAX_STEPS: Final = 64
LOGS: Final = "/logs"
TESTS: Final = "/tests"
SOLUTION: Final = "/solution"
ARTIFACTS: Final = "/logs/artifacts"
WORKDIR: Final = "/work"
_SCHEMA: Final = re.compile(r"1(\.\d{1,3})*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,511}")
_ABSOLUTE: Final = re.compile(r"(/[A-Za-z0-9._+@-]{1,128}){1,32}/?")
_NO_USER: Final = (
    "all programs of a sandbox run as one user, who cannot be chosen; a job with tasks.harbor.user: ignore "
    "runs them as that user"
)


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command that must succeed before the agent begins. All times are in seconds."""

    command: str
    interval: float
    timeout: float
    start: float
    retries: int


@dataclass(frozen=True, slots=True)
class HarborStep:
    """One step: an instruction, and what verifies the work. A task without steps counts as one step."""

    name: str
    instruction: str
    tests: tuple[str, ...]
    """The folders of its tests. A later one replaces files of an earlier one."""
    solution: str
    """The folder of its reference solution, or "" if it has none."""
    workdir: str = ""
    """The folder whose files are copied to the working folder before the step, or ""."""
    agent_seconds: float | None = None
    verifier_seconds: float = VERIFIER_SECONDS
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """The rewards below which no later step is played, by key."""
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, slots=True)
class HarborPlan:
    """All that a task folder asks for."""

    steps: tuple[HarborStep, ...]
    strategy: Literal["mean", "final"]
    image: str
    """The image of the agent's sandbox, or "" for that of the job. It may have to be built from a Dockerfile
    (see `dockerfiles`)."""
    env: Mapping[str, str]
    workdir: str
    """The working folder, in which the agent, its solution and the tests begin."""
    solution_env: Mapping[str, str]
    cpus: float
    memory_bytes: int
    disk_bytes: int
    separate: bool
    """Whether the tests run in a sandbox of their own, which gets the artifacts only."""
    verifier_image: str
    """The image of that sandbox, which has the tests in it; "" stands for the agent's image."""
    artifacts: tuple[str, ...]
    """The absolute paths of files and folders that a separate verifier gets, besides `/logs/artifacts`."""
    healthcheck: Healthcheck | None
    hosts: tuple[str, ...] | None
    """The hosts that the agent may reach, or None for those of the job."""
    tests_hosts: tuple[str, ...] | None
    """The same for the tests, whose hosts the job lists in `stages.eval.allowedHosts`."""
    reward_key: str
    """The key of `reward.json` that the job names for the reward, or "" for the usual one."""
    metadata: Mapping[str, Any]

    def sandbox(self) -> TaskSandbox:
        """Return what the task adds to the job's sandbox."""
        folders = [LOGS, SOLUTION] if self.separate else [LOGS, TESTS, SOLUTION]
        return self._sandbox(self.image, folders, self.hosts)

    def verifier_sandbox(self) -> TaskSandbox:
        """Return the same for the sandbox of a separate verifier."""
        folders = [LOGS] if self.verifier_image else [LOGS, TESTS]
        return self._sandbox(self.verifier_image or self.image, folders, ())

    def _sandbox(self, image: str, folders: list[str], hosts: tuple[str, ...] | None) -> TaskSandbox:
        # An image has its working folder. Without an image, the folder must be made.
        if not image and self.workdir != WORKDIR:
            folders = [*folders, self.workdir]
        if image and not image.startswith(DOCKERFILE_IMAGE):
            image = f"docker://{image}"
        return TaskSandbox(
            image=image or None,
            env=dict(self.env),
            folders=folders,
            allowed_hosts=None if hosts is None else list(hosts),
        )

    def dockerfile(self, image: str) -> str:
        """Return the folder of the Dockerfile from which an image of the task is built, or "" if none is."""
        if not image.startswith(DOCKERFILE_IMAGE):
            return ""
        return {self.verifier_image: "tests", self.image: "environment"}.get(image, "")


def harbor_plan(folder: HarborFolder) -> HarborPlan:
    """Return what a task folder asks for.

    Raises:
        HarborRefused: The folder is incomplete or broken, or asks for something that cannot be had here.
    """
    text = folder.text("task.toml")
    if text is None:
        raise HarborRefused("task.toml", "is missing, or is not UTF-8 text")
    root = Table.parse(text, folder.options)
    # The older key `version` says nothing: in published folders it holds whatever their authors chose.
    root.skip("version", "source")
    version = root.text("schema_version", "1.0")
    if not _SCHEMA.fullmatch(version):
        raise HarborRefused("schema_version", f"is {version[:50]!r}, and only versions 1 are known")
    _no_compose(folder)
    about = {"task": _plain(root.free("task")), "metadata": _plain(root.free("metadata"))}
    environment = _Environment(root.table("environment"))
    image = environment.image or image_name(folder, "environment")
    own_workdir = ""
    if not environment.workdir:
        # Where docker_image is named in addition to a Dockerfile, it was built from that.
        own_workdir = last_workdir(folder.text("environment/Dockerfile") or "")
    agent, verifier = root.table("agent"), root.table("verifier")
    agent_seconds, agent_network = agent.seconds("timeout_sec", None), stated_network(agent)
    _nothing_else(agent)
    checks = _Verifier(verifier)
    hosts = allowed_hosts(root.reading, agent_network, environment.network)
    tests_network = checks.network or checks.environment_network or environment.network
    tests_hosts = allowed_hosts(root.reading, tests_network)
    solution = root.table("solution")
    solution_env = solution.env("env")
    solution.end()
    strategy = _strategy(root)
    artifacts = tuple(_artifact(value, root) for value in root.take("artifacts", list, "a list") or [])
    tables = root.tables("steps")
    root.end()
    if len(tables) > MAX_STEPS:
        raise HarborRefused("steps", f"are {len(tables)}, and at most {MAX_STEPS} are played")
    public = _is_public(agent_network or environment.network, hosts) or _is_public(tests_network, tests_hosts)
    if tables and (hosts or tests_hosts or public):
        raise HarborRefused(
            "steps", "need a task without a network, because tests of earlier steps would have it, too"
        )
    if tables and checks.separate:
        raise HarborRefused(
            "verifier.environment_mode", "a task of several steps cannot have a separate verifier here"
        )
    verifier_image = checks.image
    if checks.separate and not verifier_image:
        verifier_image = image_name(folder, "tests")
    if tables:
        steps = tuple(_table_step(folder, table, agent_seconds, checks) for table in tables)
    else:
        steps = (_step(folder, "", agent_seconds, checks),)
    if len({step.name for step in steps}) < len(steps):
        raise HarborRefused("steps", "two steps have the same name")
    workdir = environment.workdir or own_workdir or WORKDIR
    if not image and workdir != WORKDIR and (problem := folder_problem(workdir)):
        raise HarborRefused("environment.workdir", f"{problem}, where the task names no docker_image")
    notes = {UNKNOWN_KEYS: dict(root.reading.unknown), IGNORED_KEYS: list(root.reading.ignored)}
    return HarborPlan(
        steps=steps,
        strategy=strategy,
        image=image,
        env=environment.env,
        workdir=workdir,
        solution_env=solution_env,
        cpus=max(environment.cpus, checks.cpus),
        memory_bytes=max(environment.memory_bytes, checks.memory_bytes),
        disk_bytes=max(environment.disk_bytes, checks.disk_bytes),
        separate=checks.separate,
        verifier_image=verifier_image,
        artifacts=artifacts,
        healthcheck=environment.healthcheck,
        hosts=hosts,
        tests_hosts=tests_hosts,
        reward_key=root.reading.options.reward_key or "",
        metadata={key: value for key, value in {**about, **notes}.items() if value},
    )


def _strategy(root: Table) -> Literal["mean", "final"]:
    usual, other = "multi_step_reward_strategy", "multi_step_reward_mode"
    strategies = {root.choice(key, ("mean", "final"), "mean") for key in (usual, other) if root.has(key)}
    if len(strategies) > 1:
        raise root.refused(other, f"says something else than {usual}: give one of them")
    return "final" if "final" in strategies else "mean"


def _is_public(stated: StatedNetwork | None, hosts: tuple[str, ...] | None) -> bool:
    return hosts is None and stated is not None and stated.public


def solution_calls(plan: HarborPlan, step: HarborStep) -> list[dict[str, Any]]:
    """Return the tool calls that run a step's reference solution, or none if it has no solution."""
    if not step.solution:
        return []
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in plan.solution_env.items())
    command = f"cd {shlex.quote(plan.workdir)} && env {variables} bash {SOLUTION}/solve.sh".replace("  ", " ")
    return [{"name": "bash", "arguments": {"command": command}}]


def resource_problems(plan: HarborPlan, resources: SandboxResources) -> list[str]:
    """Return which of a job's `sandbox.resources` are less than a task folder asks for."""
    requirements: list[tuple[str, str, float, str]] = [
        ("cpus", "cpu", plan.cpus, resources.cpu),
        ("memory_mb", "memory", plan.memory_bytes, resources.memory),
        ("storage_mb", "disk", plan.disk_bytes, resources.disk),
    ]
    problems = []
    for task_key, job_key, amount, quantity in requirements:
        if parse_quantity(quantity) < amount:
            shown = f"{amount:g}" if job_key == "cpu" else f"{int(amount) >> 20}Mi"
            problems.append(
                f"environment.{task_key} of its task.toml asks for more than the job's "
                f"sandbox.resources.{job_key} gives ({quantity}): give at least {shown}"
            )
    return problems


class _Environment:
    """The table `environment`, or `verifier.environment`."""

    def __init__(self, table: Table, *, of_verifier: bool = False) -> None:
        self.image = table.text("docker_image")
        if self.image and not _IMAGE.fullmatch(self.image):
            raise table.refused("docker_image", "is not the name of an image")
        self.env = table.env("env")
        self.workdir = table.text("workdir").removesuffix("/")
        if self.workdir and (not _ABSOLUTE.fullmatch(self.workdir) or ".." in self.workdir.split("/")):
            raise table.refused("workdir", "must be the absolute path of a folder")
        self.healthcheck = None if of_verifier else _healthcheck(table)
        self.cpus = table.amount("cpus") or 0.0
        self.memory_bytes = table.size("memory")
        self.disk_bytes = table.size("storage")
        system = table.text("os", "linux")
        if system.lower() != "linux":
            raise table.refused("os", f"is {system[:50]!r}, and sandboxes run Linux")
        table.absent("gpus", "sandboxes have no GPU")
        table.absent("gpu_types", "sandboxes have no GPU")
        table.absent("tpu", "sandboxes have no TPU")
        table.absent("mcp_servers", "an agent of a rollout connects to no MCP server")
        table.absent("skills_dir", "an agent of a rollout reads no skills")
        self.network = stated_network(table)
        table.skip("build_timeout_sec")
        table.end()


class _Verifier:
    """The table `verifier`, of a task or of a step."""

    def __init__(self, table: Table, of_task: _Verifier | None = None) -> None:
        usual: float = of_task.seconds if of_task is not None else VERIFIER_SECONDS
        self.seconds: float = table.seconds("timeout_sec", usual) or usual
        usual_env: dict[str, str] = of_task.env if of_task is not None else {}
        self.env: dict[str, str] = {**usual_env, **table.env("env")}
        own = table.take("environment", dict, "a table")
        usual_mode = "shared" if own is None else "separate"
        self.separate = table.choice("environment_mode", ("shared", "separate"), usual_mode) == "separate"
        if own is not None and not self.separate:
            raise table.refused("environment", "needs environment_mode = 'separate'")
        environment = _Environment(table.inner(own or {}, "environment"), of_verifier=True)
        if environment.workdir:
            raise table.refused("environment.workdir", "the tests begin in environment.workdir of the task")
        self.image, self.cpus = environment.image, environment.cpus
        self.memory_bytes, self.disk_bytes = environment.memory_bytes, environment.disk_bytes
        self.env = {**environment.env, **self.env}
        self.network = stated_network(table)
        self.environment_network = environment.network
        table.absent("collect", "commands that collect artifacts are not run here; name artifacts instead")
        table.absent("continuous", "an agent of a rollout learns nothing of its tests before Eval")
        _nothing_else(table)


def _nothing_else(table: Table) -> None:
    if table.free("user") not in (None, ""):
        if table.reading.options.user != "ignore":
            raise table.refused("user", _NO_USER)
        table.reading.ignored[table.field("user")] = None
    table.end()


def _no_compose(folder: HarborFolder) -> None:
    for path in folder.paths():
        if re.fullmatch(r"(environment|tests)/(docker-)?compose\.ya?ml", path):
            raise HarborRefused(path, "a sandbox is one container; tasks of several containers are not run")


def _healthcheck(table: Table) -> Healthcheck | None:
    section = table.table("healthcheck")
    command = section.text("command")
    if not command:
        section.end()
        return None
    check = Healthcheck(
        command=command,
        interval=section.amount("interval_sec") or 0.0,
        timeout=section.seconds("timeout_sec", 30.0) or 30.0,
        start=section.amount("start_period_sec") or 0.0,
        retries=int(section.amount("retries") or 3),
    )
    section.skip("start_interval_sec")
    section.end()
    return check


def _artifact(value: Any, root: Table) -> str:
    if not isinstance(value, str | dict):
        raise root.refused("artifacts", "must be paths, or tables with a source")
    table = root.inner({"source": value} if isinstance(value, str) else value, "artifacts")
    source = table.text("source")
    # In Harbor an artifact may get another name outside. The verifier sees it at its path.
    table.skip("destination")
    table.absent("exclude", "leaving out parts of an artifact is not known here")
    service = table.text("service", "main")
    if service != "main":
        raise table.refused("service", "a sandbox is one container")
    table.end()
    if not _ABSOLUTE.fullmatch(source) or ".." in source.split("/"):
        raise root.refused("artifacts", f"{source[:100]!r} must be an absolute path")
    return source.rstrip("/")


def _table_step(
    folder: HarborFolder, table: Table, agent_seconds: float | None, checks: _Verifier
) -> HarborStep:
    name = table.text("name")
    if not _NAME.fullmatch(name):
        raise table.refused("name", "must be a name of letters, digits, '.', '_' and '-'")
    agent = table.table("agent")
    seconds, network = agent.seconds("timeout_sec", agent_seconds), stated_network(agent)
    _nothing_else(agent)
    own = _Verifier(table.table("verifier"), checks)
    for stated in (network, own.network):
        if stated is not None and stated.asks:
            if table.reading.options.network != "ignore":
                raise stated.refused(
                    "a step cannot have a network of its own here; a job with tasks.harbor.network: ignore "
                    "plays it without"
                )
            table.reading.ignored[stated.field] = None
    if own.separate:
        raise table.refused("verifier.environment_mode", "a step cannot have a separate verifier here")
    least, check = _least(table), _healthcheck(table)
    # Harbor keeps them after the step. No separate verifier would get them.
    table.skip("artifacts")
    table.end()
    return _step(folder, name, seconds, own, least, check)


def _least(table: Table) -> dict[str, float]:
    value = table.take("min_reward", (int, float, dict), "a number or a table of numbers")
    rewards = {} if value is None else value if isinstance(value, dict) else {"reward": value}
    for number in rewards.values():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise table.refused("min_reward", "must be a number or a table of numbers")
    return {key: float(number) for key, number in rewards.items()}


def _step(
    folder: HarborFolder,
    name: str,
    seconds: float | None,
    checks: _Verifier,
    least: Mapping[str, float] | None = None,
    check: Healthcheck | None = None,
) -> HarborStep:
    top = f"steps/{name}/" if name else ""
    instruction = folder.text(f"{top}instruction.md")
    if instruction is None or not instruction.strip():
        raise HarborRefused(f"{top}instruction.md", "is missing or empty, or is not UTF-8 text")
    tests = ("tests", f"{top}tests") if name else ("tests",)
    scripts = [f"{top}/test.sh" for top in tests]
    if not any(folder.has(script) for script in scripts) and not (checks.separate and checks.image):
        raise HarborRefused(scripts[-1], "is missing, and nothing else gives a reward")
    has_solution = folder.has(f"{top}solution/solve.sh")
    return HarborStep(
        name=name,
        instruction=instruction,
        tests=tests,
        solution=f"{top}solution" if has_solution else "",
        workdir=f"{top}workdir" if name else "",
        agent_seconds=seconds,
        verifier_seconds=checks.seconds,
        verifier_env=checks.env,
        min_reward=least or {},
        healthcheck=check,
    )


def _plain(value: Any) -> Any:
    """Return a value of TOML as JSON has it: dates become texts, and numbers that JSON lacks become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@dataclass(frozen=True, slots=True)
class StatedNetwork:
    """What one table states."""

    field: str
    """The path of the key that states it."""
    hosts: tuple[str, ...]
    """The hosts of an allowlist."""
    public: bool = False
    """Whether every host is asked for."""

    @property
    def asks(self) -> bool:
        """Whether any host is asked for."""
        return self.public or bool(self.hosts)

    def refused(self, problem: str) -> HarborRefused:
        """Return the error about the key."""
        return HarborRefused(self.field, problem)


def stated_network(table: Table) -> StatedNetwork | None:
    """Return the network that a table states, or None if it states none.

    Raises:
        HarborRefused: A value is not a mode or not a host, or the values contradict each other.
    """
    key, mode = "network_mode", table.text("network_mode")
    internet = table.free("allow_internet")
    if not isinstance(internet, bool | None):
        raise table.refused("allow_internet", "must be true or false")
    if not mode and internet is not None:
        key, mode = "allow_internet", "public" if internet else "no-network"
    hosts = table.take("allowed_hosts", list, "a list of hosts") or []
    if hosts and mode != "allowlist":
        raise table.refused("allowed_hosts", "needs network_mode = 'allowlist'")
    if not mode:
        return None
    if mode not in ("public", "no-network", "allowlist"):
        raise table.refused(key, f"is {mode[:50]!r}, expected no-network, allowlist or public")
    if mode == "allowlist" and not 0 < len(hosts) <= MAX_HOSTS:
        raise table.refused("allowed_hosts", f"must name from 1 to {MAX_HOSTS} hosts for an allowlist")
    for host in hosts:
        try:
            HostRule.parse(host if isinstance(host, str) else repr(host))
        except ValueError as error:
            raise table.refused("allowed_hosts", str(error)[:300]) from error
    return StatedNetwork(table.field(key), tuple(hosts), mode == "public")


def allowed_hosts(reading: Reading, *stated: StatedNetwork | None) -> tuple[str, ...] | None:
    """Return the hosts that the agent or the tests may reach, or None for those that their job names.

    Args:
        reading: Has the job's options, and notes a network that they leave out.
        stated: What the tables state. An earlier one takes precedence over a later one.

    Raises:
        HarborRefused: Every host is asked for, and the job's options do not say what becomes of that.
    """
    network = next((each for each in stated if each is not None), None)
    if network is None:
        return None
    if network.asks and reading.options.network == "ignore":
        reading.ignored[network.field] = None
        return ()
    if not network.public:
        return network.hosts
    if reading.options.network != "allow":
        raise network.refused(
            "asks for every host, and a sandbox reaches those of a list at most: say network_mode = "
            "'allowlist' with allowed_hosts, or 'no-network', or in the job tasks.harbor.network: ignore or "
            "allow"
        )
    return None
