"""A launcher of examples/grpo/train.py that kills it at chosen points: deadly_launcher.py EXAMPLE.

It runs in the trainer's own environment, and imports torch and the example once. Each line of its input is a
JSON object, for which it forks a process that runs the real trainer. One line of its output has the process,
and another one says how it ended:

    {"argv": […], "spared": […], "log": FILE}        →   {"pid": PID}, then {"status": N, "point": NAME}

A point lies before or after a call to the control plane or a write to the disk. The trainer's process sends
itself SIGKILL at the first point that is not among the spared ones; `null` spares all. A digest of the
weights after each update goes to the log with the suffix `.updates`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Points:
    """The points that a trainer passes. It dies at the first one that is not spared."""

    def __init__(self, spared: list[str] | None, log: Path) -> None:
        self._spared = None if spared is None else set(spared)
        self._log = log
        self.part = "begin"
        """The part of the run in which the trainer is; it is the first word of a point."""

    def reach(self, name: str) -> None:
        """Pass a point, or die there."""
        name = f"{self.part}: {name}"
        if self._spared is not None and name not in self._spared:
            self._log.with_suffix(".point").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, method: str, label: Callable[..., str], before: bool = True) -> None:
        """Put points before and after a function."""
        original = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            name = label(*args)
            if before and not name.startswith("GET "):
                self.reach(f"before {name}")
            result = original(*args, **options)
            self.reach(f"after {name}")
            return result

        setattr(owner, method, call)

    def within(self, owner: Any, method: str, part: str) -> None:
        """Name the part of the run that a function is. What follows it is the part that it interrupted."""
        original = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            outer, self.part = self.part, part
            result = original(*args, **options)
            self.part = outer
            return result

        setattr(owner, method, call)


def label_of_call(transport: Any, call: Any) -> str:
    """Return the method and what a call is about: the part of the object that its path names, or its kind."""
    _, kind, *rest = call.path.strip("/").split("/")
    return f"{call.method} {rest[1] if len(rest) > 1 else kind}"


def instrument(points: Points, log: Path) -> None:
    """Put points around everything that another process can see of a trainer, and around the update."""
    import torch

    names = ("trainer", "rollouts", "checkpoint", "weights", "metrics", "onnx_folder")
    example: dict[str, Any] = {name: importlib.import_module(f"tinygrpo.{name}") for name in names}
    trainer, rollouts, checkpoint = example["trainer"], example["rollouts"], example["checkpoint"]
    transport: Any = importlib.import_module("rollyard_client._sync.transport").SyncTransport
    original = trainer.update_policy

    def update(model: Any, optimizer: Any, rows: Any, newest: int, *rest: Any) -> Any:
        result = original(model, optimizer, rows, newest, *rest)
        digest = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        with log.with_suffix(".updates").open("a") as file:
            file.write(json.dumps({"step": newest + 1, "digest": digest.hexdigest()}) + "\n")
        return result

    trainer.update_policy = update
    points.around(transport, "send", label_of_call)
    points.around(trainer, "update_policy", lambda *args: "update", before=False)
    points.around(example["onnx_folder"].OnnxTemplate, "write", lambda *args: "writing of the ONNX folder")
    points.around(torch, "save", lambda *args: "torch.save", before=False)
    points.around(checkpoint, "write_ledger", lambda *args: "writing of the ledger", before=False)
    points.around(os, "replace", lambda *args: "renaming of the checkpoint")
    points.around(example["metrics"].Metrics, "write", lambda *args: "line of metrics")
    points.within(rollouts.RolloutStream, "collect", "collect")
    points.within(rollouts.RolloutStream, "acknowledge", "acknowledge")
    points.within(rollouts.RolloutStream, "close", "close")
    points.within(checkpoint.Checkpoints, "save", "save")
    points.within(trainer.Trainer, "_step", "step")
    points.within(trainer.Trainer, "_record", "record")
    points.within(trainer.Trainer, "evaluate", "evaluate")


def child(example: Path, order: dict[str, Any]) -> None:
    """Run the trainer in this process, which was forked for it, and end with its status."""
    log = Path(order["log"])
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        instrument(Points(order["spared"], log), log)
        sys.argv = [str(example / "train.py"), *order["argv"]]
        status = importlib.import_module("train").main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve orders until the input ends."""
    example = Path(sys.argv[1])
    sys.path.insert(0, str(example))
    # Nothing computes here, so there are no threads that a fork would lose.
    importlib.import_module("train")
    for line in sys.stdin:
        order = json.loads(line)
        point = Path(order["log"]).with_suffix(".point")
        point.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            child(example, order)
        print(json.dumps({"pid": pid}), flush=True)
        _, ended = os.waitpid(pid, 0)
        reached = point.read_text() if point.exists() else None
        print(json.dumps({"status": os.waitstatus_to_exitcode(ended), "point": reached}), flush=True)


if __name__ == "__main__":
    main()
