"""Templates and tokenizers: what templates of the field use, and clear refusals."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from rollyard_pipeline.chat import ChatTemplate, ChatTokenizer, FormatCache
from rollyard_pipeline.chat.tokenizer import load_folder, locate
from rollyard_pipeline.errors import TemplateError, TokenizerUnavailable
from tokenizers import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, **options)  # type: ignore[arg-type]


def test_the_helpers_that_templates_expect() -> None:
    now = datetime(2026, 1, 2, 3, 4)
    assert render("{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}", now=now) == "<s>2026-01-02"
    assert render('{{ {"b": "<é>", "a": 1} | tojson }}') == '{"b": "<é>", "a": 1}'
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    tools = [{"type": "function", "function": {"name": "bash"}}]
    assert render("{{ tools[0].function.name if tools else 'none' }}", tools=tools) == "bash"
    assert render("{{ tools[0].function.name if tools else 'none' }}") == "none"


def test_a_template_that_refuses_or_is_broken() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(TemplateError):
        render("{{ messages[0].content.no_such() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_outside_text_is_encoded_as_it_stands_in_the_whole(tokenizer: ChatTokenizer) -> None:
    end = tokenizer.encode("<|im_end|>")[0]
    text = "\n<|im_start|>user\n hello  there"
    whole = tokenizer.encode("seven<|im_end|>" + text)
    assert [*tokenizer.encode("seven"), end, *tokenizer.encode_after(end, text)] == whole
    assert tokenizer.special_text(end) == "<|im_end|>"
    assert tokenizer.special_text(tokenizer.encode("<tool_call>")[0]) is None


async def test_a_folder_is_loaded_once_and_dropped_when_old(model_folder: Path) -> None:
    cache = FormatCache(size=1)
    first = await cache.get(str(model_folder))
    assert (await cache.get(str(model_folder))).template is first.template
    assert first.tokenizer.variables() == {"eos_token": "<|im_end|>"}


def test_the_template_in_the_tokenizers_config(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(TokenizerUnavailable, match=r"no chat_template\.jinja"):
        load_folder(tmp_path)
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert load_folder(tmp_path)[1] == "plain"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_folder(tmp_path)[1] == "t"
    config.write_text("{broken")
    with pytest.raises(TokenizerUnavailable, match="cannot be read"):
        load_folder(tmp_path)


def test_a_tokenizer_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"no tokenizer\.json"):
        locate(str(tmp_path))
    for name in ("nobody/no-such-model", "not a name at all!", str(tmp_path / "missing")):
        with pytest.raises(TokenizerUnavailable, match=r"spec\.tokenizer"):
            locate(name)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnavailable, match="cannot be parsed"):
        load_folder(tmp_path)
