"""A small byte-level BPE tokenizer and chat templates like those of well-known models."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from rollyard_pipeline.chat import ChatFormat, ChatTemplate, ChatTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# As Meta's template: a begin-of-text token, and every content trimmed.
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# As Qwen3's: thinking before the last user message is stripped, tools are listed, results are user turns.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set reasoning = reasoning.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# The shipped tiny policy's own.
TINY_FOLDER = Path(__file__).parents[2] / "engine/src/rollyard_engine/models/tiny-policy"
TINY = (TINY_FOLDER / "chat_template.jinja").read_text()

# The template puts a newline before the end of turn, which no policy samples.
NEWLINE_BEFORE_END = CHATML.replace("+ '<|im_end|>\\n'", "+ '\\n<|im_end|>\\n'")

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "tiny": TINY, "newline": NEWLINE_BEFORE_END}
END_OF_TURN = {name: "<|eot_id|>" if name == "llama" else "<|im_end|>" for name in TEMPLATES}

_TEXT = (
    "the user asks how many files there are in the folder and the assistant calls a tool to count them",
    'system user assistant tool ipython {"name": "bash", "arguments": {"command": "ls -la | wc -l"}}',
    "error: no such file: report.txt [exit code 1] (no output) thinking about it 0123456789 \n\n\n   \t ",
)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*SPECIAL, *MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    state = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train()


@pytest.fixture(scope="session")
def tokenizer(bpe: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(bpe, {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|im_end|>"}})


@pytest.fixture(scope="session")
def formats(tokenizer: ChatTokenizer) -> dict[str, ChatFormat]:
    return {
        name: ChatFormat(tokenizer, ChatTemplate(source, tokenizer.variables()))
        for name, source in TEMPLATES.items()
    }


@pytest.fixture(scope="session")
def model_folder(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(QWEN)
    return folder


class ScriptedModel:
    """A backend that answers what a function of the prompt's text says, with real token ids."""

    def __init__(self, tokenizer: ChatTokenizer, answer: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "scripted", "max_model_len": 100_000}]})
        if request.path != "/inference/v1/generate":
            return web.json_response({"error": "not here"}, status=404)
        body = await request.json()
        self.prompts.append(body["token_ids"])
        ids = self.tokenizer.encode(self.answer(self.tokenizer.decode(body["token_ids"])))
        cut = ids[: body["sampling_params"]["max_tokens"]]
        content = [{"token_id": token, "logprob": -0.125} for token in cut]
        choice = {
            "token_ids": cut,
            "finish_reason": "stop" if len(cut) == len(ids) else "length",
            "logprobs": {"content": content},
            "weight_versions": [{"version": "step-1", "start": 0, "end": len(cut)}],
        }
        return web.json_response({"choices": [choice], "prompt_token_ids": body["token_ids"]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedModel]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def scripted(tokenizer: ChatTokenizer) -> Callable[[Callable[[str], str]], ScriptedModel]:
    return lambda answer: ScriptedModel(tokenizer, answer)
