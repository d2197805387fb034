"""The parser `renderers`: models whose calls only the library reads, by token ids, in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from canitoolcall.fixtures import load_family, load_fixtures
from rollyard_pipeline.errors import ChildFailed, NoToolParser
from rollyard_pipeline.tool_parsers import ParsedCall, ParsedTurn
from rollyard_pipeline.tool_parsers import renderers as parser_module
from rollyard_pipeline.tool_parsers.base import ChatModel
from rollyard_pipeline.tool_parsers.detect import AutoParser
from rollyard_pipeline.tool_parsers.renderers import Readers, RenderersParser, TurnParser
from rollyard_testing.families import FAMILIES
from rollyard_testing.pipeline.call_suite import (
    MINIMAX,
    byte_folder,
    byte_tokenizer,
    library_problem,
    renderer_for,
)

SCHEMAS = {
    "bash": {"type": "object", "properties": {"command": {"type": "string"}, "count": {"type": "integer"}}}
}


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    made = Readers()
    yield made
    await made.close()


async def reader(readers: Readers, renderer: str, folder: Path, template: str = "", model: str = "m") -> Any:
    """Return the name that the record has, and a function that reads a text after a prompt."""
    here = ChatModel(model, byte_folder(renderer, template, folder), template)
    used, parser = await AutoParser().for_model(here, SCHEMAS, readers)
    assert isinstance(parser, TurnParser)
    tokenizer = byte_tokenizer(renderer)

    async def read(text: str, prompt: str = "") -> ParsedTurn | None:
        return await parser.parse_ids(tokenizer.encode(text), tokenizer.encode(prompt))

    return used, read


async def test_a_model_without_a_parser_of_ours_is_read_by_the_library(
    readers: Readers, tmp_path: Path
) -> None:
    used, read = await reader(readers, "minimax-m2", tmp_path, MINIMAX)
    assert used.startswith("renderers/0.1.")
    assert used.endswith(":minimax-m2")
    call = '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls</parameter>\n'
    call += '<parameter name="count">2</parameter>\n</invoke>\n</minimax:tool_call>'
    wanted = (ParsedCall("bash", {"command": "ls", "count": 2}),)
    found = await read(f"I look.</think>\n\nNow.\n{call}[e~[", "]~b]ai\n<think>\n")
    assert found == ParsedTurn("Now.", wanted, "I look.")
    assert await read("No call.[e~[") is None
    unclosed = await read(call.partition("</invoke>")[0])
    assert [one.error for one in unclosed.calls] == ["malformed tool call: its closing mark is missing"]


@pytest.mark.parametrize(
    ("renderer", "model", "text"),
    [
        ("hy3", "tencent/Hy3", "<tool_calls:opensource>\n<tool_call:opensource>bash<tool_sep:opensource>\n"
         "<arg_key:opensource>command</arg_key:opensource>\n<arg_value:opensource>ls</arg_value:opensource>\n"
         "</tool_call:opensource>\n</tool_calls:opensource>"),
        ("inkling", "thinkingmachines/Inkling", "bash<|content_invoke_tool_json|>"
         '{"name": "bash", "args": {"command": "ls"}}<|end_message|>'),
        ("laguna-xs.2", "poolside/Laguna-XS.2", "<tool_call>bash\n<arg_key>command</arg_key>\n"
         "<arg_value>ls</arg_value>\n</tool_call>"),
    ],
)  # fmt: skip
async def test_the_library_knows_a_model_by_its_name(
    readers: Readers, tmp_path: Path, renderer: str, model: str, text: str
) -> None:
    used, read = await reader(readers, renderer, tmp_path, model=model)
    assert used.endswith(f":{renderer}")
    found = await read(text)
    assert found.calls == (ParsedCall("bash", {"command": "ls"}),)


async def test_a_parser_of_ours_comes_first(readers: Readers) -> None:
    model = ChatModel("Qwen/Qwen3-8B", Path("/nowhere"), FAMILIES["qwen3"].source)
    assert (await AutoParser().for_model(model, SCHEMAS, readers))[0] == "hermes"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ tools }}", "offers tools, and no parser knows its calls"),
        (FAMILIES["chatml"].source, "offers no tools"),
    ],
)
async def test_no_parser_fits(readers: Readers, tmp_path: Path, template: str, problem: str) -> None:
    model = ChatModel("our/model", byte_folder("minimax-m2", template, tmp_path), template)
    with pytest.raises(NoToolParser) as caught:
        await AutoParser().for_model(model, SCHEMAS, readers)
    said = str(caught.value)
    unknown = "the library renderers has no renderer for 'our/model'"
    assert f"the chat template of 'our/model' {problem} ({unknown}): set agent.toolParser" in said
    assert "; installed: deepseek, " in said


async def test_a_tokenizer_without_the_tokens_of_the_format_is_refused(
    readers: Readers, tmp_path: Path
) -> None:
    model = ChatModel("tencent/Hy3", byte_folder("minimax-m2", "", tmp_path), "")
    with pytest.raises(NoToolParser, match="cannot read turns of 'tencent/Hy3': AssertionError: Special"):
        await RenderersParser().for_model(model, SCHEMAS, readers)


async def test_a_tokenizer_that_is_being_replaced_says_nothing_about_the_model(
    readers: Readers, tmp_path: Path
) -> None:
    """Such an error may be gone at the next try. NoToolParser would end the job."""
    model = ChatModel("m", byte_folder("minimax-m2", MINIMAX, tmp_path), MINIMAX)
    file = model.tokenizer / "tokenizer.json"
    written = file.read_text()
    file.write_text(written[:100])
    with pytest.raises(ChildFailed, match=r"TokenizerUnavailable: .*/tokenizer.json cannot be parsed"):
        await AutoParser().for_model(model, SCHEMAS, readers)
    file.write_text(written)
    assert (await AutoParser().for_model(model, SCHEMAS, readers))[0].endswith(":minimax-m2")


async def test_without_the_library_the_error_names_the_extra(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_module, "is_installed", lambda: False)
    monkeypatch.setattr("rollyard_pipeline.tool_parsers.detect.is_installed", lambda: False)
    model = ChatModel("m", Path("/nowhere"), MINIMAX)
    with pytest.raises(NoToolParser, match=r"needs a library: pip install 'rollyard\[renderers\]'"):
        await RenderersParser().for_model(model, SCHEMAS, readers)
    with pytest.raises(NoToolParser, match=r"install rollyard\[renderers\], which knows more models"):
        await AutoParser().for_model(model, SCHEMAS, readers)


LEAST = {"gemma4": 47, "glm": 44, "kimi": 24, "qwen3-hermes": 49}
"""Families of the suite of which the library reads most, and how many outputs it reads as it should."""


@pytest.mark.parametrize("name", sorted(LEAST))
def test_the_library_reads_recorded_outputs(name: str) -> None:
    family = load_family(name)
    outputs = [one for one in load_fixtures() if one.family == name and renderer_for(one)]
    assert sum(not library_problem(one, family) for one in outputs) >= LEAST[name]
