"""The number of token ids of a model. Embeddings are often padded beyond the tokenizer's last id."""

from __future__ import annotations

import json
from pathlib import Path


def vocabulary_size(folder: Path, tokenizer_size: int) -> int:
    """Return the bound of the model's ids: `config.json`'s `vocab_size`, but at least the tokenizer's size.

    Args:
        folder: The folder of the model or its tokenizer. It need not contain a config.json.
        tokenizer_size: The number of tokens of the tokenizer, including added ones.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return tokenizer_size
    sizes = [tokenizer_size]
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if type(size) is int:
            sizes.append(size)
    return max(sizes)
