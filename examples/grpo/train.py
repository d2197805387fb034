"""Train the tiny policy by GRPO on rollouts from a running Rollyard.

    rollyard up --home HOME &
    ROLLYARD_HOME=HOME python examples/grpo/train.py --out runs/train/seed-0

It needs torch, transformers and onnx (`scripts/train-env` makes such an environment). The light client comes
from this checkout, unless the environment has one. With `--job FILE` it trains on the tasks of your own job.
`make demo-train` starts everything. It may be killed at any time: a further start with the same options
continues from the newest checkpoint, and uses no rollout twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tiny-policy")]
sys.path += [str(ROOT / part / "src") for part in ("cli", "client", "crds", "drivers", "process")]
# The rollouts want the same cores. A thread that waits by spinning would take one from them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from rollyard import Client  # noqa: E402
from rollyard.errors import RollyardError, ServerUnavailable  # noqa: E402

from tinygrpo.errors import PoolNotReady, RunTaken, TrainingError  # noqa: E402
from tinygrpo.rollouts import StreamSettings  # noqa: E402
from tinygrpo.run_lock import run_lock  # noqa: E402
from tinygrpo.tasks import OwnJob  # noqa: E402
from tinygrpo.trainer import Trainer, TrainSettings  # noqa: E402
from tinygrpo.update import UpdateSettings  # noqa: E402

BASE: Final = HERE.parent / "tiny-policy" / "hf"
ONNX: Final = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"


TERMINATED: Final = 128 + signal.SIGTERM
LATER: Final = 75
"""The exit status where a later start may help (EX_TEMPFAIL of sysexits.h): nobody answers, the pool has no
server, or another trainer of the run has not ended yet. After status 1, a person has to look first.
"""


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End at SIGTERM, with which a cluster asks for its machine back. The newest checkpoint has the run.

    The first process of a container would ignore the signal without a handler.
    """
    sys.exit(TERMINATED)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are not less than `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return number

    return parse


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run: metrics, checkpoints, result.json"
    )
    parser.add_argument("--run", default="", help="name of its jobs and policy versions [grpo-SEED]")
    parser.add_argument(
        "--job", type=Path, help="train on the tasks of this manifest, with its handler, reward and agent"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--steps", type=at_least(1), default=14, help="most steps")
    parser.add_argument(
        "--enough", type=float, default=0.88, help="end once two steps had this success in training"
    )
    parser.add_argument("--groups", type=at_least(1), default=32, help="groups with a signal of a step")
    parser.add_argument("--samples", type=at_least(2), default=8, help="rollouts of a group")
    parser.add_argument("--in-flight", type=at_least(1), default=12, help="groups that are tried at once")
    parser.add_argument(
        "--concurrency", type=at_least(1), default=32, help="rollouts in the Run stage at once"
    )
    parser.add_argument("--max-lag", type=at_least(0), default=0, help="updates that a token may be old")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--minibatches", type=at_least(1), default=4, help="optimiser steps of a step")
    parser.add_argument(
        "--held-out", type=at_least(0), help="tasks of an evaluation; 0: no evaluations [64; with --job: 0]"
    )
    parser.add_argument("--held-out-samples", type=at_least(1), default=8, help="rollouts of each")
    parser.add_argument(
        "--goal", type=float, help="measure afterwards when the checkpoints reached this success"
    )
    parser.add_argument(
        "--lock-wait", type=at_least(0), default=90, metavar="SECONDS",
        help="wait so long for another trainer of the same run to end [90]",
    )  # fmt: skip
    parser.add_argument("--threads", type=at_least(1), default=1, help="torch's threads")
    parser.add_argument("--warm", type=at_least(0), default=8, help="sandboxes that stand ready")
    parser.add_argument("--pool", default="default")
    parser.add_argument("--namespace", default="default", help="namespace of the pool and of the jobs")
    parser.add_argument("--base", type=Path, default=BASE, help="Hugging Face folder of the first weights")
    parser.add_argument("--onnx", type=Path, default=ONNX, help="ONNX folder of the same model")
    options = parser.parse_args()
    if options.held_out is None:
        options.held_out = 0 if options.job else 64
    if options.job and options.held_out > 0:
        parser.error("--held-out: its tasks are those of the tiny policy; leave it out with --job")
    if options.goal is not None and options.held_out == 0:
        parser.error("--goal: there is no success on held-out tasks without --held-out")
    return options


def main() -> int:
    """Train, write `result.json`, and return the exit status."""
    options = arguments()
    started = time.monotonic()
    out = options.out.resolve()
    try:
        own = OwnJob.read(options.job) if options.job else None
    except TrainingError as error:
        print(f"train: {error.reason}: {error}", file=sys.stderr)
        return 1
    settings = TrainSettings(
        run=options.run or f"grpo-{options.seed}",
        seed=options.seed,
        steps=options.steps,
        enough=options.enough,
        pool=options.pool,
        held_out=options.held_out,
        samples=options.held_out_samples,
        stream=StreamSettings(
            options.groups,
            options.samples,
            options.in_flight,
            options.max_lag,
            options.concurrency,
            options.warm,
        ),
        update=UpdateSettings(options.learning_rate, options.minibatches),
        own=own,
    )
    # The rollouts want the other cores.
    torch.set_num_threads(options.threads)
    signal.signal(signal.SIGTERM, end_at_once)
    try:
        with run_lock(out, options.lock_wait), Client(namespace=options.namespace) as client:
            trainer = Trainer(
                client, out, options.base, options.onnx, settings, lambda line: print(line, flush=True)
            )
            result = trainer.run()
            document = {**asdict(result), "wall_seconds": time.monotonic() - started}
            if options.goal is not None:
                reached = trainer.first_at(options.goal)
                document["reached"] = None if reached is None else asdict(reached)
            trainer.close()
    except (TrainingError, RollyardError) as error:
        print(f"train: {error.reason}: {error}", file=sys.stderr)
        return LATER if isinstance(error, (ServerUnavailable, PoolNotReady, RunTaken)) else 1
    (out / "result.json").write_text(json.dumps(document, indent=2) + "\n")
    if result.success_before is not None and result.success_after is not None:
        print(f"held-out success {result.success_before:.3f} -> {result.success_after:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
