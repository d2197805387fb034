"""The batch script of a workload. This module is pure: a script depends only on the arguments given here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollyard_client.environment import CA_FILE
from rollyard_drivers.commands import (
    ENGINE_MODULE,
    SERVER_ENV,
    WORKER_MODULE,
    engine_arguments,
    ready_arguments,
    vllm_command,
    worker_arguments,
)
from rollyard_drivers.reconcile.plan import Workload
from rollyard_process.telemetry.variables import LOG_FORMAT

from rollyard_slurm.profile import SIGNAL_SECONDS, JobProfile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.placeholders import HOST, PORT
from rollyard_slurm.scripts.run_folder import RUN_FOLDER
from rollyard_slurm.scripts.shell import Array, Assign, Code, Comment, Directive, Export, Line, Part, render
from rollyard_slurm.scripts.site import Site

TITLE = "rollyard-"
"""The prefix of the names of all jobs."""
NODE_UNUSABLE = 73
"""The exit status of a worker whose node lacks what sandboxes need. The stage worker uses the same number."""
DEFAULT_MEMORY = "2G"
"""The default memory of stage workers and embedded engines.

Many sites have a default for each CPU that is too little for them.
"""


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A batch script, and the options with which it is submitted."""

    options: tuple[tuple[str, str | None], ...]
    """The long names of sbatch's options, without dashes, and their values without quotes.

    The value of an option that takes none is None.
    """
    further: tuple[str, ...]
    """The options from the profile's `sbatch`, without any change."""
    before: tuple[str, ...]
    """The lines of the script up to the traps, which are included."""
    after: tuple[str, ...]
    """The lines of the script that start the program, and all that follow."""

    def text(self, between: Sequence[str] = ()) -> str:
        """Return the text of the script, which sbatch takes and an administrator can read.

        Args:
            between: Lines that are added between the traps and the start of the program.

        Raises:
            ScriptInvalid: The value of an option cannot be written into a line.
        """
        asked = render(Directive(name, value) for name, value in self.options)
        directives = [*asked, *(f"#SBATCH {option}" for option in self.further)]
        return "\n".join(["#!/bin/bash", *directives, *self.before, *between, *self.after]) + "\n"


