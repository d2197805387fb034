"""Model families as the tests know them: special tokens, chat template, tool-call parser, one tokenizer.

    from rollyard_testing.families import FAMILIES, train_tokenizer, write_folder

One byte-level BPE vocabulary holds the special tokens of every family, so one served model can stand for all
of them: chat templates are applied on our side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES: Final = Path(__file__).parent / "templates"
Call = tuple[str, dict[str, Any]]
"""The name and the arguments of a tool call."""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Iterable[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _coder(calls: Iterable[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        fields = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _llama(calls: Iterable[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _mistral_v3(calls: Iterable[Call]) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _mistral_v11(calls: Iterable[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _deepseek(calls: Iterable[Call]) -> str:
    blocks = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def _harmony(calls: Iterable[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    ).removesuffix("<|call|>")


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        template: The file in `templates/`.
        parser: The entry point of the group `rollyard.tool_parsers`, or None for a family without tools.
        calls: The text of an assistant turn that makes these calls, without its end.
        end: The token that ends a turn; `call_end` is the one that ends a turn of calls.
        think: The texts around a thought, or None for a family that does not think.
        opened: Whether the generation prompt has opened the thought already.
        system: Whether the template takes a system message.
        raw: Whether the template shows the text of a turn as it was sampled.
    """

    name: str
    template: str
    parser: str | None
    calls: Callable[[Iterable[Call]], str] | None
    end: str
    bos: str = ""
    call_end: str = ""
    think: tuple[str, str] | None = None
    opened: bool = False
    system: bool = True
    raw: bool = True
    final: tuple[str, str] = ("", "")
    """The texts around an answer without calls."""

    @property
    def source(self) -> str:
        """Return the template's text."""
        return (TEMPLATES / self.template).read_text(encoding="utf-8")

    @property
    def variables(self) -> dict[str, str]:
        """Return `bos_token` and `eos_token`, as in tokenizer_config.json."""
        return {"bos_token": self.bos, "eos_token": self.end}

    def turn(self, text: str = "", calls: Iterable[Call] = (), thought: str | None = None) -> str:
        """Return what a well-behaved model of the family samples in one turn, with its end-of-turn token."""
        calls = list(calls)
        said = ""
        if thought is not None and self.think is not None:
            opening, closing = self.think
            said = ("" if self.opened else opening) + thought + closing
        if calls and self.calls is not None:
            return said + text + self.calls(calls) + (self.call_end or self.end)
        before, after = self.final
        return said + before + text + after + self.end


_THINK: Final = ("<think>\n", "\n</think>\n\n")

FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        Family("chatml", "chatml.jinja", None, None, "<|im_end|>"),
        Family("qwen2_5", "qwen2_5.jinja", "hermes", _hermes, "<|im_end|>"),
        Family("qwen3", "qwen3.jinja", "hermes", _hermes, "<|im_end|>", think=_THINK),
        Family("qwen3_5", "qwen3_5.jinja", "qwen3_coder", _coder, "<|im_end|>", think=_THINK, opened=True),
        Family("qwen3_coder", "qwen3_coder.jinja", "qwen3_coder", _coder, "<|im_end|>"),
        Family("llama3", "llama3.jinja", "llama3_json", _llama, "<|eot_id|>", "<|begin_of_text|>"),
        Family(
            "mistral_v3", "mistral_v3.jinja", "mistral", _mistral_v3, "</s>", "<s>",
            raw=False, final=(" ", ""),
        ),
        Family("mistral_v11", "mistral_v11.jinja", "mistral", _mistral_v11, "</s>", "<s>", raw=False),
        Family(
            "deepseek_v3", "deepseek_v3.jinja", "deepseek_v3", _deepseek,
            "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", think=("<think>\n", "\n</think>\n\n"),
        ),
        Family(
            "deepseek_r1", "deepseek_r1.jinja", "deepseek_v3", _deepseek,
            "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", think=_THINK, opened=True,
        ),
        Family(
            "gpt_oss", "gpt_oss.jinja", "gpt_oss", _harmony, "<|return|>", "<|startoftext|>",
            call_end="<|call|>", think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            final=("<|channel|>final<|message|>", ""), raw=False,
        ),
        Family("gemma", "gemma.jinja", None, None, "<end_of_turn>", "<bos>", system=False),
    )
}  # fmt: skip

SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<|python_tag|>",
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<|startoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
    "<|call|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
"""The tokens that are marked special, as in the models' own tokenizers."""

MARKERS: Final = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
"""The added tokens that are not marked special, as Qwen's and DeepSeek's are not."""

_TEXT: Final = (
    "the user asks how many files there are in the folder and the assistant calls a tool to count them",
    'system user assistant tool ipython {"name": "bash", "arguments": {"command": "ls -la | wc -l"}}',
    "commentary to=functions.bash json analysis final developer model function parameters <parameter=",
    "error: no such file: report.txt [exit code 1] (no output) thinking about it 0123456789 \n\n\n   \t ",
)


def train_tokenizer(text: Iterable[str] = _TEXT, size: int = 560) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `size` tokens, all families' special tokens first.

    Every byte is a token, so any text can be encoded and broken UTF-8 can be sampled. The ids of the special
    tokens do not depend on `text`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    state = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(state))


def write_folder(family: Family, tokenizer: Tokenizer, folder: Path) -> Path:
    """Write a folder as a model of the family has it: tokenizer, its configuration, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {name: value for name, value in family.variables.items() if value}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(family.source, encoding="utf-8")
    return folder


def end_tokens() -> tuple[str, ...]:
    """Return every family's end-of-turn tokens, at which a served model must stop (`eos_token_id`)."""
    ends = {end for family in FAMILIES.values() for end in (family.end, family.call_end) if end}
    return tuple(sorted(ends))
