"""Chat templates and piecewise decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rollyard_engine.errors import EngineError, InvalidRequest
from rollyard_engine.tokens import Detokenizer, EngineTokenizer, load_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CALL = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer of single bytes, with which one character may take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def with_template(folder: Path, template: str) -> EngineTokenizer:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "chat_template": template})
    )
    return load_tokenizer(folder)


def render(tokenizer: EngineTokenizer, message: Mapping[str, object]) -> str:
    return tokenizer.render([message], tools=None, add_generation_prompt=False)


def test_templates_get_arguments_as_objects_and_special_tokens(folder: Path) -> None:
    tokenizer = with_template(
        folder,
        "{% for m in messages %}\n"
        "  {% generation %}{{ m.tool_calls[0].function.arguments.command }}{% endgeneration %}\n"
        "  {{- m.tool_calls[0].function.arguments | tojson }}{{ eos_token }}\n"
        "{% endfor %}",
    )
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(tokenizer, message) == 'ls{"command": "ls"}<end>\n'
    assert message["tool_calls"] == [CALL]
    assert tokenizer.eos_token_id == tokenizer.encode("<end>", add_special_tokens=False)[0]


def test_a_refusing_template_is_the_requests_fault(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render(tokenizer, {"role": "user", "content": "x"})


def test_a_template_cannot_reach_out(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        render(tokenizer, {"role": "user", "content": "x"})


def test_without_a_template_messages_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(load_tokenizer(folder), {"role": "user", "content": "x"})


def test_a_broken_template_is_named_when_loading(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(EngineError, match="chat template") as refused:
        load_tokenizer(folder)
    assert (refused.value.reason, refused.value.status) == ("ModelFolderInvalid", 400)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_pieces_join_to_the_whole_and_never_split_a_character(folder: Path, step: int) -> None:
    tokenizer = load_tokenizer(folder)
    text = "naïve 日本 \N{GRINNING FACE} end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    starts = range(0, len(ids), step)
    pieces = [detokenizer.push(ids[at : at + step], final=at + step >= len(ids)) for at in starts]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_what_stays_incomplete_comes_at_the_end(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    cut = tokenizer.encode("a日", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(cut, final=False) == ""
    assert detokenizer.push([], final=True) == tokenizer.decode(cut, skip_special_tokens=True)
