"""gpt-oss's channels, as its chat template wants them: `thinking` and `content` apart.

A turn is `<|channel|>NAME …<|message|>TEXT` once or more, with `<|end|><|start|>assistant` in between
(OpenAI's harmony format).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_MESSAGE: Final = re.compile(
    r"<\|channel\|>\s*(\w+)(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|\Z)", re.S
)


def split_channels(text: str, escape: Callable[[str], str], calls: bool) -> dict[str, str]:
    """`content` and, where the turn has any, `thinking` of a sampled turn.

    Args:
        text: without its end-of-turn token.
        escape: makes text of any control token that is left in the parts.
        calls: the turn makes calls, beside which the template takes thinking alone.
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
