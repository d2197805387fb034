"""gpt-oss's channels in the form that its chat template needs: separate `thinking` and `content`.

A turn consists of one or more `<|channel|>NAME …<|message|>TEXT`, with `<|end|><|start|>assistant` in
between (OpenAI's harmony format).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_MESSAGE: Final = re.compile(
    r"<\|channel\|>\s*(\w+)(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|\Z)", re.S
)


def split_channels(text: str, escape: Callable[[str], str], calls: bool) -> dict[str, str]:
    """Return the `content` of a sampled turn and, if the turn has any, its `thinking`.

    Args:
        text: The turn without its end-of-turn token.
        escape: Turns control tokens that are left in the parts into text.
        calls: Whether the turn makes calls. The template then accepts only thinking beside them.
    """
    found = _MESSAGE.findall(text)
    if not found:
        return {"content": "" if calls else escape(text)}
    said = [(channel, body) for channel, header, body in found if " to=" not in header]
    thinking = "\n".join(body for channel, body in said if channel == "analysis")
    content = "\n".join(body for channel, body in said if channel != "analysis")
    if calls:
        thinking, content = "\n".join(part for part in (thinking, content) if part), ""
    return {"content": escape(content), **({"thinking": escape(thinking)} if thinking else {})}
