"""The conversion between text and token ids, by the model folder's tokenizer and chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from rollyard_engine.errors import EngineError, InvalidRequest

Render = Callable[..., str]

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class EngineTokenizer:
    """The tokenizer of a model folder.

    It is read from ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.
    """

    def __init__(self, tokenizer: Any, config: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._special = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }
        self._renders = {name: _compile(text) for name, text in templates.items()}
        self._pieces: dict[int, str] = {}

    def token_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, or None if there is none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    @property
    def eos_token_id(self) -> int | None:
        """The id of the ``eos_token`` in ``tokenizer_config.json``, or None if there is none."""
        text = self._special.get("eos_token")
        return None if text is None else self.token_id(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ``token_ids``. Ids beyond the vocabulary produce no text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str:
        """Return the text of one token, special tokens included."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self.decode([token_id], skip_special_tokens=False)
        return piece

    def token_string(self, token_id: int) -> str:
        """Return one token as the vocabulary writes it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that the chat template produces for ``messages``.

        Raises:
            InvalidRequest: The chat template refuses the messages, or there is none.
        """
        from jinja2 import TemplateError

        try:
            if chat_template is not None:
                render = _compile(chat_template)
            else:
                name = "tool_use" if tools and "tool_use" in self._renders else "default"
                if name not in self._renders:
                    raise InvalidRequest(
                        "the model folder has no chat template; send `prompt` or `chat_template`",
                        param="messages",
                    )
                render = self._renders[name]
            return render(
                **{
                    **self._special,
                    **(variables or {}),
                    "messages": [_normalise(message) for message in messages],
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error


class Detokenizer:
    """A converter of a growing list of ids into pieces of text, which holds back incomplete UTF-8 sequences.

    A window of earlier ids ensures that the joined pieces equal one decoding of all ids. This is the method
    of the incremental detokenizers of Hugging Face and vLLM.
    """

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0
        self._emitted = 0

    def push(self, token_ids: Sequence[int], *, final: bool) -> str:
        """Return the text that ``token_ids`` add. With ``final``, include the text that was held back."""
        self._ids.extend(token_ids)
        before = self._tokenizer.decode(self._ids[self._window : self._emitted], skip_special_tokens=True)
        now = self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=True)
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and not final):
            return ""
        self._window, self._emitted = self._emitted, len(self._ids)
        return now[len(before) :]


def load_tokenizer(path: Path) -> EngineTokenizer:
    """Read the tokenizer of the model folder at ``path``.

    Raises:
        EngineError: The tokenizer, its configuration or the chat template cannot be read.
    """
    from jinja2 import TemplateError
    from tokenizers import Tokenizer

    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise EngineError(f"{path} has no tokenizer.json", reason="ModelFolderInvalid")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # The tokenizers package raises plain Exception.
        raise EngineError(f"{tokenizer_path} cannot be read: {error}", reason="ModelFolderInvalid") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = path / "tokenizer_config.json"
    template_path = path / "chat_template.jinja"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        templates = _templates(config.get("chat_template"))
        if template_path.is_file():
            templates["default"] = template_path.read_text(encoding="utf-8")
        return EngineTokenizer(tokenizer, config, templates)
    except (OSError, ValueError, KeyError, TypeError, TemplateError) as error:
        raise EngineError(
            f"{path}: tokenizer configuration or chat template: {error}", reason="ModelFolderInvalid"
        ) from error


def _templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return {str(item["name"]): str(item["template"]) for item in value}


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    Text parts are joined by newlines, and the arguments of tool calls become objects.
    """
    result = dict(message)
    content = result.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise InvalidRequest("message content parts must be of type 'text'", param="messages")
            texts.append(str(part.get("text", "")))
        result["content"] = "\n".join(texts)
    calls = result.get("tool_calls")
    if not calls:
        result.pop("tool_calls", None)
        return result
    result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return result


def _with_parsed_arguments(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest("assistant tool_calls must be objects of type 'function'", param="tool_calls")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A malformed call of an earlier turn remains text, because refusing it would end the chat.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _compile(text: str) -> Render:
    """Compile a chat template in the environment that ``apply_chat_template`` of Hugging Face provides."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag ``{% generation %}``, which renders as its content.

        It marks assistant text for training masks.
        """

        tags = {"generation"}  # noqa: RUF012  (jinja2's own way to declare it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    render: Render = environment.from_string(text).render
    return render
