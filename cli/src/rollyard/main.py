"""The `rollyard` command.

This module holds the names of the commands and their one-line help. The rest is imported when it is called.
"""

from __future__ import annotations

import io
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from rollyard_drivers.host.errors import HostError

from rollyard import terminal
from rollyard.errors import UsageProblem

SECTIONS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "On this machine": {
        "quickstart": (
            "local:quickstart",
            "Run the quickstart job on this machine, from nothing to trajectories",
        ),
        "up": ("up:up", "Start control plane, workers and a backend on this machine"),
        "down": ("local:down", "Stop what `rollyard up` started"),
        "doctor": ("local:doctor", "Show what works on this machine, and what to do about the rest"),
    },
    "A task of one's own": {
        "init": ("first:init", "Make a folder with tasks, a reward and a job of one's own, to change"),
        "try": ("first:try_task", "Play one task once, and show it turn by turn with its reward"),
        "validate": ("tasks:validate", "Check manifests and the tasks they name, without a server"),
        "grade": ("tasks:grade", "Grade an answer, or a file of answers, and show why"),
    },
    "Jobs and pools": {
        "submit": ("resources:submit", "Submit a job or a backend pool from a manifest"),
        "apply": ("resources:apply", "Create jobs and pools from manifests, or change them"),
        "get": ("resources:get", "List jobs (rj) or backend pools (bp), or show some"),
        "describe": ("resources:describe", "Show everything about a job or pool"),
        "watch": ("resources:watch", "Follow a job's progress until it ends"),
        "wait": ("jobs:wait", "Wait until jobs or pools have a condition, or are gone"),
        "suspend": ("jobs:suspend", "Suspend jobs"),
        "resume": ("jobs:resume", "Let suspended jobs continue"),
        "cancel": ("resources:cancel", "Cancel a job, a group or a rollout"),
        "delete": ("resources:delete", "Delete jobs or pools"),
        "push": ("jobs:push", "Push tasks to a stream"),
        "close": ("jobs:close", "Close a stream, which takes no more tasks then"),
        "scale": ("resources:scale", "Change the number of a pool's backends"),
        "weights": ("weights:weights", "Update a pool's weights, list its updates, pause or resume it"),
    },
    "Results": {
        "view": ("trajectories:view", "Read a trajectory turn by turn, sampled tokens marked"),
        "open": ("trajectories:open_page", "Print a link that opens the page in a browser, signed in"),
        "trajectories": (
            "trajectories:trajectories",
            "Write a job's trajectories to a file (.parquet or .jsonl)",
        ),
        "rescore": ("trajectories:rescore", "Evaluate a job's kept trajectories again, into a new file"),
    },
    "Why something fails": {
        "explain": ("explain:explain", "Explain a field of a manifest or a task, or a reason"),
        "logs": ("logs:logs", "Print the logs of the control plane, of workers and of backends"),
        "events": ("jobs:events", "Show what has happened to a job, and follow what happens"),
    },
    "Parts of an installation": {
        "check-backend": (
            "local:check_backend",
            "Show what a running vLLM or SGLang server lacks for training",
        ),
        "images": ("tasks:images", "Build images of sandboxes from Dockerfiles, for Apptainer"),
        "slurm-bridge": (
            "slurm_bridge:bridge",
            "Run jobs and backends on a Slurm cluster, from a login or service node",
        ),
        "control-plane": (
            "rollyard_api.command:command",
            "Run a control plane of your own, without workers and backends",
        ),
        "worker": ("local:worker", "Run a stage worker against a control plane"),
        "version": ("local:version", "Print the version"),
    },
}
"""The commands in the order in which a new user meets them, by purpose.

Each has its place (below `rollyard.commands`, or with its full name) and its one-line help.
"""
COMMANDS: Final = {name: command for section in SECTIONS.values() for name, command in section.items()}
_LISTS: Final = "`rollyard get` lists jobs, `rollyard get bp` pools, and `rollyard logs` processes"
_CHANGES: Final = "`rollyard apply -f FILE` changes a job or pool by its manifest"
_CHECKS: Final = "`rollyard validate -f FILE` checks manifests and their tasks, without a server"
ELSEWHERE: Final = {
    **dict.fromkeys(("create", "sbatch", "run", "srun"), "`rollyard submit -f FILE` submits a job"),
    **dict.fromkeys(("ps", "ls", "list", "status", "squeue", "sacct"), _LISTS),
    **dict.fromkeys(("top", "stats", "sinfo"), "`rollyard get bp -o wide` shows the load of backends"),
    **dict.fromkeys(("rm", "remove"), "`rollyard delete NAME` deletes a job"),
    **dict.fromkeys(
        ("stop", "kill", "scancel"), "`rollyard cancel NAME` cancels a job, and `rollyard down` stops all"
    ),
    "start": "`rollyard up` starts all on this machine, and `rollyard resume NAME` a suspended job",
    **dict.fromkeys(("edit", "patch", "replace", "set"), _CHANGES),
    **dict.fromkeys(("hold", "pause"), "`rollyard suspend NAME` suspends a job"),
    **dict.fromkeys(("release", "unpause"), "`rollyard resume NAME` lets a job continue"),
    **dict.fromkeys(
        ("exec", "attach", "cp"),
        "nobody enters a sandbox; `rollyard watch JOB --rollout ID` follows a rollout, and `rollyard view "
        "JOB ID` reads it",
    ),
    "port-forward": "`rollyard --kubernetes COMMAND` reaches a control plane in a cluster, without a tunnel",
    "rollout": "`rollyard view JOB --list` lists the rollouts of a job",
    **dict.fromkeys(("cluster-info", "info"), "`rollyard doctor` shows what works on this machine"),
    "api-resources": "there are rj (rolloutjobs) and bp (backendpools); `rollyard explain rj` has the fields",
    **dict.fromkeys(("inspect", "show", "scontrol"), "`rollyard describe NAME` shows a job or pool"),
    **dict.fromkeys(
        ("login", "config"),
        "ROLLYARD_URL and ROLLYARD_TOKEN name a server; without them it is that of `rollyard up`, or that "
        "of your kubeconfig",
    ),
    "diff": f"{_CHECKS}, and `rollyard get NAME -o yaml` shows what there is",
    "help": "`rollyard --help` lists the commands",
}
"""What users of kubectl, docker or Slurm may type, and what does it here."""
OPTIONS_ELSEWHERE: Final = {
    "--dry-run": _CHECKS,
    "--sort-by": "`rollyard get -o json` prints JSON, which `jq` sorts",
    "--field-selector": "`rollyard get -l LABELS` selects by labels",
    "--all": "`rollyard get -o name | xargs rollyard delete` deletes all jobs",
    "submit -w": "`--wait` shows progress until the job has ended",
}
"""The same for options, those of one command with its name."""


