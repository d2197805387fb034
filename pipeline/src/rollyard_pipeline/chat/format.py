"""A model's chat format, which consists of its template and its tokenizer."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from rollyard_crds.task import Message

from rollyard_pipeline.chat.explanation import Explanation
from rollyard_pipeline.chat.tokenizer import ChatTokenizer, load_folder, locate
from rollyard_pipeline.errors import TemplateError, TokenizerUnreachable

if TYPE_CHECKING:
    from rollyard_pipeline.chat.template import ChatTemplate

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})
"""The variables of templates that no job can set."""
ChatMessage = dict[str, Any]
"""A message as templates read it: `role`, `content`, and optionally `tool_calls`, `tool_call_id`, `name`."""
_UNREACHABLE_SECONDS: Final = 30.0
"""The time after a download that failed in which it is not tried again."""
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
"""The names by which templates of different families read the thought of a message."""


def _to_chat(message: Message) -> ChatMessage:
    """Return a task's message in the form that most templates read. A thought has each of its names."""
    fields = message.model_dump(mode="json", exclude_none=True)
    if message.reasoning_content:
        fields |= dict.fromkeys(_THOUGHTS, message.reasoning_content)
    return fields


def _with_calls(message: ChatMessage, change: Callable[[dict[str, Any]], dict[str, Any]]) -> ChatMessage:
    """Return a message with changed functions of its calls."""
    calls = [{**call, "function": change(call["function"])} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def _with_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def escaped(value: Any, escape: Callable[[str], str]) -> Any:
    """Return a message, or another value of JSON, with each of its texts escaped by `escape`."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): escaped(entry, escape) for key, entry in value.items()}
    if isinstance(value, list):
        return [escaped(entry, escape) for entry in value]
    return value


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Renders conversations for one rollout. `now` is fixed, which makes a rendering repeatable."""

    tokenizer: ChatTokenizer
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]] | None = None
    now: datetime = field(default_factory=datetime.now)
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The job's variables for the template beyond messages and tools (`enable_thinking: false`)."""
    explanation: Explanation | None = None
    """What tells the model of the tools, if the template does not."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the conversation as text, with the generation prompt at its end."""
        if self.explanation is not None:
            messages = self.explanation.shown(messages)
        return self.template.render(messages, tools=self.tools, now=self.now, variables=self.variables)

    def opening(self, messages: Sequence[Message]) -> list[ChatMessage]:
        """Return the messages that a task begins with in the form in which the template shows their calls.

        Most templates read arguments as objects. Some, such as DeepSeek-R1's, read them as texts, or leave
        out calls if the content is not null.

        Raises:
            TemplateError: The messages make calls, and the template refuses them or leaves one out.
        """
        chat = [_to_chat(message) for message in messages]
        if not any("tool_calls" in message for message in chat):
            return chat
        refused: TemplateError | None = None
        for text, null in itertools.product((False, True), repeat=2):
            shown = [_with_calls(message, _with_text) for message in chat] if text else chat
            if null:
                silent = [not message["content"] and "tool_calls" in message for message in shown]
                shown = [{**m, "content": None} if none else m for m, none in zip(shown, silent, strict=True)]
            try:
                if self._shows_calls(shown):
                    return shown
            except TemplateError as error:
                refused = refused or error
        raise refused or TemplateError("the chat template leaves out calls that the task's messages make")

    def _shows_calls(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether the rendering has every call. Names are replaced, as tools may have the same."""
        names: list[str] = []

        def named(function: dict[str, Any]) -> dict[str, Any]:
            names.append(f"call_of_the_task_{len(names)}_")
            return {**function, "name": names[-1]}

        text = self.render([_with_calls(message, named) for message in messages])
        return all(name in text for name in names)

    @property
    def channels(self) -> bool:
        """Return whether a turn consists of messages in channels, as gpt-oss's does."""
        return "<|channel|>" in self.template.source and "<|message|>" in self.template.source

    @property
    def wraps(self) -> bool:
        """Return whether the template adds a control token before an assistant's content.

        Only a token that no sampling prompt has counts. In that case a turn's text, which has its own
        (gpt-oss's channels), is not `content`.
        """
        prefix = self.template.content_prefix
        return self.tokenizer.escape(prefix) != prefix


class FormatCache:
    """Loaded tokenizers and templates of a worker. The least recently used are dropped beyond `size`."""

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._loaded: OrderedDict[str, tuple[ChatTokenizer, ChatTemplate]] = OrderedDict()
        self._ahead: dict[str, _Stamp] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._lock = asyncio.Lock()

    async def load_ahead(self, name: str) -> None:
        """Load a tokenizer long before it is needed. The first `get` loads it again if its files changed.

        Raises:
            TokenizerUnavailable: The folder is not on this machine or is incomplete.
            TokenizerUnreachable: It cannot be downloaded now.
            TemplateError: The template has a syntax error.
        """
        async with self._lock:
            stamp = await asyncio.to_thread(_stamp, name)
            self._loaded[name] = await asyncio.to_thread(_load, name)
            self._ahead[name] = stamp

    async def get(
        self,
        name: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """Return the chat format of the tokenizer folder `name`, offering `tools` to the model.

        `variables` are the job's `agent.chatTemplateKwargs`.

        Raises:
            TokenizerUnavailable: The folder is not on this machine or is incomplete.
            TokenizerUnreachable: It cannot be downloaded now.
            TemplateError: The template has a syntax error, or `variables` names what only Rollyard sets.
        """
        if reserved := RESERVED.intersection(variables or ()):
            raise TemplateError(
                f"agent.chatTemplateKwargs cannot set {', '.join(sorted(reserved))}: Rollyard does"
            )
        async with self._lock:
            if name in self._ahead and self._ahead.pop(name) != await asyncio.to_thread(_stamp, name):
                del self._loaded[name]
            if name not in self._loaded:
                self._loaded[name] = await self._load(name)
                while len(self._loaded) > self._size:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            tokenizer, template = self._loaded[name]
        return ChatFormat(tokenizer, template, tools or None, variables=dict(variables or {}))

    async def _load(self, name: str) -> tuple[ChatTokenizer, ChatTemplate]:
        """Load a tokenizer. If the hub does not answer, it is not asked again for a while."""
        until, reason = self._failed.pop(name, (0.0, ""))
        if time.monotonic() < until:
            self._failed[name] = until, reason
            raise TokenizerUnreachable(reason)
        try:
            return await asyncio.to_thread(_load, name)
        except TokenizerUnreachable as error:
            self._failed[name] = time.monotonic() + _UNREACHABLE_SECONDS, str(error)
            while len(self._failed) > self._size:
                del self._failed[next(iter(self._failed))]
            raise


def _load(name: str) -> tuple[ChatTokenizer, ChatTemplate]:
    # Jinja and tokenizers are imported here, in a thread: agents that use no model do without them, and the
    # first sandbox of a worker does not wait for them.
    template = importlib.import_module("rollyard_pipeline.chat.template")
    tokenizer, source = load_folder(locate(name))
    return tokenizer, template.ChatTemplate(source, tokenizer.variables())


_Stamp = frozenset[tuple[str, int, int, int]]


def _stamp(name: str) -> _Stamp:
    """Return the names, inodes, sizes and times of the files in a tokenizer's folder and its templates."""
    folder = locate(name)
    files = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*")]
    stats = ((file, file.stat()) for file in files)
    return frozenset((str(file), info.st_ino, info.st_size, info.st_mtime_ns) for file, info in stats)
