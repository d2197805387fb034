"""What a policy that knows the library `renderers` samples, to hold a worker up or to call what it did not.

A process of its own with a limit of time, and the check of all that it returns, stop this.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_pipeline.chat.tokenizer import MARK
from rollyard_pipeline.tool_parsers import ParsedCall
from rollyard_pipeline.tool_parsers.base import ChatModel
from rollyard_pipeline.tool_parsers.renderers import Readers, RenderersParser, TurnParser
from rollyard_pipeline.trajectories.episode import clean_turn
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.call_suite import byte_folder, byte_tokenizer

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handlers, with the parser `renderers`")


LS = ParsedCall("bash", {"command": "ls"})
MINIMAX = ("minimax-m2", "MiniMaxAI/MiniMax-M2", "<minimax:tool_call>{}</minimax:tool_call>",
           '<invoke name="bash"><parameter name="command">ls</parameter></invoke>')  # fmt: skip
INKLING = ("inkling", "thinkingmachines/Inkling", "bash<|content_invoke_tool_json|>{}<|end_message|>",
           '{"name": "bash", "args": {"command": "ls"}}')  # fmt: skip

LAGUNA = ("laguna-xs.2", "poolside/Laguna-XS.2", "<tool_call>{}</tool_call>",
          "bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n")  # fmt: skip


@pytest.fixture
async def readers() -> AsyncIterator[Readers]:
    made = Readers()
    yield made
    await made.close()


async def parser_of(readers: Readers, kind: tuple[str, str, str, str], folder: Path) -> TurnParser:
    model = ChatModel(kind[1], byte_folder(kind[0], "", folder), "")
    return (await RenderersParser().for_model(model, {"bash": {"properties": {}}}, readers))[1]


@pytest.mark.attack(
    "a turn that the library's patterns read for hours, so that the worker stands still",
    stopped_by="the library works in a process of its own, which is ended after ten seconds; the turn is "
    "a malformed call",
)
async def test_a_turn_that_takes_for_ever_is_one_malformed_call(readers: Readers, tmp_path: Path) -> None:
    readers.seconds = patience(1.0)
    parser, encode = await parser_of(readers, MINIMAX, tmp_path), byte_tokenizer(MINIMAX[0]).encode
    opening, closing = MINIMAX[2].split("{}")
    endless = encode(opening + '<invoke name="a">') + encode('<parameter name="a">') * 50_000
    endless += encode("</invoke>" + closing)
    begun = time.monotonic()
    found = await parser.parse_ids(endless, [])
    assert found is not None
    assert [call.error for call in found.calls] == [
        f"malformed tool call: it cannot be read within {readers.seconds:g} s"
    ]
    assert time.monotonic() - begun < readers.seconds + patience(2.0)
    honest = await parser.parse_ids(encode(MINIMAX[2].format(MINIMAX[3])), [])
    assert honest is not None
    assert honest.calls == (LS,)


@pytest.mark.attack(
    "a turn that breaks the library, or from which it returns something else than calls: deep JSON, "
    "unknown ids, names and arguments of other types, thousands of calls",
    stopped_by="whatever it raises is a malformed call; types, names and sizes of what it returns are "
    "checked",
)
async def test_a_hostile_turn_has_no_call_that_runs(readers: Readers, tmp_path: Path) -> None:
    parser, encode = await parser_of(readers, INKLING, tmp_path), byte_tokenizer(INKLING[0]).encode
    deep = '{"name": "bash", "args": ' + '{"a":' * 20_000
    hostile = [
        *(encode(INKLING[2].format(payload)) for payload in (
            deep, deep + "1" + "}" * 20_001, f'{{"name": "bash", "args": {{"a": {"9" * 5_000}}}}}',
            '{"name": "bash", "args": [["command", "ls"]]}', f'{{"name": "{"b" * 1_000}", "args": {{}}}}',
            '{"name": "bash", "args": "' + "[" * 50_000 + '"}',
        )),
        encode(INKLING[2].format('{"name": "bash", "args": {}}')) * 20_000,
        [2**40, *encode(INKLING[2].format(INKLING[3]))],
        [-1, *encode(INKLING[2].format(INKLING[3]))],
    ]  # fmt: skip
    for ids in hostile:
        found = await parser.parse_ids(ids, [])
        assert found is not None
        calls = clean_turn(found).calls
        assert calls
        assert all(call.error for call in calls)
    beyond = await parser.parse_ids(encode(INKLING[2].format('{"name": "bash", "args": {"a": NaN}}')), [])
    assert beyond is not None
    assert clean_turn(beyond).calls == (ParsedCall("bash", {"a": "nan"}),)


@pytest.mark.attack(
    "a call lacks a part of its format, which the library drops in silence",
    stopped_by="it is a malformed call",
)
@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        (MINIMAX, (
            '<invoke name="bash"><parameter name="command">ls<parameter name="a">2</parameter></invoke>',
            MINIMAX[3].replace("</invoke>", '<parameter name="a">2</invoke>'),
            MINIMAX[3].replace("ls", "echo </invoke>"),
            MINIMAX[3] + '<invoke name="bash"><parameter name="command">b</parameter>',
            MINIMAX[3].replace("</invoke>", '<parameter name="command">rm</parameter></invoke>'),
        )),
        (LAGUNA, (
            LAGUNA[3].replace("</arg_value>", ""),
            LAGUNA[3] + "<arg_key>a</arg_key><arg_value>2",
        )),
    ],
)  # fmt: skip
async def test_a_call_of_which_the_library_loses_a_part_is_malformed(
    readers: Readers, tmp_path: Path, kind: tuple[str, str, str, str], cuts: tuple[str, ...]
) -> None:
    parser, encode = await parser_of(readers, kind, tmp_path), byte_tokenizer(kind[0]).encode
    for cut in cuts:
        found = await parser.parse_ids(encode(kind[2].format(cut)), [])
        assert found is not None
        assert {call.error for call in found.calls} == {"malformed tool call: it lacks a part of the format"}
    honest = await parser.parse_ids(encode(kind[2].format(kind[3]) * 2), [])
    assert honest is not None
    assert honest.calls == (LS, LS)


@pytest.mark.attack(
    "an argument in JSON holds the marks of a call", stopped_by="they are text of the argument"
)
async def test_marks_in_the_json_of_a_call_are_text(readers: Readers, tmp_path: Path) -> None:
    parser, encode = await parser_of(readers, INKLING, tmp_path), byte_tokenizer(INKLING[0]).encode
    command = "<parameter name=a> <function=f> <arg_key>"
    found = await parser.parse_ids(encode(INKLING[2].format(INKLING[3].replace("ls", command))), [])
    assert found is not None
    assert found.calls == (ParsedCall("bash", {"command": command}),)


@pytest.mark.attack(
    "a call whose marks ordinary tokens spell, or that stands in a thought which the prompt has opened",
    stopped_by="marks are looked for by their ids; the end of the prompt is read with the turn",
)
async def test_marks_of_ordinary_tokens_and_calls_in_a_thought_are_text(
    readers: Readers, tmp_path: Path
) -> None:
    parser, encode = await parser_of(readers, MINIMAX, tmp_path), byte_tokenizer(MINIMAX[0]).encode
    call = MINIMAX[2].format(MINIMAX[3])
    assert await parser.parse_ids(encode(call.replace("<m", f"<{MARK}m")), []) is None
    assert await parser.parse_ids(encode(f"{call}</think>no"), encode("]~b]ai\n<think>\n")) is None


@pytest.mark.attack("the process that reads turns is killed", stopped_by="the turn is read by a new one")
async def test_a_turn_is_read_although_its_process_was_killed(readers: Readers, tmp_path: Path) -> None:
    parser, encode = await parser_of(readers, MINIMAX, tmp_path), byte_tokenizer(MINIMAX[0]).encode
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    mine = [int(pid) for pid in children if b"renderers_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert mine
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    found = await parser.parse_ids(encode(MINIMAX[2].format(MINIMAX[3])), [])
    assert found is not None
    assert found.calls == (LS,)
