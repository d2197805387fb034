"""The model's tokenizer, loaded from tokenizer.json in its folder, without transformers."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard_process import hub
from rollyard_process.hub_names import hub_name

from rollyard_pipeline.errors import TokenizerUnavailable, TokenizerUnreachable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log: Final = logging.getLogger(__name__)
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_OTHER_FORMATS: Final = ("tekken.json", "tokenizer.model*", "*.tiktoken", "vocab.json", "vocab.txt")
_BARS: Final = re.compile(r"<[|｜].+[|｜]>")

MARK: Final = "\ufdd0"
"""The mark at which an encoding is cut to keep text from becoming a control token.

It is not a character of Unicode.
"""


class ChatTokenizer:
    """Encodes outside text and decodes sampled ids. It never adds special tokens by itself.

    Args:
        tokenizer: The tokenizer as loaded by `tokenizers`.
        config: The content of tokenizer_config.json.
    """

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._config = config or {}
        self._special: dict[int, str] = {
            int(token_id): token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        # Some tokenizers (DeepSeek's) do not mark the tokens that begin a turn as special.
        self._control_ids: dict[int, str] = {
            int(token_id): token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if len(token.content) > 1 and (token.special or _BARS.fullmatch(token.content))
        }
        texts = "|".join(re.escape(text) for text in sorted(self._control_ids.values()))
        self._control = re.compile(f"(?={texts})(.)", re.S)
        self._control_starts = sorted({text[:3] for text in self._control_ids.values()})
        self._anchor = next(iter(self._special), None)

    @property
    def vocabulary_size(self) -> int:
        """Return how many token ids the tokenizer knows, including added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special(self) -> dict[int, str]:
        """Return the text of each special token by its id."""
        return dict(self._special)

    def special_text(self, token_id: int) -> str | None:
        """Return the text of a special token, or None for any other id."""
        return self._special.get(token_id)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose text is `text`, or None if the vocabulary has none."""
        token: int | None = self._tokenizer.token_to_id(text)
        return token

    def variables(self) -> dict[str, str]:
        """Return `bos_token`, `eos_token`, … as templates read them."""
        variables: dict[str, str] = {}
        for name in _TOKEN_NAMES:
            value = self._config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                variables[name] = value
        return variables

    def escape(self, text: str) -> str:
        """Return `text` with a MARK inside everything that spells a control token.

        A control token is a special one, or one like `<|user|>`. `encode` then returns the ids of the text,
        but never the id of a control token.
        """
        if MARK in text:
            text = text.replace(MARK, "")
        return self._control.sub(rf"\1{MARK}", text) if self._may_spell(text) else text

    def _may_spell(self, text: str) -> bool:
        # This is many times faster than the pattern on text that spells no control token.
        return any(start in text for start in self._control_starts)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. It is cut at each MARK, and no MARK is encoded."""
        first, *more = text.split(MARK)
        ids = list(self._tokenizer.encode(first, add_special_tokens=False).ids)
        for piece in more:
            ids += self.encode_after(ids[-1] if ids else None, piece)
        return ids

    def encode_after(self, last_id: int | None, text: str) -> list[int]:
        """Return the ids of `text` as it follows the token `last_id`.

        The text is encoded after a special token (`last_id`, if that is one), because some tokenizers treat
        the start of an input differently (a leading space mark).
        """
        if last_id is not None and self._anchor is not None:
            anchor = last_id if last_id in self._special else self._anchor
            ids = self.encode(self._special[anchor] + text)
            if ids[:1] == [anchor]:
                return ids[1:]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens spelled out. Broken UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decode_sampled(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids within a text, escaped where plain tokens spell a control token."""
        text = self._decode_inside(ids)
        if not self._may_spell(text):
            return text
        parts: list[str] = []
        plain: list[int] = []
        for token in ids:
            if token in self._control_ids:
                parts += [self.escape(self._decode_inside(plain)), self._control_ids[token]]
                plain = []
            else:
                plain.append(token)
        return "".join([*parts, self.escape(self._decode_inside(plain))])

    def _decode_inside(self, ids: Sequence[int]) -> str:
        # Some decoders drop the space with which a text begins.
        if not ids:
            return ""
        if self._anchor is not None:
            text = self.decode([self._anchor, *ids])
            if text.startswith(self._special[self._anchor]):
                return text[len(self._special[self._anchor]) :]
        return self.decode(ids)


def locate(name: str) -> Path:
    """Return the folder of a tokenizer: a local path, or else that of a model of the Hugging Face Hub.

    What this machine's cache of the hub lacks of the tokenizer is downloaded.

    Raises:
        TokenizerUnavailable: There is no such folder, and no such model can be had. The message says what to
            set.
        TokenizerUnreachable: The hub does not answer as it should, or the disk is full.
    """
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return folder
    if folder.is_dir():
        raise TokenizerUnavailable(f"{folder} has no tokenizer.json: {_remedy(folder)}")
    repository = hub_name(name)
    if repository is None:
        raise TokenizerUnavailable(
            f"no tokenizer '{name}' on this worker: set the pool's spec.tokenizer to a folder with "
            "tokenizer.json and chat_template.jinja that every worker can read, or to a model of the Hugging "
            "Face Hub (OWNER/NAME)"
        )
    try:
        return hub.download(repository, "tokenizer", log.info)
    except hub.HubError as error:
        unavailable = TokenizerUnavailable if error.is_permanent else TokenizerUnreachable
        raise unavailable(f"spec.tokenizer of the pool, {name}: {error}") from error


def _remedy(folder: Path) -> str:
    file = next((name for name in _OTHER_FORMATS if any(folder.glob(name))), None)
    if file is None:
        return "set the pool's spec.tokenizer to a folder that has one"
    return (
        f"its {file} has to be converted once, with transformers and sentencepiece installed: "
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('NEW_FOLDER'); then set the pool's "
        "spec.tokenizer to NEW_FOLDER"
    )


def load_folder(folder: Path) -> tuple[ChatTokenizer, str]:
    """Return the tokenizer and the source of the chat template in `folder`.

    Raises:
        TokenizerUnavailable: A file is missing or cannot be read.
    """
    library = importlib.import_module("tokenizers")  # Workers without a model do without it.
    try:
        config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
        source = _template_source(folder, config)
        tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (OSError, ValueError) as error:
        raise TokenizerUnavailable(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    except TokenizerUnavailable:
        raise
    except Exception as error:  # tokenizers raises a bare Exception for a bad tokenizer.json.
        raise TokenizerUnavailable(f"{folder}/tokenizer.json cannot be parsed: {error}") from error
    return ChatTokenizer(tokenizer, config), source


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return value


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    source = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # The configuration contains several named templates.
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("tool_use") or named.get("default")
    if isinstance(source, str):
        return source
    raise TokenizerUnavailable(
        f"{folder} has no chat_template.jinja, and tokenizer_config.json there has no 'chat_template': "
        "a base model has none; put the template that its training used there as chat_template.jinja, or "
        "set the pool's spec.tokenizer to a folder that has tokenizer.json and one"
    )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the config.json of a model says of it."""

    vocabulary: int
    """The bound of the model's ids, which is at least the size of its tokenizer."""
    context: int | None = None
    """The longest sequence in tokens (`max_position_embeddings`), or None if it is not stated."""


def model_sizes(folder: Path, tokenizer_size: int) -> ModelSizes:
    """Return the sizes in a model's config.json.

    Embeddings are often padded beyond the tokenizer's last id.

    Args:
        folder: The folder of the model or its tokenizer. It need not contain a config.json.
        tokenizer_size: The number of tokens of the tokenizer, including added ones.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ModelSizes(tokenizer_size)
    parts = (config, config.get("text_config")) if isinstance(config, dict) else ()
    sizes = _numbers(parts, "vocab_size")
    contexts = [length for length in _numbers(parts, "max_position_embeddings") if length > 0]
    return ModelSizes(max([tokenizer_size, *sizes]), contexts[-1] if contexts else None)


def _numbers(parts: Sequence[object], name: str) -> list[int]:
    """Return the whole numbers that parts of a configuration have under a name."""
    values = (part.get(name) for part in parts if isinstance(part, dict))
    return [value for value in values if type(value) is int]
