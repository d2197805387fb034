"""The choice of a parser according to a model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, runtime_checkable

from rollyard_pipeline.chat.explanation import Explanation
from rollyard_pipeline.chat.format import ChatFormat, escaped
from rollyard_pipeline.errors import NoToolParser
from rollyard_pipeline.registry import TOOL_PARSERS, installed
from rollyard_pipeline.tool_parsers.base import (
    ChatModel,
    ConfigurableParser,
    ExplainingParser,
    ParsedCall,
    Schemas,
    TokenParser,
    ToolCallParser,
)
from rollyard_pipeline.tool_parsers.calls import call_of
from rollyard_pipeline.tool_parsers.element_calls import DsmlParser, GlmParser, QwenCoderParser, XtmlParser
from rollyard_pipeline.tool_parsers.json_calls import (
    DeepSeekParser,
    GptOssParser,
    HermesParser,
    KimiParser,
    LlamaJsonParser,
    MistralParser,
)
from rollyard_pipeline.tool_parsers.literal_calls import GemmaParser, PythonicParser
from rollyard_pipeline.tool_parsers.renderers import Readers, RenderersParser, is_installed

_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS: Final = re.compile(r"\btools\b")

# The first row is taken whose marks all occur in the template's source.
_MARKS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("<|channel|>", "<|message|>"), "gpt_oss"),
    (("｜DSML｜",), "deepseek_dsml"),
    (("<｜tool▁calls▁begin｜>",), "deepseek"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|im_system|>tool_declare<|im_middle|>",), "kimi_k2"),  # The first template left out calls.
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<arg_key>", "<arg_value>"), "glm"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen_coder"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|python_start|>",), "llama3_json"),
    (('{"name": function name, "parameters": ',), "llama3_json"),
    (("<|start_header_id|>", '{"name": "', '"parameters": '), "llama3_json"),
    (("<tool_call>", '"arguments'), "hermes"),
    (("<tool_call>", "tojson"), "hermes"),
)
_PARSERS: Final[dict[str, type[ToolCallParser]]] = {
    "gpt_oss": GptOssParser,
    "deepseek": DeepSeekParser,
    "deepseek_dsml": DsmlParser,
    "kimi_k2": KimiParser,
    "kimi_k3": XtmlParser,
    "gemma4": GemmaParser,
    "glm": GlmParser,
    "mistral": MistralParser,
    "qwen_coder": QwenCoderParser,
    "pythonic": PythonicParser,
    "llama3_json": LlamaJsonParser,
    "hermes": HermesParser,
}


def choose(template: str) -> str:
    """Return the name of the parser for a chat template's jinja2 source, or "" if none fits."""
    for marks, name in _MARKS:
        if all(mark in template for mark in marks):
            return name
    return ""


@runtime_checkable
class ModelParser(Protocol):
    """A parser that stands for another one, which depends on the model."""

    async def for_model(
        self, model: ChatModel, schemas: Schemas, readers: Readers
    ) -> tuple[str, ToolCallParser | TokenParser]:
        """Return the name that the record has, and the parser.

        Raises:
            NoToolParser: There is none for this model.
        """
        ...


async def configured(
    name: str, parser: object, model: ChatModel, schemas: Schemas, readers: Readers
) -> tuple[str, ToolCallParser | TokenParser]:
    """Return the parser that reads the turns of one rollout, configured, and the name that the record has.

    Args:
        name: The name of the entry point.
        parser: An instance of its class.
        model: The model.
        schemas: The JSON schema of each offered tool's arguments.
        readers: The worker's processes for the library `renderers`.

    Raises:
        NoToolParser: The parser depends on the model and does not know it.
    """
    if isinstance(parser, ModelParser):
        return await parser.for_model(model, schemas, readers)
    if isinstance(parser, ConfigurableParser):
        parser.configure(model.template, schemas)
    assert isinstance(parser, ToolCallParser), f"the parser '{name}' has no method 'parse'"
    return name, parser


class AutoParser:
    """The entry point `auto`, which stands for the parser that the model's template requires."""

    async def for_model(
        self, model: ChatModel, schemas: Schemas, readers: Readers
    ) -> tuple[str, ToolCallParser | TokenParser]:
        """Return the parser for the marks of the template, else the library's if it knows the model.

        Raises:
            NoToolParser: Neither fits.
        """
        name = choose(model.template)
        if name:
            return await configured(name, _PARSERS[name](), model, schemas, readers)
        why = "install rollyard[renderers], which knows more models"
        if is_installed():
            try:
                return await RenderersParser().for_model(model, schemas, readers)
            except NoToolParser as error:
                why = str(error)
        if _TOOLS.search(_COMMENT.sub("", model.template)):
            problem, then = "offers tools, and no parser knows its calls", ""
        else:
            problem, then = "offers no tools", " (hermes, …), and the system prompt explains the tools in it"
        names = ", ".join(name for name in installed(TOOL_PARSERS) if name != "auto")
        raise NoToolParser(
            f"the chat template of '{model.name}' {problem} ({why}): set agent.toolParser to the parser of "
            f"its format{then}, or agent.tools to []; installed: {names}"
        )


def explained(chat: ChatFormat, model: str, parser_name: str, parser: object) -> ChatFormat:
    """Return a chat format that offers its tools to the model, by the parser if the template does not.

    Args:
        chat: The chat format with the offered tools.
        model: The name of the model.
        parser_name: The parser that the job names.
        parser: The parser that reads the turns.

    Raises:
        NoToolParser: The template knows no tools, and the parser cannot explain them.
    """
    # Where the template decides on the parser, it is what the model was trained with.
    if not chat.tools or parser_name == "auto" or chat.template.shows_tools:
        return chat
    shows_calls = chat.template.shows_calls
    if not isinstance(parser, ExplainingParser):
        if shows_calls:
            return chat
        raise NoToolParser(
            f"the chat template of '{model}' knows no tools, and the parser '{parser_name}' cannot explain "
            "them in the system prompt: set agent.toolParser to one that can (hermes, qwen_coder, glm, "
            "llama3_json, pythonic, mistral, deepseek, or your own with the methods 'instructions' and "
            "'written'), or agent.tools to []"
        )
    tools = escaped(list(chat.tools), chat.tokenizer.escape)
    return replace(
        chat,
        explanation=Explanation(
            instructions=parser.instructions(tools),
            in_system=chat.template.takes_system,
            written=None
            if shows_calls
            else lambda functions: parser.written([_call(one) for one in functions]),
        ),
    )


def _call(function: Mapping[str, Any]) -> ParsedCall:
    """Return a call of a template's message, whose arguments are an object or its text."""
    name, arguments = str(function.get("name") or ""), function.get("arguments") or {}
    call = call_of(name, arguments)
    return call if call.error is None else ParsedCall(name)
