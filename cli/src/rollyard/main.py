"""The `rollyard` command.

This module holds the names of the commands and their one-line help. The rest is imported when it is called.
"""

from __future__ import annotations

import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from rollyard_drivers.host.errors import HostError

from rollyard import terminal
from rollyard.errors import UsageProblem

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "up": ("up:up", "Start control plane, workers and a backend on this machine"),
    "down": ("local:down", "Stop what `rollyard up` started"),
    "doctor": ("local:doctor", "Show what works on this machine, and what to do about the rest"),
    "check-backend": (
        "local:check_backend",
        "Show what a running vLLM or SGLang server lacks for training",
    ),
    "init": ("first:init", "Make a folder with tasks, a reward and a job of one's own, to change"),
    "try": ("first:try_task", "Play one task once, and show it turn by turn with its reward"),
    "submit": ("resources:submit", "Submit a job or a backend pool from a manifest"),
    "get": ("resources:get", "List jobs (rj) or backend pools (bp), or show one"),
    "describe": ("resources:describe", "Show everything about one job or pool"),
    "scale": ("resources:scale", "Change the number of a pool's backends"),
    "watch": ("resources:watch", "Follow a job's progress until it ends"),
    "trajectories": (
        "trajectories:trajectories",
        "Write a job's trajectories to a file (.parquet or .jsonl)",
    ),
    "grade": ("tasks:grade", "Grade an answer, or a file of answers, and show why"),
    "rescore": ("trajectories:rescore", "Evaluate a job's kept trajectories again, into a new file"),
    "view": ("trajectories:view", "Read a trajectory turn by turn, sampled tokens marked"),
    "open": ("trajectories:open_page", "Print a link that opens the page in a browser, signed in"),
    "cancel": ("resources:cancel", "Cancel a job, a group or a rollout"),
    "delete": ("resources:delete", "Delete a job or a pool"),
    "weights": ("weights:weights", "Update a pool's weights, list its updates, pause or resume it"),
    "control-plane": (
        "rollyard_api.command:command",
        "Run a control plane of your own, without workers and backends",
    ),
    "slurm-bridge": (
        "slurm_bridge:bridge",
        "Run jobs and backends on a Slurm cluster, from a login or service node",
    ),
    "validate": ("tasks:validate", "Check manifests and the tasks they name, without a server"),
    "images": ("tasks:images", "Build images of sandboxes from Dockerfiles, for Apptainer"),
    "worker": ("local:worker", "Run a stage worker against a control plane"),
    "quickstart": (
        "local:quickstart",
        "Run the quickstart job on this machine, from nothing to trajectories",
    ),
    "version": ("local:version", "Print the version"),
}
"""Where each command is (below `rollyard.commands`, or with its full name), and its one-line help."""


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
            import difflib

            similar = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {similar[0]!r}?" if similar else " See `rollyard --help`."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, _bare_kubernetes(args))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with their help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
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
