"""The batch script of a workload. Pure: all that it depends on comes in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollyard_client.environment import CA_FILE
from rollyard_drivers.commands.engine import ENGINE_MODULE, engine_arguments
from rollyard_drivers.commands.vllm import SERVER_ENV, vllm_command
from rollyard_drivers.commands.worker import WORKER_MODULE, worker_arguments
from rollyard_drivers.reconcile.plan import Workload

from rollyard_slurm.profile import SIGNAL_SECONDS, JobProfile, SiteProfile
from rollyard_slurm.readers.job_identity import Identity
from rollyard_slurm.scripts.placeholders import HOST, PORT
from rollyard_slurm.scripts.run_folder import RUN_FOLDER
from rollyard_slurm.scripts.shell import Array, Assign, Code, Comment, Directive, Export, Line, Part, render

TITLE = "rollyard-"
NODE_UNUSABLE = 73
"""Exit status of a worker whose node lacks what sandboxes need, as the stage worker's own."""
DEFAULT_MEMORY = "2G"
"""Of stage workers and embedded engines: many sites' own default, per CPU, is too little for sandboxes."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the scripts of one bridge have in common."""

    home: Path
    """On storage that the nodes share."""
    instance: str
    url: str
    """The control plane as the nodes reach it."""
    profile: SiteProfile
    sandbox: str = "apptainer"
    sandbox_options: tuple[str, ...] = ()
    """Further arguments of the workers, such as `--default-image`."""
    python: str = field(default_factory=lambda: sys.executable)
    ca_file: Path | None = None
    """Whom the workers are to trust for `https:`."""

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def endpoints(self) -> Path:
        """One file for each backend: where it answers."""
        return self.home / "endpoints"

    @property
    def tokens(self) -> Path:
        """One file for each job of ours: the token of its workers."""
        return self.home / "tokens"

    def token_file(self, workload: Workload) -> Path:
        """The token of the workers of one RolloutJob."""
        owner = workload.owner
        return self.tokens / f"{owner.namespace}.{owner.name}.{owner.uid[:8] or 'none'}"

    def endpoint_file(self, launch: str) -> Path:
        """Where the backend of one submission says that it answers."""
        return self.endpoints / f"{launch}.json"

    @property
    def troubles(self) -> Path:
        """One file for each worker that runs and takes no Init work: why not."""
        return self.home / "troubles"

    def trouble_file(self, workload: Workload, job: int | str) -> Path:
        """What keeps a worker from starting sandboxes; none while nothing is wrong."""
        return self.troubles / f"{workload.name}-{job}"

    def log(self, workload: Workload, job: int) -> Path:
        """What the job printed."""
        return self.logs / f"{workload.name}-{job}.log"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch script, and what it asks Slurm for."""

    options: tuple[tuple[str, str | None], ...]
    """Long names of sbatch's options, without dashes, and their plain values; None: it has none."""
    further: tuple[str, ...]
    """Options of the profile's `sbatch`, as they stand there."""
    before: tuple[str, ...]
    """Lines until its traps stand."""
    after: tuple[str, ...]
    """Lines from the program's start on."""

    def text(self, between: Sequence[str] = ()) -> str:
        """As sbatch takes it, and as an administrator sees it.

        Raises:
            ScriptInvalid: an option has a value that no line can hold.
        """
        asked = render(Directive(name, value) for name, value in self.options)
        directives = [*asked, *(f"#SBATCH {option}" for option in self.further)]
        return "\n".join(["#!/bin/bash", *directives, *self.before, *between, *self.after]) + "\n"


