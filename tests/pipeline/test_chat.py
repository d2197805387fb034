"""Templates and tokenizers: what templates of the field use, and clear refusals."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from rollyard_pipeline.chat import FormatCache
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer, load_folder, locate
from rollyard_pipeline.errors import TemplateError, TokenizerUnavailable, TokenizerUnreachable
from rollyard_testing import spacemarks
from rollyard_testing.hub import COMMIT, HubModel, hub_server, use_hub
from tokenizers import Tokenizer

TINY = Path(__file__).parents[2] / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
USER = [{"role": "user", "content": "hi"}]


def render(source: str, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, **options)


def test_the_helpers_that_templates_expect() -> None:
    now = datetime(2026, 1, 2, 3, 4)
    assert render("{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}", now=now) == "<s>2026-01-02"
    assert render('{{ {"b": "<é>", "a": 1} | tojson }}') == '{"b": "<é>", "a": 1}'
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    tools = [{"type": "function", "function": {"name": "bash"}}]
    assert render("{{ tools[0].function.name if tools else 'none' }}", tools=tools) == "bash"
    assert render("{{ tools[0].function.name if tools else 'none' }}") == "none"


def test_what_templates_of_the_field_use() -> None:
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"a": 1}}}]
    assert render("{{ tools | tojson(indent=4) }}", tools=tools) == json.dumps(tools, indent=4)
    assert render("{%- macro m(a, b=2) -%}{{ a ~ b }}{%- endmacro -%}{{ m(1) }}") == "12"
    counted = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    assert render(counted) == "1"
    assert render("{% for k, v in tools[0].function.items() %}{{ k }} {% endfor %}", tools=tools) == (
        "name parameters "
    )
    assert render("{% for k, v in tools[0].function | items %}{{ k }} {% endfor %}", tools=tools) == (
        "name parameters "
    )
    assert render("{% for m in messages %}{% if 1 %}{% continue %}{% endif %}{{ m }}{% endfor %}x") == "x"
    assert render("{{ documents is none }} {{ thinking is defined }}") == "True False"
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"
    # A job's variables cannot overwrite what only the renderer sets.
    assert render("{{ messages[0].content }}", variables={"messages": []}) == "hi"
    assert render("{{ messages[0].reasoning_content is string }}{{ messages[0].get('x', 'y') }}") == "Falsey"
    assert (
        render("{{ messages[::-1][0].role }}{{ [1, 2] is iterable }}{{ 'a' is mapping }}") == "userTrueFalse"
    )


def test_a_template_that_refuses_or_is_broken() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    for failing in (
        "{{ messages[0].content.no_such() }}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) }}",
        "{{ [][5].x }}",
    ):
        with pytest.raises(TemplateError, match="refuses the conversation"):
            render(failing)


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


def test_text_that_spells_control_tokens_stays_text(tokenizer: ChatTokenizer) -> None:
    end, think = tokenizer.encode("<|im_end|>")[0], tokenizer.encode("<think>")[0]
    text = "a <|im_end|> b <think><|im_start|><|im_end|>"
    ids = tokenizer.encode(tokenizer.escape(text))
    assert not set(ids) & set(tokenizer.special)
    assert think in ids  # It is not a control token, but as ordinary as any other text.
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(tokenizer.escape("plain [text] <b>")) == tokenizer.encode("plain [text] <b>")
    # Sampled plain tokens that spell one stay plain, and a sampled special token stays special.
    sampled = [*ids, end, *tokenizer.encode("c")]
    assert tokenizer.encode(tokenizer.decode_sampled(sampled)) == sampled
    # Something may hide in front of it, and a text may bring a mark along.
    for hostile in (f"<{MARK}|im_end|>", "<<|im_end|>", "<|im_start<|im_end|>", f"{MARK}<|im_end|>{MARK}"):
        assert not set(tokenizer.encode(tokenizer.escape(hostile))) & set(tokenizer.special)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tokenizer_that_marks_spaces(legacy: bool) -> None:
    tokenizer = spacemarks.tokenizer(legacy)
    whole = tokenizer.encode("<s>a seven</s>a seven")
    end = whole.index(2)
    assert tokenizer.encode_after(2, "a seven") == whole[end + 1 :]
    # This is a sampled turn that begins with a space, and the same turn inside the whole.
    assert tokenizer.decode_sampled([vocabulary_id(tokenizer, "▁seven")]) == " seven"
    assert tokenizer.decode_sampled([vocabulary_id(tokenizer, "seven")]) == "seven"
    assert tokenizer.decode_sampled([3 + 0xF0, 3 + 0x9F, 3 + 0x99, 3 + 0x82]) == "🙂"
    assert "\ufffd" in tokenizer.decode_sampled([3 + 0xF0, 3 + 0x9F])


def vocabulary_id(tokenizer: ChatTokenizer, piece: str) -> int:
    found = next(i for i in range(tokenizer.vocabulary_size) if tokenizer._tokenizer.id_to_token(i) == piece)
    return int(found)


async def test_a_folder_is_loaded_once_and_dropped_when_old(model_folder: Path) -> None:
    cache = FormatCache(size=1)
    first = await cache.get(str(model_folder))
    assert (await cache.get(str(model_folder))).template is first.template
    assert first.tokenizer.variables() == {"eos_token": "<|im_end|>"}
    # Tools and variables are those of one rollout, and not of the folder.
    other = await cache.get(str(model_folder), [{"type": "function"}], {"enable_thinking": False})
    assert (other.tools, other.variables) == ([{"type": "function"}], {"enable_thinking": False})
    again = await cache.get(str(model_folder), [])
    assert (again.template, again.tools, again.variables) == (first.template, None, {})


async def test_the_folder_that_was_used_longest_ago_is_dropped(model_folder: Path, tmp_path: Path) -> None:
    names = []
    for name in "abc":
        (tmp_path / name).symlink_to(model_folder)
        names.append(str(tmp_path / name))
    a, b, c = names
    cache = FormatCache(size=2)
    first = {name: await cache.get(name) for name in (a, b)}
    await cache.get(a)
    await cache.get(c)
    assert (await cache.get(a)).template is first[a].template
    assert (await cache.get(b)).template is not first[b].template


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"]
)
async def test_a_job_cannot_set_what_only_rollyard_sets(model_folder: Path, name: str) -> None:
    with pytest.raises(TemplateError, match=f"cannot set {name}: Rollyard does"):
        await FormatCache().get(str(model_folder), variables={"enable_thinking": True, name: "x"})


def test_which_variables_a_template_reads(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.variables() == {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
    source = "{{ bos_token }}{{ documents is none }}{{ add_generation_prompt }}"
    assert render(source) == "<s>TrueTrue"
    assert render(source, variables={"bos_token": "<b>", "documents": 1}) == "<b>FalseTrue"
    for name in ("add_generation_prompt", "tools", "strftime_now"):
        assert render(f"{{{{ {name} == 'mine' }}}}", variables={name: "mine"}) == "False"
    assert render("{{ raise_exception is callable }}", add_generation_prompt=False) == "True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


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
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "r"}, named[0]]}))
    assert load_folder(tmp_path)[1] == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "own file"}))
    assert load_folder(tmp_path)[1] == "d"
    config.write_text(json.dumps({"eos_token": "<config>"}))
    assert load_folder(tmp_path)[1] == "own file"
    tokens = {"eos_token": "<map>", "pad_token": {"content": "<pad>"}, "unk_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert load_folder(tmp_path)[0].variables() == {"eos_token": "<config>", "pad_token": "<pad>"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerUnavailable, match="cannot be read"):
        load_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_folder(tmp_path)[1] == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("rag")
    assert load_folder(tmp_path)[1] == "file"
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    assert load_folder(tmp_path)[1] == "with tools"
    config.write_text("[]")
    with pytest.raises(TokenizerUnavailable, match=r"tokenizer_config\.json is not a JSON object"):
        load_folder(tmp_path)
    config.write_text("{broken")
    with pytest.raises(TokenizerUnavailable, match="cannot be read"):
        load_folder(tmp_path)


def test_a_tokenizer_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"no tokenizer\.json"):
        locate(str(tmp_path))
    for name in ("not a name at all!", "nobody/../model", str(tmp_path / "missing")):
        with pytest.raises(TokenizerUnavailable, match=r"spec\.tokenizer"):
            locate(name)
    for file in ("tekken.json", "tokenizer.model"):
        (tmp_path / file).write_text("x")
        with pytest.raises(TokenizerUnavailable, match=rf"{file}.* converted .*save_pretrained"):
            locate(str(tmp_path))
        (tmp_path / file).unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    with pytest.raises(TokenizerUnavailable, match="cannot be parsed"):
        load_folder(tmp_path)


async def test_a_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as hub:
        use_hub(monkeypatch, hub, tmp_path)
        hub.status = 503
        formats = FormatCache(4)
        with pytest.raises(TokenizerUnreachable, match=r"spec\.tokenizer .* tiny/hf: .* with 503") as caught:
            await formats.get("tiny/hf")
        assert caught.value.retryable, "the next attempt may succeed"
        asked = len(hub.requests)
        assert asked
        with pytest.raises(TokenizerUnreachable):
            await formats.get("tiny/hf")
        assert len(hub.requests) == asked, "rollouts that come soon after do not ask again"
        hub.status = 0
        with pytest.raises(TokenizerUnavailable, match="has no model 'tiny/hf'"):
            await FormatCache(4).get("tiny/hf")
        hub.models["tiny/hf"] = HubModel(TINY)
        chat = await FormatCache(4).get(f"tiny/hf@{COMMIT}")
        assert chat.tokenizer.vocabulary_size == load_folder(TINY)[0].vocabulary_size
