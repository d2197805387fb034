"""The harness of the gateway's figures: a process of its own that plays conversations over HTTP.

`python -m rollyard_bench.gateway_client` reads a JSON line for each round and answers it with one. A round
plays conversations at once, each for some turns, with one request after the other: the reply and the results
of its calls are appended to the messages, which are sent whole, as harnesses do. A conversation is
continued in later rounds until one begins it again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPT = "Look through the files under data/ and submit the answer."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}},
        },
    }
    for name, argument in (("bash", "command"), ("submit", "answer"))
]


def observation(turn: int, size: int) -> str:
    """Return what the tool of a turn prints, in about `size` characters."""
    line = f"{turn:04d} apple;7;wagon/maple.txt\n"
    return line * max(1, size // len(line))


@dataclass(slots=True)
class _Conversation:
    http: httpx.AsyncClient
    url: str
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": PROMPT}])
    turns: int = 0

    async def turn(self, *, stream: bool, size: int) -> dict[str, float]:
        """Play one turn. Return when it began, when its first event came and when it ended."""
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, "stream": stream}
        content = json.dumps(body).encode()
        first = 0.0
        begin = time.monotonic()
        if stream:
            message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
            async with self.http.stream("POST", f"{self.url}/v1/chat/completions", content=content) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    # The first event may name the role only.
                    if line.startswith("data: {") and _add(message, json.loads(line[6:])):
                        first = first or time.monotonic()
        else:
            answer = await self.http.post(f"{self.url}/v1/chat/completions", content=content)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
        end = time.monotonic()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": observation(self.turns, size)}
            for call in message["tool_calls"]
        ]
        self.messages += [message, *results]
        self.turns += 1
        return {"begin": begin, "first": first, "end": end}


def _add(message: dict[str, Any], event: dict[str, Any]) -> bool:
    """Add what an event says to a message, and return whether it says anything of what was sampled."""
    if not event.get("choices"):
        return False
    delta = event["choices"][0]["delta"]
    message["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or ():
        if part["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = message["tool_calls"][part["index"]]
        call["id"] = part.get("id") or call["id"]
        for name, text in part.get("function", {}).items():
            call["function"][name] += text or ""
    return bool(delta.get("content") or delta.get("tool_calls"))


async def _round(
    conversations: dict[str, _Conversation], asked: dict[str, Any]
) -> list[list[dict[str, float]]]:
    async def play(url: str, number: int) -> list[dict[str, float]]:
        if asked["again"] or url not in conversations:
            headers = {"authorization": f"Bearer {asked['key']}", "content-type": "application/json"}
            old = conversations.pop(url, None)
            http = old.http if old is not None else httpx.AsyncClient(headers=headers, timeout=60.0)
            conversations[url] = _Conversation(http, url)
        stream = asked["stream"] == "all" or (asked["stream"] == "half" and number % 2 == 0)
        conversation = conversations[url]
        return [await conversation.turn(stream=stream, size=asked["size"]) for _ in range(asked["turns"])]

    urls: Sequence[str] = asked["urls"]
    return list(await asyncio.gather(*(play(url, number) for number, url in enumerate(urls))))


async def _main() -> None:
    conversations: dict[str, _Conversation] = {}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        turns = await _round(conversations, json.loads(line))
        sys.stdout.write(json.dumps(turns) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main())
