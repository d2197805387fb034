"""Log-probabilities of given ids by a fresh forward pass with transformers, in a process of its own.

The process reads a line of JSON for each question, `{"model", "passes": [{"ids", "temperature", "places"}]}`,
and answers with one: for each pass the log-probability, in nats, of each id of `places` after the
temperature, given all ids before it. It runs in the environment of scripts/vllm-env, and only the first
question waits for the import of transformers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

_SECONDS = 300.0


class Forward:
    """A running process, which computes log-probabilities."""

    def __init__(self, process: subprocess.Popen[str], log: Path, seconds: float) -> None:
        self._process = process
        self._log = log
        self._seconds = seconds

    def logprobs(self, model: Path, passes: Sequence[object]) -> list[list[float]]:
        """Return those of each `checker.Pass` under a Hugging Face folder's weights, in float32.

        Raises:
            AssertionError: The process ended, or took too long.
        """
        names = ("ids", "temperature", "places")
        asked = [{name: getattr(one, name) for name in names} for one in passes]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(self._seconds, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps({"model": str(model), "passes": asked}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            late.cancel()
        assert line, self._log.read_text()[-4000:]
        answer: list[list[float]] = json.loads(line)
        return answer


@contextlib.contextmanager
def forward_passes(python: Path, folder: Path) -> Iterator[Forward]:
    """Run the process while the block runs; `python` has torch and transformers."""
    from rollyard_testing.pace import patience  # That Python has no such package.

    log = folder / "forward.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Forward(process, log, patience(_SECONDS))
    finally:
        process.kill()
        process.communicate(timeout=patience(30))


def _main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for line in sys.stdin:
        question = json.loads(line)
        model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32).eval()
        results = []
        with torch.inference_mode():
            for one in question["passes"]:
                ids = torch.tensor(one["ids"])
                at = torch.tensor(one["places"])
                hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                # Only the output rows that are asked for are computed, because the vocabulary is the larger
                # side.
                logits = model.lm_head(hidden[at - 1]) / one["temperature"]
                picked = logits.double().log_softmax(-1).gather(1, ids[at][:, None])[:, 0]
                results.append(picked.tolist())
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    _main()