def _options(
    workload: Workload, site: Site, identity: Identity, wanted: JobProfile, avoided: Sequence[str]
) -> list[tuple[str, str | None]]:
    seconds = wanted.signal_seconds or SIGNAL_SECONDS
    options: list[tuple[str, str | None]] = [
        ("job-name", TITLE + workload.name),
        ("comment", identity.comment),
        ("output", str(site.logs).replace("%", "%%") + f"/{workload.name}-%j.log"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{seconds}"),
        ("requeue" if wanted.requeue is not False else "no-requeue", None),
        ("nodes", "1"),
        ("ntasks", "1"),
        ("chdir", str(site.home)),
    ]
    for name, value in (
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("qos", wanted.qos),
        ("reservation", wanted.reservation),
        ("wckey", wanted.wckey),
        ("constraint", wanted.constraint),
        ("exclude", ",".join([*([wanted.exclude] if wanted.exclude else []), *avoided]) or None),
        ("time", wanted.time_limit),
        ("cpus-per-task", wanted.cpus),
        ("mem", _memory(workload, wanted)),
        ("gres", _gres(workload, wanted)),
    ):
        if value is not None:
            options.append((name, str(value)))
    if wanted.exclusive:
        options.append(("exclusive", None))
    return options


def _memory(workload: Workload, wanted: JobProfile) -> str | None:
    """What the profile says, else enough for our own programs; a GPU's share is the site's to say."""
    said = any(option.partition("=")[0].startswith("--mem") for option in wanted.sbatch)
    if wanted.memory is not None or said or wanted.exclusive or workload.engine == "vllm":
        return wanted.memory
    return DEFAULT_MEMORY


def _gres(workload: Workload, wanted: JobProfile) -> str | None:
    if wanted.gres is not None:
        return wanted.gres.replace("{gpus}", str(workload.gpus))
    return f"gpu:{workload.gpus}" if workload.gpus else None


def batch_script(workload: Workload, site: Site, identity: Identity, avoided: Sequence[str] = ()) -> Batch:
    """What Slurm gets: options, what an administrator sees, and what runs on the node.

    Args:
        avoided: nodes that could not be used lately.

    Raises:
        ScriptInvalid: a name or a value can be no part of a script; for options `Batch.text` raises it.
    """
    wanted = site.profile.of(workload.kind)
    owner = workload.owner
    program = _backend(workload, site, identity) if workload.kind == "backend" else _worker(workload, site)
    trust = {CA_FILE: str(site.ca_file)} if site.ca_file and workload.kind == "stage-worker" else {}
    lines: list[Line] = [
        Comment(f"{owner.kind} {owner.namespace}/{owner.name}: {_what(workload)} of Rollyard (slurm-bridge)"),
        Code("umask 077"),
        *(Export(name, value) for name, value in {**trust, **wanted.env}.items()),
        *(Code(line) for line in wanted.prolog),
        *program,
        *_begin(_engine_env(workload)),
        *_TRAPS,
    ]
    options = tuple(_options(workload, site, identity, wanted, avoided))
    return Batch(options, tuple(wanted.sbatch), tuple(render(lines)), _WATCH)


def _what(workload: Workload) -> str:
    if workload.kind == "backend":
        return f"inference backend {workload.index} ({workload.engine})"
    return f"stage worker {workload.index}"


def _engine_env(workload: Workload) -> dict[str, str]:
    env = dict(SERVER_ENV) if workload.engine == "vllm" else {}
    return {**env, **dict(workload.env)}


def _begin(env: Mapping[str, str]) -> list[Line]:
    """The function that becomes the program.

    What a pool's author wants of the environment is set in it alone, so that it is no variable of the script.
    """
    return [
        Code("begin() {"),
        *(Code(f"  {line}") for line in render(Export(name, value) for name, value in env.items())),
        Code('  exec "${program[@]}"'),
        Code("}"),
    ]


def _worker(workload: Workload, site: Site) -> list[Line]:
    python = site.profile.of(workload.kind).python or site.python
    arguments: list[Part] = [
        *(python, *WORKER_MODULE, *worker_arguments(workload, site.url, site.token_file(workload))),
        *("--sandbox", site.sandbox, *site.sandbox_options),
        *(("--max-sandboxes", str(most)) if (most := site.profile.workers.max_sandboxes) else ()),
        *("--drain-seconds", str(site.profile.workers.drain_seconds), "--sandboxes-end"),
    ]
    top = site.profile.workers.run_dir
    return [
        Code('node="${SLURMD_NODENAME:-$(hostname -s)}"'),
        # A name and no path, whatever this variable holds.
        Code(
            'node="n${node//[^A-Za-z0-9._-]/_}"; node="${node#n}"; case "$node" in .|..|"") node=node ;; esac'
        ),
        # Links of the site on the way are followed here, once; whatever is one later is refused.
        Assign("top", (top,)),
        Code(
            'base="$(cd -P -- "$top" && pwd -P)" && [ -n "$base" ] ||'
            ' { echo "error: workers.runDir $top cannot be used" >&2; exit 73; }'
        ),
        Assign("base", (Code('"${base%/}/ry-$UID-"'), site.instance)),
        Code('run="$base/$node"'),
        *RUN_FOLDER,
        # Two jobs on one node reach each other's sandboxes only if they see the same folder: sites may give
        # each job a /tmp of its own. So the folder, and not the host, has the name.
        Code(
            '[ -e "$run/name" ] || { printf "%s.%s" "$node" "$SLURM_JOB_ID" >"$run/.name.$$" &&'
            ' ln "$run/.name.$$" "$run/name" 2>/dev/null; rm -f "$run/.name.$$"; }'
        ),
        Code(
            '[ -s "$run/name" ] && node=$(cat "$run/name") ||'
            ' { echo "error: $run cannot be written: is the disk of $node full?" >&2; exit 73; }'
        ),
        # Slurm's own restart of a job begins a worker of another name: the old one may live on.
        Assign(
            "name", (workload.name, Code('"-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}"'))
        ),
        Assign("trouble", (str(site.trouble_file(workload, "")), Code('"$SLURM_JOB_ID"'))),
        Array(
            "program",
            (
                *arguments,
                Code('--node "$node" --run-dir "$run" --name "$name" --trouble-file "$trouble"'),
            ),
        ),
    ]


def _backend(workload: Workload, site: Site, identity: Identity) -> list[Line]:
    wanted = site.profile.of("backend")
    python = wanted.python or site.python
    image = site.profile.backends.image
    if workload.engine == "vllm":
        engine = list(vllm_command(workload, HOST, PORT))
        if image is not None:
            gpus = ["--nv"] if workload.gpus else []
            engine = [
                *site.profile.backends.apptainer,
                "exec",
                *gpus,
                *site.profile.backends.exec_options,
                image,
                *engine,
            ]
    else:
        engine = [python, *ENGINE_MODULE, *engine_arguments(workload, HOST, PORT)]
    arguments: list[Part] = [
        *(python, "-m", "rollyard_slurm.node", "--endpoint", str(site.endpoint_file(identity.launch))),
        *("--toward", site.url, "--", *engine),
    ]
    return [Array("program", tuple(arguments))]


_TRAPS: tuple[Line, ...] = tuple(
    Code(line)
    for line in (
        "# USR1 (the time limit is near, or the bridge asks): wind up. TERM, USR2: at once.",
        "child= asked=",
        'drain() { [ -n "$asked" ] || { asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }; }',
        'hurry() { asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }',
        "trap drain USR1",
        "trap hurry TERM USR2",
    )
)
_WATCH = (
    "begin &",
    "child=$!",
    '[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null',
    "code=0",
    'while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done',
    'wait "$child" 2>/dev/null; last=$?',
    '[ "$last" -eq 127 ] || code=$last',
    'exit "$code"',
)