def _options(
    workload: Workload, site: Site, identity: SlurmJobIdentity, wanted: JobProfile, avoided: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Return the long names of sbatch's options, without dashes, and their values."""
    seconds = wanted.signal_seconds or SIGNAL_SECONDS
    # The token of a ready worker serves once. If Slurm started its job again, the worker would be refused.
    ready = workload.owner.kind == "ReadyWorker"
    options: list[tuple[str, str | None]] = [
        ("job-name", TITLE + workload.name),
        ("comment", identity.comment),
        ("output", str(site.logs).replace("%", "%%") + f"/{workload.name}-%j.log"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{seconds}"),
        ("requeue" if wanted.requeue is not False and not ready else "no-requeue", None),
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
    """Return the value of `--mem`: that of the profile, or else enough for Rollyard's own programs.

    The result is None if other options set the memory, if the job has its node for itself, and for vLLM,
    which gets the default of the site.
    """
    said = any(option.partition("=")[0].startswith("--mem") for option in wanted.sbatch)
    if wanted.memory is not None or said or wanted.exclusive or workload.engine == "vllm":
        return wanted.memory
    return DEFAULT_MEMORY


def _gres(workload: Workload, wanted: JobProfile) -> str | None:
    """Return the value of `--gres`, or None if the job needs no generic resources."""
    if wanted.gres is not None:
        return wanted.gres.replace("{gpus}", str(workload.gpus))
    return f"gpu:{workload.gpus}" if workload.gpus else None


def batch_script(
    workload: Workload, site: Site, identity: SlurmJobIdentity, avoided: Sequence[str] = ()
) -> BatchScript:
    """Return the batch script of a workload.

    Args:
        workload: The worker or backend that the script runs.
        site: The site, the home and the control plane of the bridge.
        identity: The identity of the job, which becomes its comment.
        avoided: The nodes that the job excludes, because workers recently could not use them.

    Raises:
        ScriptInvalid: A name or a value cannot be part of a script. `BatchScript.text` checks the options.
    """
    wanted = site.profile.of(workload.kind)
    owner = workload.owner
    program = _backend(workload, site, identity) if workload.kind == "backend" else _worker(workload, site)
    trust = {CA_FILE: str(site.ca_file)} if site.ca_file and workload.kind == "stage-worker" else {}
    worker = workload.kind == "stage-worker"
    telemetry = {name: value for name, value in site.telemetry if worker or name == LOG_FORMAT}
    lines: list[Line] = [
        Comment(f"{owner.kind} {owner.namespace}/{owner.name}: {_what(workload)} of Rollyard (slurm-bridge)"),
        Code("umask 077"),
        *(Export(name, value) for name, value in {**trust, **telemetry, **wanted.env}.items()),
        *(Code(line) for line in wanted.prolog),
        *program,
        *_begin(_engine_env(workload)),
        *_TRAPS,
    ]
    options = tuple(_options(workload, site, identity, wanted, avoided))
    return BatchScript(options, tuple(wanted.sbatch), tuple(render(lines)), _WATCH)


def _what(workload: Workload) -> str:
    """Return a readable description of a workload, for the comment in its script."""
    if workload.kind == "backend":
        return f"inference backend {workload.index} ({workload.engine})"
    if workload.owner.kind == "ReadyWorker":
        return "stage worker"
    return f"stage worker {workload.index}"


def _engine_env(workload: Workload) -> dict[str, str]:
    """Return the environment variables that only the program gets."""
    env = dict(SERVER_ENV) if workload.engine == "vllm" else {}
    return {**env, **dict(workload.env)}


def _begin(env: Mapping[str, str]) -> list[Line]:
    """Return the lines of the bash function that executes the program.

    Only this function sets the environment that the author of a pool wants. The script itself therefore does
    not see it.
    """
    return [
        Code("begin() {"),
        *(Code(f"  {line}") for line in render(Export(name, value) for name, value in env.items())),
        Code('  exec "${program[@]}"'),
        Code("}"),
    ]


def _worker(workload: Workload, site: Site) -> list[Line]:
    """Return the lines that prepare the run folder and the command of a stage worker."""
    python = site.profile.of(workload.kind).python or site.python
    token_file = site.token_file(workload)
    if workload.owner.kind == "ReadyWorker":
        work = ready_arguments(workload.owner, site.url, token_file)
    else:
        work = worker_arguments(workload, site.url, token_file)
    arguments: list[Part] = [
        *(python, *WORKER_MODULE, *work),
        *("--sandbox", site.sandbox, *site.sandbox_options),
        *(("--max-sandboxes", str(most)) if (most := site.profile.workers.max_sandboxes) else ()),
        *("--drain-seconds", str(site.profile.workers.drain_seconds), "--sandboxes-end"),
    ]
    top = site.profile.workers.run_dir
    return [
        Code('node="${SLURMD_NODENAME:-$(hostname -s)}"'),
        # The result is always a name and never a path, whatever value the variable has.
        Code(
            'node="n${node//[^A-Za-z0-9._-]/_}"; node="${node#n}"; case "$node" in .|..|"") node=node ;; esac'
        ),
        # Links of the site in this path are followed once, here. Links that appear later are refused.
        Assign("top", (top,)),
        Code(
            'base="$(cd -P -- "$top" && pwd -P)" && [ -n "$base" ] ||'
            ' { echo "error: workers.runDir $top cannot be used" >&2; exit 73; }'
        ),
        Assign("base", (Code('"${base%/}/ry-$UID-"'), site.instance)),
        Code('run="$base/$node"'),
        *RUN_FOLDER,
        # Two jobs on one node can reach each other's sandboxes only if they see the same folder, and sites
        # may give each job its own /tmp. Therefore the name belongs to the folder and not to the host.
        Code(
            '[ -e "$run/name" ] || { printf "%s.%s" "$node" "$SLURM_JOB_ID" >"$run/.name.$$" &&'
            ' ln "$run/.name.$$" "$run/name" 2>/dev/null; rm -f "$run/.name.$$"; }'
        ),
        Code(
            '[ -s "$run/name" ] && node=$(cat "$run/name") ||'
            ' { echo "error: $run cannot be written: is the disk of $node full?" >&2; exit 73; }'
        ),
        # After Slurm restarts a job, the worker has another name, because the old worker may still run.
        Assign(
            "name", (workload.name, Code('"-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}"'))
        ),
        Assign("trouble", (str(site.trouble_file(workload.name, "")), Code('"$SLURM_JOB_ID"'))),
        Array(
            "program",
            (
                *arguments,
                Code('--node "$node" --run-dir "$run" --name "$name" --trouble-file "$trouble"'),
            ),
        ),
    ]


def _backend(workload: Workload, site: Site, identity: SlurmJobIdentity) -> list[Line]:
    """Return the lines that prepare the command of an inference backend."""
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
        "# USR1 (the time limit is near, or the bridge asks for it) drains; TERM and USR2 end at once.",
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
