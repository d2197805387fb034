"""Train the tiny policy with TRL's GRPO trainer on rollouts from a running Rollyard.

    rollyard up --home HOME &
    ROLLYARD_HOME=HOME python examples/trl/train.py --out runs/trl

It needs TRL, torch, onnx and the light client (`scripts/train-env trl` makes such an environment). The checks
of `checks.py` run with every step: the log-probabilities that Rollyard recorded are those that the trainer
computes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent / "grpo"), str(HERE.parent / "tiny-policy")]
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from checks import CheckedTrainer  # noqa: E402
from datasets import Dataset  # noqa: E402
from rollyard import Client  # noqa: E402
from rollyard.integrations.trl import TrlRollouts, TrlWeights, rollyard_reward  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from tinygrpo.onnx_folder import OnnxTemplate  # noqa: E402
from tinygrpo.rollouts import StreamSettings, episode, sampling  # noqa: E402
from tinygrpo.tasks import training_tasks  # noqa: E402

BASE: Final = HERE.parent / "tiny-policy" / "hf"
ONNX: Final = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
POOL: Final = "default"


def job(name: str, samples: int, seed: int) -> dict[str, Any]:
    """Return the manifest of the stream that plays the trainer's prompts."""
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": {
            **episode(StreamSettings(concurrency=32)),
            "tasks": {"stream": True},
            "samplesPerTask": samples,
            "sampling": sampling(seed),
            "backendRef": {"name": POOL},
        },
    }


def to_onnx(template: OnnxTemplate, source: Path, target: Path) -> None:
    """Make the folder that the embedded engine loads of the Hugging Face folder that the trainer saved."""
    target.mkdir(parents=True)
    template.write(load_file(source / "model.safetensors"), target)


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for summary.json and checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, and write summary.json."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = list(itertools.islice(training_tasks(options.seed), options.steps * options.prompts))
    template = OnnxTemplate(ONNX)
    config = GRPOConfig(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        learning_rate=options.learning_rate,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
    )
    with Client() as client:
        rollouts = TrlRollouts(
            client,
            job(f"trl-{time.strftime('%H%M%S')}-{os.getpid()}", options.samples, options.seed),
            tasks,
            weights=TrlWeights(
                client,
                POOL,
                options.out / "checkpoints",
                convert=lambda source, target: to_onnx(template, source, target),
            ),
            timeout=600,
        )
        trainer = CheckedTrainer(
            model=AutoModelForCausalLM.from_pretrained(BASE, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(BASE),
            args=config,
            train_dataset=Dataset.from_list(rollouts.dataset()),
            reward_funcs=rollyard_reward,
            rollout_func=rollouts,
        )
        begin = time.monotonic()
        with rollouts.player:
            trainer.train()
        summary = {
            "steps": trainer.state.global_step,
            "wall_seconds": round(time.monotonic() - begin, 2),
            "rollouts": options.prompts * options.samples * trainer.state.global_step,
            "reward": [round(line["reward"], 4) for line in trainer.state.log_history if "reward" in line],
            "checks": trainer.seen,
        }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    worst = max(step["logprob_difference"] for step in trainer.seen)
    print(
        f"{summary['steps']} steps in {summary['wall_seconds']} s; "
        f"largest difference of a log-probability {worst:.1e}"
    )


if __name__ == "__main__":
    main()
