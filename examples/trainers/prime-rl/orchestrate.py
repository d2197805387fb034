"""Play the batches of prime-rl's trainer on Rollyard, in the place of prime-rl's orchestrator.

The pool is called `default`. Start this before the trainer, which finds the run that it begins.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import cycle, islice
from pathlib import Path

import yaml
from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.transport import TrainingBatch, setup_training_batch_sender
from prime_rl.utils.pathing import clean_future_steps
from rollyard import Client, Task
from rollyard.integrations.prime_rl import PrimeRlWeights, training_samples
from rollyard.integrations.streams import StreamPlayer

HERE, GROUPS, POOL = Path(__file__).parent, 16, "default"


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("output", type=Path, help="the trainer's output_dir")
    parser.add_argument("model", help="the folder of the model with which the trainer began")
    parser.add_argument("tasks", type=Path, help="a file of tasks")
    parser.add_argument("steps", type=int, help="the trainer's max_steps")
    parser.add_argument("--adapter", default="", help="the servers' name of the adapter that is trained")
    parser.add_argument("--resume", type=int, default=0, help="the step from which the trainer resumes")
    return parser.parse_args()


def begin_run(run: Path, resume: int, adapter: bool) -> None:
    """Write what the trainer reads of the run, after what an earlier life left for later steps is removed."""
    (run / "ready").unlink(missing_ok=True)
    clean_future_steps(run.parent, resume)
    parts = [(HERE / "orch.toml").read_text()]
    if adapter:
        parts.append((HERE / "lora.toml").read_text())
    if resume:
        parts.append(f"[ckpt]\nresume_step = {resume}\n")
    (run / "control").mkdir(parents=True, exist_ok=True)
    (run / "control" / "orch.toml").write_text("\n".join(parts))
    (run / "ready").touch()


def main() -> None:
    """Bring the weights of each step, play its batch, and send it to the trainer."""
    options = arguments()
    run = options.output / "run_default"
    tasks = [Task.model_validate_json(line) for line in options.tasks.read_text().splitlines()]
    with Client() as client:
        weights = PrimeRlWeights(
            client, POOL, run / "pool", model=options.model, adapter=options.adapter, timeout=3600
        )
        begin_run(run, options.resume, bool(options.adapter))
        sender = setup_training_batch_sender(run, FileSystemTransportConfig())
        with StreamPlayer(client, yaml.safe_load((HERE / "job.yaml").read_text())) as player:
            for step in range(options.resume + 1, options.steps + 1):
                weights.bring(run, step - 1)
                batch = list(islice(cycle(tasks), (step - 1) * GROUPS, step * GROUPS))
                played = [trajectory for group in player.play(batch) for trajectory in group]
                rows = training_samples(played, env_name="shell")
                asyncio.run(sender.send(TrainingBatch(examples=rows, step=step)))


if __name__ == "__main__":
    main()
