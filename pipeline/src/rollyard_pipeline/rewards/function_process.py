"""The process that runs a reward function, which is its argument, as `registry.imported` takes it.

It reads an episode a line, and for each it writes `{"reward": …, "components": {…}}` or
`{"error": …, "trace": …}`. What the function prints is discarded.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, TextIO

from rollyard_pipeline.child_processes import begin_child
from rollyard_pipeline.handlers.base import Evaluation
from rollyard_pipeline.handlers.isolated.places import message_of
from rollyard_pipeline.registry import imported
from rollyard_pipeline.rewards import made_function

# The worker shows at most 500 characters of an exception that ends this process at its start.
_ERROR_CHARACTERS: Final = 300
_TRACE_CHARACTERS: Final = 16_384
_PIECE_CHARACTERS: Final = 1000
"""The most characters of one frame or message of a traceback. The policy may have written the message."""


def main(target: str) -> None:
    """Answer requests until the input ends."""
    begin_child()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        function = made_function(imported(target))
        about = {"components": [str(component) for component in getattr(function, "components", ())]}
    except Exception as error:
        _write(answers, _described(error))
        return
    _write(answers, f"ready {json.dumps(about)}")
    for line in sys.stdin:
        _write(answers, json.dumps(_score(function, json.loads(line)), default=repr))


def _score(function: Any, episode: Mapping[str, Any]) -> dict[str, Any]:
    try:
        scored = function.score(episode)
    except Exception as error:
        pieces = [piece[:_PIECE_CHARACTERS] for piece in traceback.format_exception(error)]
        trace = "".join(pieces)[-_TRACE_CHARACTERS:]
        return {"error": _described(error), "trace": trace}
    if isinstance(scored, Evaluation):
        return {"reward": scored.reward, "components": dict(scored.components)}
    return {"reward": scored, "components": {}}


def _described(error: Exception) -> str:
    return message_of(error, _ERROR_CHARACTERS).replace("\n", " ")


def _write(answers: TextIO, line: str) -> None:
    answers.write(f"{line}\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
