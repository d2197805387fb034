"""The commands about this machine and what runs on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rollyard_process.log_text import one_line
from rollyard_process.version import installed_version

from rollyard import terminal
from rollyard.errors import CliError, UsageProblem
from rollyard.extras import require

if TYPE_CHECKING:
    from rollyard_inference.fitness import FitnessCheck, Probed

    from rollyard.quickstart.vllm_servers import VllmOptions

GRACE_SECONDS: Final = 25.0


@click.command()
@click.option("--home", type=click.Path(path_type=Path), help="State folder [~/.local/state/rollyard].")
def down(home: Path | None) -> None:
    """Stop what `rollyard up` started on this machine. State and trajectories stay."""
    from rollyard_drivers.host.child import sweep
    from rollyard_drivers.host.home import Home, default_home, read_json
    from rollyard_drivers.host.processes import end

    folder = Home((home or default_home()).expanduser().resolve())
    running = folder.supervisor()
    if running is None:
        with folder.locked():
            left = sweep(folder.pids)
        removed = f"; removed leftovers: {', '.join(left)}" if left else ""
        click.echo(f"nothing runs on {folder.root}{removed}")
        return
    if (read_json(folder.root / "bridge.json") or {}).get("pid") == running.pid:
        raise UsageProblem(f"a Slurm bridge runs on {folder.root}: end it with `rollyard slurm-bridge down`")
    if not end(running, GRACE_SECONDS):
        raise CliError(f"process {running.pid} does not end; see {folder.logs}")
    sweep(folder.pids)
    click.echo(f"stopped (process {running.pid}); state and trajectories stay in {folder.root}")


@click.command()
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A Slurm site's YAML file, as for `slurm-bridge up`: its slurmrestd is tried.",
)
def doctor(profile: Path | None) -> int:
    """Show what works on this machine, and what to do about the rest. Exit with 1 if something is missing."""
    from rich.text import Text
    from rollyard_drivers.host.home import Home, default_home

    from rollyard.doctor import examine

    console = terminal.console()
    styles = {"ok": "green", "missing": "bold red", "optional": "yellow"}
    missing = False
    for finding in examine(Home(default_home().expanduser().resolve()).run, profile):
        missing = missing or finding.verdict == "missing"
        line = Text(f"{finding.verdict:<9}", style=styles[finding.verdict])
        line.append(f"{finding.name:<16} {finding.state}", style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<26}{finding.advice}", style="dim"), soft_wrap=True)
    return int(missing)


@click.command("check-backend")
@click.argument("url")
@click.option("--model", default="", help="The name it is served under [the first that the server lists].")
@click.option("--tokenizer", default="", help="Its folder or hub id [that of what the server loaded].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_backend(url: str, model: str, tokenizer: str, as_json: bool) -> int:
    """Show what the vLLM or SGLang server at URL lacks for training, with the options to add.

    The exit status is 0 if it can train, 1 if it lacks something that training needs, and 2 if nothing at URL
    answers as such a server. It samples three tokens, and changes nothing.
    """
    from rollyard_inference.fitness import checks, in_a_line, trains

    from rollyard.local.external_server import MAX_QUOTED, check_url, probed, tokenizer_check

    check_url("URL", url)
    # On a terminal, this shows that something happens: the requests may take some seconds.
    with terminal.console(stderr=True).status(f"asking {url}"):
        answers = probed(url, model)
        rows = (*checks(answers), tokenizer_check(answers.model, tokenizer))
    if as_json:
        import json
        from dataclasses import asdict

        document = {
            "url": url,
            "model": answers.model.name[:MAX_QUOTED],
            "engine": answers.engine,
            "version": answers.version,
            "trains": trains(rows),
            "summary": in_a_line(rows),
            "checks": [asdict(row) for row in rows],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _print_checks(url, answers, rows)
    return int(trains(rows) == "no")


def _print_checks(url: str, answers: Probed, rows: Sequence[FitnessCheck]) -> None:
    """Print a table of the checks, below what the server is and above whether it can train."""
    from rich.text import Text
    from rollyard_inference.fitness import in_a_line

    from rollyard.local.external_server import MAX_QUOTED
    from rollyard.render.tables import plain_table, print_table

    console = terminal.console()
    # Without a version, nothing says that a server which speaks vLLM's protocol is vLLM.
    engine = f" ({answers.engine} {answers.version})" if answers.version else ""
    name = one_line(answers.model.name[:MAX_QUOTED]) or "a model without a name"
    console.print(Text(f"{url} serves {name}{one_line(engine)}\n"), soft_wrap=True)
    table = plain_table(["state", "check", "message"])
    for row in rows:
        style = {"good": "green", "unknown": "yellow", "lacks": "bold red" if row.needed else "yellow"}
        message = Text(one_line(row.finding))
        if row.state != "good":
            for word, text in (("why", row.detail), ("cost", row.cost), ("fix", row.remedy)):
                if text:
                    message.append(f"\n{word}: {one_line(text)}", style="dim")
        table.add_row(Text(row.state, style=style[row.state]), row.name, message)
    print_table(console, table)
    console.print(Text(f"\ntrains: {one_line(in_a_line(rows))}", style="bold"), soft_wrap=True)


@click.command()
@click.option(
    "--tasks",
    type=click.IntRange(min=1),
    default=64,
    envvar="TASKS",
    show_default=True,
    help="Tasks to roll out.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 1024),
    default=8,
    envvar="SAMPLES",
    show_default=True,
    help="Rollouts of each task.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
    help="Results.",
)
@click.option(
    "--home", type=click.Path(path_type=Path), help="State folder, which is emptied first [OUT/home]."
)
@click.option("--job", type=click.Path(path_type=Path), help="Another manifest [the shipped one].")
@click.option("--model", help="Model folder [the shipped one]; with --engine vllm: a Hugging Face folder.")
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    show_default=True,
    help="Backend.",
)
@click.option("--replicas", type=click.IntRange(1, 64), help="vLLM servers [2].")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    help="A Python that has vLLM (scripts/vllm-env prints one).",
)
@click.option("--update-weights", is_flag=True, help="Give the vLLM servers new weights during the job.")
@click.option("--backend", metavar="URL", help="A running vLLM-compatible server instead.")
@click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "process"]),
    default="bubblewrap",
    show_default=True,
    help="What isolates rollouts; `process` isolates nothing.",
)
def quickstart(
    tasks: int,
    samples: int,
    out: Path,
    home: Path | None,
    job: Path | None,
    model: str | None,
    engine: str,
    replicas: int | None,
    vllm_python: Path | None,
    update_weights: bool,
    backend: str | None,
    sandbox: str,
) -> None:
    """Run the quickstart job on this machine, from nothing to trajectories. Ctrl-C stops all of it."""

    require("`rollyard quickstart`", "local", "api", "worker", "sandbox", "engine")
    from rollyard.jobs.running import require_success
    from rollyard.quickstart.run import QuickstartOptions, default_job, run

    vllm: VllmOptions | None = None
    if engine == "embedded":
        if replicas is not None or vllm_python is not None or update_weights:
            raise UsageProblem("--replicas, --vllm-python and --update-weights go with --engine vllm")
    elif backend:
        raise UsageProblem("--backend URL is a server that runs already; leave --engine out")
    elif vllm_python is None:
        raise UsageProblem("--engine vllm: give --vllm-python, a Python that has vLLM (see scripts/vllm-env)")
    elif not model:
        raise UsageProblem(
            "--engine vllm: give --model, a Hugging Face model folder (examples/tiny-policy/hf)"
        )
    else:
        from rollyard.quickstart.vllm_servers import VllmOptions

        vllm = VllmOptions(vllm_python, Path(model).expanduser(), replicas or 2, update_weights)
    further = [
        *(("--backend", backend) if backend else ()),
        *(("--model", model) if model and not vllm else ()),
    ]
    options = QuickstartOptions(
        job=job or default_job(),
        home=home or out / "home",
        out=out,
        tasks=tasks,
        samples=samples,
        sandbox=sandbox,
        backend=tuple(further),
        vllm=vllm,
    )
    require_success(run(options, terminal.console()))


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run a stage worker against a control plane (arguments as for `python -m rollyard_pipeline`)."""

    require("`rollyard worker`", "worker")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rollyard_pipeline", *arguments])


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"rollyard {installed_version()}")
