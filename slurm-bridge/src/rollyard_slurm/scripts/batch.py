"""The batch script of a workload. This module is pure: a script depends only on the arguments given here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

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
from rollyard_slurm.scripts.shell import (
    HOST,
    PORT,
    Array,
    Assign,
    Code,
    Comment,
    Directive,
    Export,
    Line,
    Part,
    render,
)
from rollyard_slurm.scripts.site import Site

# The run folder of a node is one that no other user of the node can reach or replace. The worker checks it
# with `rollyard_process.private_folder`, which does the same in Python. The script removes the folder after a
# worker was killed. Therefore it must check the folder before it starts a worker.
_RUN_FOLDER_TEXT: Final = r"""
# Another user of the node must not have made the folder before, nor be able to replace it: each folder
# on the way belongs to root or to this user, and is sticky where others can write to it.
private() {
  local part= word words paths=(/) uid gid raw mode owner=none
  IFS=/ read -r -d '' -a words < <(printf '%s\0' "${1#/}")
  for word in "${words[@]}"; do part+="/$word"; paths+=("$part"); done
  while read -r uid gid raw; do
    owner=$uid mode=$((16#$raw))
    [ "$uid" = 0 ] || [ "$uid" = "$UID" ] || return 1
    [ $((mode & 0170000)) -eq $((0040000)) ] || return 1
    [ $((mode & 0022)) -eq 0 ] || [ $((mode & 01000)) -ne 0 ] ||
      { [ $((mode & 0002)) -eq 0 ] && [ "$(id -gn):$gid" = "$(id -un):$(id -g)" ]; } || return 1
  done < <(stat -c '%u %g %f' -- "${paths[@]}" || echo none none 0)
  [ "$owner" = "$UID" ] && [ $((mode & 0077)) -eq 0 ]
}
mkdir -m 700 -- "$base" 2> /dev/null
if ! private "$base" || ! exec 8< "$base" || ! [ "$base" -ef /proc/self/fd/8 ]; then
  echo "error: $base cannot be used: another user can change it, or a folder on the way to it;" \
    "choose another workers.runDir" >&2
  exit 73
fi
# The last worker of this node removes the folder, and one that comes meanwhile makes it again.
for _ in 1 2 3 4 5; do
  mkdir -p -- "$run" && exec 9>> "/proc/self/fd/8/$node.lock" && flock -s -w 20 9 &&
    [ "$run.lock" -ef /proc/self/fd/9 ] && [ -O "$run" ] && break
done
[ -O "$run" ] || { echo "error: $run cannot be used" >&2; exit 73; }
exec 8<&-
trap 'flock -n -x 9 && rm -rf -- "$run" "$run.lock" && rmdir -- "${run%/*}" 2> /dev/null' EXIT
"""
_RUN_FOLDER: Final = tuple(Code(line) for line in _RUN_FOLDER_TEXT.strip("\n").splitlines())
"""The lines of the script, which hold the lock of the folder as descriptor 9.

They need the variables `base`, which is a physical path, `node`, and `run`, which is `$base/$node`.
"""


TITLE: Final = "rollyard-"
"""The prefix of the names of all jobs."""
NODE_UNUSABLE: Final = 73
"""The exit status of a worker whose node lacks what sandboxes need. The stage worker uses the same number."""
DEFAULT_MEMORY: Final = "2G"
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
            SlurmError: The value of an option cannot be written into a line.
        """
        directives = [
            *render(Directive(name, value) for name, value in self.options),
            *(f"#SBATCH {option}" for option in self.further),
        ]
        return "\n".join(["#!/bin/bash", *directives, *self.before, *between, *self.after]) + "\n"


def _options(
    workload: Workload, site: Site, identity: SlurmJobIdentity, profile: JobProfile, avoided: Sequence[str]
) -> list[tuple[str, str | None]]:
    """Return the long names of sbatch's options, without dashes, and their values."""
    seconds = profile.signal_seconds or SIGNAL_SECONDS
    # The token of a ready worker can be used only once. If Slurm started its job again, the worker would be
    # refused.
    ready = workload.owner.kind == "ReadyWorker"
    options: list[tuple[str, str | None]] = [
        ("job-name", TITLE + workload.name),
        ("comment", identity.comment),
        ("output", str(site.logs).replace("%", "%%") + f"/{workload.name}-%j.log"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{seconds}"),
        ("requeue" if profile.requeue is not False and not ready else "no-requeue", None),
        ("nodes", "1"),
        ("ntasks", "1"),
        ("chdir", str(site.home)),
    ]
    for name, value in (
        ("partition", profile.partition),
        ("account", profile.account),
        ("qos", profile.qos),
        ("reservation", profile.reservation),
        ("wckey", profile.wckey),
        ("constraint", profile.constraint),
        ("exclude", ",".join([*([profile.exclude] if profile.exclude else []), *avoided]) or None),
        ("time", profile.time_limit),
        ("cpus-per-task", profile.cpus),
        ("mem", _memory(workload, profile)),
        ("gres", _gres(workload, profile)),
    ):
        if value is not None:
            options.append((name, str(value)))
    if profile.exclusive:
        options.append(("exclusive", None))
    return options


def _memory(workload: Workload, profile: JobProfile) -> str | None:
    """Return the value of `--mem`: that of the profile, or else enough for Rollyard's own programs.

    The result is None if other options set the memory, if the job has its node for itself, and for vLLM,
    which gets the default of the site.
    """
    memory_chosen = any(option.partition("=")[0].startswith("--mem") for option in profile.sbatch)
    if profile.memory is not None or memory_chosen or profile.exclusive or workload.engine == "vllm":
        return profile.memory
    return DEFAULT_MEMORY


def _gres(workload: Workload, profile: JobProfile) -> str | None:
    """Return the value of `--gres`, or None if the job needs no generic resources."""
    if profile.gres is not None:
        return profile.gres.replace("{gpus}", str(workload.gpus))
    return f"gpu:{workload.gpus}" if workload.gpus else None


def batch_script(
    workload: Workload,
    site: Site,
    identity: SlurmJobIdentity,
    avoided: Sequence[str] = (),
    folder: str = "",
) -> BatchScript:
    """Return the batch script of a workload.

    Args:
        workload: The worker or backend that the script runs.
        site: The site, the home and the control plane of the bridge.
        identity: The identity of the job, which becomes its comment.
        avoided: The nodes that the job excludes, because workers recently could not use them.
        folder: The folder of a backend's model, if `workload.model` is its name on the hub.

    Raises:
        SlurmError: A name or a value cannot be part of a script. `BatchScript.text` checks the options.
    """
    profile = site.profile.of(workload.kind)
    owner = workload.owner
    worker = workload.kind == "stage-worker"
    program = _worker(workload, site) if worker else _backend(workload, site, identity, folder)
    trust = {CA_FILE: str(site.ca_file)} if site.ca_file and worker else {}
    telemetry = {name: value for name, value in site.telemetry if worker or name == LOG_FORMAT}
    hub = dict(site.hub) if worker else {}
    lines: list[Line] = [
        Comment(f"{owner.kind} {owner.namespace}/{owner.name}: {_what(workload)} of Rollyard (slurm-bridge)"),
        Code("umask 077"),
        *(Export(name, value) for name, value in {**trust, **telemetry, **hub, **profile.env}.items()),
        *(Code(line) for line in profile.prolog),
        *program,
        *_begin(_engine_env(workload)),
        *_TRAPS,
    ]
    options = tuple(_options(workload, site, identity, profile, avoided))
    return BatchScript(options, tuple(profile.sbatch), tuple(render(lines)), _WATCH)


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
        *_RUN_FOLDER,
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


def _backend(workload: Workload, site: Site, identity: SlurmJobIdentity, folder: str) -> list[Line]:
    """Return the lines that prepare the command of an inference backend."""
    profile = site.profile.of("backend")
    python = profile.python or site.python
    image = site.profile.backends.image
    if workload.engine == "vllm":
        engine = list(vllm_command(workload, HOST, PORT, folder))
        if image is not None:
            gpus = ["--nv"] if workload.gpus else []
            # The files of a model of the hub are links to others in the folder of its repository.
            cache = str(PurePath(folder).parents[1]) if folder not in ("", workload.model) else ""
            engine = [
                *site.profile.backends.apptainer,
                "exec",
                *gpus,
                *([f"--bind={cache}:{cache}:ro"] if cache else []),
                *site.profile.backends.exec_options,
                image,
                *engine,
            ]
    else:
        engine = [python, *ENGINE_MODULE, *engine_arguments(workload, HOST, PORT, folder=folder)]
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
_WATCH: Final = (
    "begin &",
    "child=$!",
    '[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null',
    "code=0",
    'while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done',
    'wait "$child" 2>/dev/null; last=$?',
    '[ "$last" -eq 127 ] || code=$last',
    'exit "$code"',
)
