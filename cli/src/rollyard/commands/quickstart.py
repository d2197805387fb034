"""`rollyard quickstart`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--tasks", type=click.IntRange(min=1), default=64, envvar="TASKS", show_default=True)
@click.option("--samples", type=click.IntRange(1, 1024), default=8, envvar="SAMPLES", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
    help="Results.",
)
@click.option("--home", type=click.Path(path_type=Path), help="State folder, made anew [OUT/home].")
@click.option(
    "--job", type=click.Path(path_type=Path), help="Another manifest [examples/quickstart/job.yaml]."
)
@click.option("--model", help="Model folder [the shipped one].")
@click.option("--backend", metavar="URL", help="A running vLLM-compatible server instead.")
@click.option(
    "--sandbox", type=click.Choice(["bubblewrap", "process"]), default="bubblewrap", show_default=True
)
def command(
    tasks: int,
    samples: int,
    out: Path,
    home: Path | None,
    job: Path | None,
    model: str | None,
    backend: str | None,
    sandbox: str,
) -> None:
    """Run the quickstart job on this machine, from nothing to trajectories. Ctrl-C stops all of it."""
    from rich.console import Console

    from rollyard.quickstart import QuickstartOptions, default_job, run
    from rollyard.watching import require_success

    further = [*(("--backend", backend) if backend else ()), *(("--model", model) if model else ())]
    options = QuickstartOptions(
        job=job or default_job(),
        home=home or out / "home",
        out=out,
        tasks=tasks,
        samples=samples,
        sandbox=sandbox,
        backend=tuple(further),
    )
    require_success(run(options, Console(highlight=False)))