_TEMPLATES: Final = re.compile("'(jsonpath|go-template|custom-columns)")
"""The values of `kubectl get -o` that print chosen fields."""


def _explained(error: click.UsageError, words: Sequence[str]) -> click.UsageError:
    """Return an error of wrong usage with what does what was meant, where that is known."""
    command = None if error.ctx is None else error.ctx.info_name
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        elsewhere = OPTIONS_ELSEWHERE.get(f"{command} {name}") or OPTIONS_ELSEWHERE.get(name)
        return (
            error
            if elsewhere is None
            else click.UsageError(f"No such option {name!r}: {elsewhere}.", error.ctx)
        )
    message = error.format_message().rstrip(".")
    file = next((word for word in words if word.endswith((".yaml", ".yml", ".json", ".jsonl"))), None)
    is_marked = any(word.startswith(("-f", "--file")) for word in words)
    if command in ("apply", "submit", "validate") and file is not None and not is_marked:
        return click.UsageError(f"{message}: `rollyard {command} -f {file}`.", error.ctx)
    if isinstance(error, click.BadParameter) and _TEMPLATES.match(error.message):
        hint = "`rollyard get -o json` prints the fields, which `jq` selects"
        return click.UsageError(f"{message}; {hint}.", error.ctx)
    return error


def _bare_kubernetes(words: list[str]) -> list[str]:
    """Return the words with each bare `--kubernetes` as `--kubernetes=*`, which means any namespace.

    The word after `--kubernetes` is never its value.
    """
    end = words.index("--") if "--" in words else len(words)
    return ["--kubernetes=*" if word == "--kubernetes" else word for word in words[:end]] + words[end:]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, but not for `--help`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without importing them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None if there is none with this name."""
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name][0]
        command: click.Command = pkgutil.resolve_name(where if "." in where else f"rollyard.commands.{where}")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. `rollyard --kubernetes COMMAND` stands for `rollyard COMMAND --kubernetes`."""
        if len(args) > 1 and args[0].partition("=")[0] == "--kubernetes":
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command, and suggest similar names if there is none with this name."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            if args[0] in ELSEWHERE:
                raise click.UsageError(f"No such command {args[0]!r}: {ELSEWHERE[args[0]]}.", ctx)
            import difflib

            similar = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {similar[0]!r}?" if similar else " See `rollyard --help`."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, _bare_kubernetes(args))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with their help, by purpose."""
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, (_, text) in commands.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from rollyard_process.version import installed_version

        click.echo(f"rollyard {installed_version()}")
        ctx.exit()


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def cli() -> None:
    """Rollouts as a service for reinforcement learning of multi-turn LLM agents.

    Start with `rollyard quickstart`, or with `rollyard up` and `rollyard submit -f job.yaml`. Both run on
    this machine and need the extra `rollyard[local]`.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 for success, 1 with a one-line error, 2 for wrong usage, 130 on Ctrl-C, and 141 if the
    reader of a pipe has ended.
    """
    arguments: Any = list(argv) if argv is not None else None
    try:
        result = cli.main(args=arguments, prog_name="rollyard", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            error = _explained(error, sys.argv[1:] if argv is None else argv)
        text = io.StringIO()
        error.show(text)
        terminal.echo(text.getvalue().rstrip("\n"), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of a pipe has ended, so the rest of the output cannot be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UsageProblem as error:
        terminal.echo(f"rollyard: {error}", err=True)
        return 2
    except HostError as error:
        terminal.echo(f"rollyard: {error}", err=True)
        return 1
    except ModuleNotFoundError as error:
        from rollyard.extras import explained

        command = next((word for word in (sys.argv[1:] if argv is None else argv) if word in COMMANDS), "")
        problem = explained(error, f"`rollyard {command}`")
        if problem is None:
            raise
        terminal.echo(f"rollyard: {problem}", err=True)
        return 2
    except OSError as error:
        # The user can fix a file or folder that cannot be read or written, or a full disk.
        if error.filename is None:
            raise
        click.echo(f"rollyard: {error.filename}: {error.strerror or error}", err=True)
        return 1
    return result if isinstance(result, int) else 0
