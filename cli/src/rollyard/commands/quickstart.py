"""The command `rollyard quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollyard import terminal

if TYPE_CHECKING:
    from rollyard.quickstart.vllm_servers import VllmOptions


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
@click.option(
    "--home", type=click.Path(path_type=Path), help="State folder, which is emptied first [OUT/home]."
)
@click.option(
    "--job", type=click.Path(path_type=Path), help="Another manifest [examples/quickstart/job.yaml]."
)
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
@click.option("--update-weights", is_flag=True, help="Give the vLLM servers new weights in the middle.")
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
    engine: str,
    replicas: int | None,
    vllm_python: Path | None,
    update_weights: bool,
    backend: str | None,
    sandbox: str,
) -> None:
    """Run the quickstart job on this machine, from nothing to trajectories. Ctrl-C stops all of it."""
    from rollyard.extras import require

    require("`rollyard quickstart`", "local", "api", "worker", "sandbox", "engine")
    from rollyard.jobs.watching import require_success
    from rollyard.quickstart.run import QuickstartOptions, default_job, run

    vllm = _vllm(engine, model, replicas, vllm_python, update_weights, backend)
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


def _vllm(
    engine: str,
    model: str | None,
    replicas: int | None,
    python: Path | None,
    update_weights: bool,
    backend: str | None,
) -> VllmOptions | None:
    from rollyard.errors import UsageProblem

    if engine == "embedded":
        if replicas is not None or python is not None or update_weights:
            raise UsageProblem("--replicas, --vllm-python and --update-weights go with --engine vllm")
        return None
    if backend:
        raise UsageProblem("--backend URL is a server that runs already; leave --engine out")
    if python is None:
        raise UsageProblem("--engine vllm: give --vllm-python, a Python that has vLLM (see scripts/vllm-env)")
    if not model:
        raise UsageProblem(
            "--engine vllm: give --model, a Hugging Face model folder (examples/tiny-policy/hf)"
        )
    from rollyard.quickstart.vllm_servers import VllmOptions

    return VllmOptions(python, Path(model).expanduser(), replicas or 2, update_weights)
