"""The way from messages to text to token ids: the chat template, and the byte-level BPE tokenizer for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.sandbox
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinypolicy.tasks import ToolCall

Message = dict[str, Any]

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, IM_START, IM_END)
#: They are added, but not special, because they are part of the text that a tool-call parser reads.
MARKER_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE_FILE: Final = Path(__file__).resolve().parent.parent / "chat_template.jinja"

# Letters, single digits, and the rest are never joined: a name is the same token after a space, a slash or a
# quote, so copying it from an output into a command is copying one token.
_PIECES: Final = r"[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"


def _to_json(value: object, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def chat_template(source: str | None = None) -> jinja2.Template:
    """Return the compiled template, with `tojson` as transformers and vLLM define it (plain JSON, order
    kept).
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source if source is not None else TEMPLATE_FILE.read_text())


def user(prompt: str) -> Message:
    return {"role": "user", "content": prompt}


def assistant(call: ToolCall) -> Message:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tool(result: str) -> Message:
    return {"role": "tool", "content": result}


def parse_call(text: str) -> ToolCall | None:
    """Return the tool call in an assistant turn, or None where it holds none that can be read."""
    _, opened, rest = text.partition("<tool_call>")
    body, closed, _ = rest.partition("</tool_call>")
    if not opened or not closed:
        return None
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    if not isinstance(arguments, dict) or not all(isinstance(v, str) for v in arguments.values()):
        return None
    return ToolCall(call["name"], arguments)


class VocabularyError(ValueError):
    """The tokenizer lacks a token that the policy's chats are built from."""

    reason: Final = "TokenMissing"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of `token`, or raise `VocabularyError` where it is not one token of the vocabulary."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise VocabularyError(f"{token!r} is no token of this tokenizer; train it on rendered chats")
    return found


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` entries, with the added tokens and all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL_TOKENS, *MARKER_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer made every added token special; the markers must survive `skip_special_tokens`.
    state = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def assistant_mask(ids: Sequence[int], im_start: int, im_end: int, assistant_id: int) -> list[bool]:
    """Return true on tokens that the policy emits: after `<|im_start|>assistant\\n` up to `<|im_end|>`."""
    mask = [False] * len(ids)
    inside = False
    for index, token in enumerate(ids):
        if index >= 3 and ids[index - 3] == im_start and ids[index - 2] == assistant_id:
            inside = True
        mask[index] = inside
        if token == im_end:
            inside = False
    return mask


__all__ = [
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "MARKER_TOKENS",
    "SPECIAL_TOKENS",
    "TEMPLATE_FILE",
    "Message",
    "assistant",
    "assistant_mask",
    "chat_template",
    "parse_call",
    "token_id",
    "tool",
    "train_tokenizer",
    "user",
]
