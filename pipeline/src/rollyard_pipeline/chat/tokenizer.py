"""The model's tokenizer, from its folder's tokenizer.json; no transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from rollyard_pipeline.errors import TokenizerUnavailable

_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer:
    """Encodes outside text and decodes sampled ids; never adds special tokens by itself.

    Args:
        tokenizer: as loaded by `tokenizers`.
        config: tokenizer_config.json.
    """

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._config = config or {}
        self._special: dict[int, str] = {
            int(token_id): token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special(self) -> dict[int, str]:
        """Text of each special token by id."""
        return dict(self._special)

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token; None for any other id."""
        return self._special.get(token_id)

    def variables(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, … as templates read them."""
        found: dict[str, str] = {}
        for name in _TOKEN_NAMES:
            value = self._config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_after(self, last_id: int | None, text: str) -> list[int]:
        """Ids of `text` where it follows the token `last_id`.

        After a special token the text is encoded behind that token, because some
        tokenizers treat the start of an input differently (a leading space mark).
        """
        anchor = None if last_id is None else self._special.get(last_id)
        if anchor is not None:
            ids = self.encode(anchor + text)
            if ids[:1] == [last_id]:
                return ids[1:]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; broken UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def locate(name: str) -> Path:
    """The folder of a tokenizer: a local path, else Hugging Face's cache on this machine.

    Raises:
        TokenizerUnavailable: neither; the message says what to set.
    """
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").is_file():
        return folder
    if folder.is_dir():
        raise TokenizerUnavailable(
            f"{folder} has no tokenizer.json; set the pool's spec.tokenizer to one that has"
        )
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        hub = None
    if hub is not None and not folder.is_absolute():
        try:
            cached = hub.try_to_load_from_cache(name, "tokenizer.json")
        except ValueError:  # not of the form "owner/name"
            cached = None
        if isinstance(cached, str):
            return Path(cached).parent
    raise TokenizerUnavailable(
        f"no tokenizer '{name}' on this worker: set the pool's spec.tokenizer to a folder with "
        "tokenizer.json and chat_template.jinja that every worker can read, "
        "or put the model into Hugging Face's cache here"
    )


def load_folder(folder: Path) -> tuple[ChatTokenizer, str]:
    """The tokenizer and the source of the chat template that lie in `folder`.

    Raises:
        TokenizerUnavailable: a file is missing or cannot be read.
    """
    config: dict[str, Any] = {}
    config_file = folder / "tokenizer_config.json"
    try:
        if config_file.is_file():
            config = json.loads(config_file.read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (OSError, ValueError) as error:
        raise TokenizerUnavailable(f"{folder}: the tokenizer's files cannot be read: {error}") from error
    except Exception as error:  # tokenizers raises bare Exception for a bad tokenizer.json
        raise TokenizerUnavailable(f"{folder}/tokenizer.json cannot be parsed: {error}") from error
    return ChatTokenizer(tokenizer, config), _template_source(folder, config)


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("tool_use") or named.get("default")
    if isinstance(source, str):
        return source
    raise TokenizerUnavailable(
        f"{folder} has no chat_template.jinja, and tokenizer_config.json there has no 'chat_template'"
    )
