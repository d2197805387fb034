"""How many token ids a model has: embeddings are often padded beyond the tokenizer's last id."""

from __future__ import annotations

import json
from pathlib import Path


def vocabulary_size(folder: Path, tokenizer_size: int) -> int:
    """Ids of the model are below this: `config.json`'s `vocab_size`, at least the tokenizer's size.

    Args:
        folder: of the model or its tokenizer; it need not hold a config.json.
        tokenizer_size: tokens of the tokenizer, added ones included.
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
