"""The process that reads turns with the library `renderers`.

The library's patterns need an enormous time for some turns, and cannot be interrupted. It also imports much
that a worker does not need. The process is started with the folder of a tokenizer, the name of the model and
the renderer of its template, and says `ready {"version": …, "renderer": …}`, or the `problem` that keeps it
from reading the model's turns. A problem that another try may fix, such as a missing file, ends the process.
Then it reads one `{"ids": …, "prompt_ids": …, "tools": …}` per line, and writes `{"text": …, "thought": …,
"calls": […]}`, which is `{}` if the turn has no call.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer, load_folder
from rollyard_pipeline.child_processes import begin_child

_MEMORY: Final = 4 << 30  # The size of the address space in bytes.
_ANSWER_LIMIT: Final = 900_000  # bytes; the parent reads lines of 1 MiB
_ELEMENTS: Final = re.compile(r"\s*+(?:<invoke name=|<function=|[^\s<{]++\s*+<arg_key>)")
"""The beginning of a call whose arguments are elements. Others are JSON, which may hold any mark as text."""
_CALL: Final = re.compile("<invoke name=|<function=")
_ARGUMENT: Final = re.compile("<parameter name=|<parameter=|<arg_key>")


class LibraryTokenizer:
    """A tokenizer with the methods that the library calls."""

    unk_token_id: Final = None

    def __init__(self, tokenizer: ChatTokenizer, model: str) -> None:
        self.name_or_path = model
        self.eos_token_id = tokenizer.token_id(tokenizer.variables().get("eos_token", ""))
        self._tokenizer = tokenizer

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the ids of `text`, which may spell control tokens. No special token is added."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the text of ids, with special tokens spelled out."""
        return self._tokenizer.decode_sampled(ids).replace(MARK, "")

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token or None, or those of a list of tokens."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]


def renderer_of(tokens: LibraryTokenizer, name: str) -> tuple[str, Any]:
    """Return the library's renderer of a model and its name, or ("", None) if it has none.

    Args:
        tokens: The model's tokenizer.
        name: The renderer of the model's template, which is used if the library does not know the model.

    Raises:
        Exception: The tokenizer lacks a token of the renderer's format.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    name = MODEL_RENDERER_MAP.get(tokens.name_or_path, name)
    if not name:
        return "", None
    return name, create_renderer(tokens, TypeAdapter(RendererConfig).validate_python({"name": name}))


def read(renderer: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the calls of a turn, its text outside of them and its thought; nothing if it has no call.

    A turn that the library cannot read, or that it reads as something that is not JSON, has an `error`.
    """
    try:
        parsed = renderer.parse_response(
            request["ids"], tools=request["tools"] or None, prompt_ids=request["prompt_ids"] or None
        )
        answer = {
            "text": str(parsed.content or ""),
            "thought": str(parsed.reasoning_content or ""),
            "calls": list(_calls(parsed.tool_calls)),
        }
        size = len(json.dumps(answer))
    except Exception as error:  # The library promises nothing for malformed turns.
        return {"error": f"it cannot be read ({type(error).__name__})"}
    if not answer["calls"]:
        return {}
    return answer if size <= _ANSWER_LIMIT else {"error": f"it is longer than {_ANSWER_LIMIT} bytes"}


def _calls(parsed_calls: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Return the calls of a turn as JSON objects.

    In some formats the library leaves out an element whose end is missing, or takes the next one into its
    value, and says nothing. A block is malformed unless every call and argument in it was read.
    """
    for (_, raw), block in itertools.groupby(parsed_calls, key=lambda call: (call.token_span, call.raw)):
        calls = list(block)
        read = sum(len(call.arguments) for call in calls if isinstance(call.arguments, dict))
        whole = len(calls) == max(1, len(_CALL.findall(raw))) and read == len(_ARGUMENT.findall(raw))
        lost = _ELEMENTS.match(raw) is not None and not whole
        for call in calls:
            status = str(call.status)
            if lost and status in ("ok", "invalid_json"):
                status = "malformed_structure"
            yield {"name": call.name, "arguments": call.arguments, "status": status}


def main(folder: str, model: str, name: str) -> None:
    """Answer requests until the input ends."""
    begin_child(_MEMORY)
    try:
        import renderers

        tokens = LibraryTokenizer(load_folder(Path(folder))[0], model)
        problem, used, renderer = "", "", None
        try:
            used, renderer = renderer_of(tokens, name)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:500]
    except Exception as error:  # This says nothing about the model, and the next process may start.
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    about = {"problem": problem} if problem else {"version": str(renderers.__version__), "renderer": used}
    print("ready", json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(read(renderer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
