"""The product before recording proxies of two servers, and dialogues to play on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollyard_testing.families import FAMILIES, write_folder
from rollyard_testing.vllm.checker import Answer, answers
from rollyard_testing.vllm.product import Product
from rollyard_testing.vllm.proxy import Recorder

Trajectory = dict[str, Any]
MAX_TOKENS = 48


class Stage:
    """A running product, and the proxies that stand between it and its servers."""

    def __init__(self, product: Product, proxies: list[Recorder], folder: Path, model: Path) -> None:
        self.product = product
        self.proxies = proxies
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the proxies, which are all of the servers that the product knows."""
        return [proxy.url for proxy in self.proxies]

    def pool(self, family: str, **spec: Any) -> str:
        """Make a pool of all servers that speaks a family's template, and return its name."""
        name = family.replace("_", "-")
        folder = write_folder(FAMILIES[family], self._tokenizer, self._folder / f"tokenizer-{name}")
        self.product.pool(name, self.urls, folder, **spec)
        return name

    def served(self) -> list[Answer]:
        """Return everything that the servers sampled so far, as the proxies saw it."""
        return [one for proxy in self.proxies for one in answers(proxy.url, proxy.exchanges())]


def tasks(name: str, count: int, turns: int, **metadata: Any) -> list[dict[str, Any]]:
    """Return dialogues to begin with: a user's message, some with a system message or earlier turns."""
    rng = random.Random(name)
    made: list[dict[str, Any]] = []
    for number in range(count):
        messages = [{"role": "user", "content": f"Look up word {rng.randrange(1000)} of {name}."}]
        if number % 2:
            messages += [
                {"role": "assistant", "content": "Which list?"},
                {"role": "user", "content": "The long one."},
            ]
        if rng.random() < 0.5:
            messages = [{"role": "system", "content": "You look words up."}, *messages]
        made.append(
            {"id": f"{name}-{number}", "messages": messages, "metadata": {"turns": turns, **metadata}}
        )
    return made
