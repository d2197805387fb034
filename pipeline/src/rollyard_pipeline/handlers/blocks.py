"""The fenced blocks of an answer, as CommonMark reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Final, Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_ANSWER: Final = 1 << 17
"""The number of characters, at the end of an answer, that are searched for blocks. The reader needs up to
10 microseconds for each, whatever they are."""
_RULES: Final = frozenset({"fence", "code", "list", "blockquote"})
"""Fences may also be in lists and quotations, and indented code is not a block. HTML is not read: `<answer>`
before a fence would make it a part of that element."""
_NEWLINE: Final = re.compile(r"\r\n?")
_LABEL: Final = re.compile(r"[\s{.]*+([\w+#.-]*+)")
_BEFORE: Final = re.compile(r"^([ ]{0,3}+)[\ufeff\u200b]*+(?:</?\w{1,40}>[ ]*+)*+(?=```|~~~)", re.MULTILINE)
"""What may come before an opening fence: marks of an encoding, and tags such as `<answer>`."""
_AFTER: Final = re.compile(
    r"^([ ]{0,3}+(?:`{3,}+|~{3,}+))[ ]*+(?:(?:</\w{1,40}>|<\|\w{1,40}\|>)[ ]*+)++$", re.MULTILINE
)
"""A closing fence and what ends the answer: tags such as `</answer>`, and tokens such as `<|im_end|>`."""
_DEEP: Final = re.compile(r"^(?: {4}|\t)[ \t]*+(?:```|~~~)", re.MULTILINE)
_PARAGRAPH: Final = re.compile(r"^.++(?=\n(?: {4}|\t)[ \t]*+(?:```|~~~)`*+~*+\w)", re.MULTILINE)
"""The line before such an opening fence, which would otherwise be a part of its paragraph."""
_DOUBLED: Final = re.compile(r"(?:```|~~~)`*+~*+\w")
"""An opening fence as the first line of a block, which is not text in any language."""
_PAGES: Final = frozenset({"markdown", "md"})
_MOST_ENDS: Final = 8
"""How often another end is tried for a cut block, in one answer."""

State = Literal["whole", "cut", "broken"]
"""The state of a block, for those who can read its language."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        label: The first word of the info string in lower case, such as "python", or "".
        text: The lines within the fences. Each ends with a newline.
        first: The number of the line of its opening fence; the first line of the answer is 1.
        last: The number of its last line.
    """

    label: str
    text: str
    first: int
    last: int


def fenced_blocks(answer: str, state: Callable[[Block], State] = lambda block: "whole") -> list[Block]:
    """Return the fenced blocks of an answer, in their order.

    Fences that are indented so far that CommonMark takes them for indented code count, except inside a block.
    So do those with tags of the answer on their line.

    Args:
        answer: The answer. Only its last `MAX_ANSWER` characters are read.
        state: Says that a block was cut at a fence in a string of its own. It then ends at the next fence
            with which it is whole, if there is one.
    """
    if "```" not in answer and "~~~" not in answer:
        return []
    before = answer[:-MAX_ANSWER].count("\n")
    text = _NEWLINE.sub("\n", answer[-MAX_ANSWER:])
    text = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", text))
    blocks = _blocks(text.split("\n"), _reader(_RULES), state)
    if _DEEP.search(text):
        taken = {number for block in blocks for number in range(block.first, block.last + 1)}
        deep = _blocks(_PARAGRAPH.sub("", text).split("\n"), _reader(_RULES - {"code"}), state)
        blocks += [block for block in deep if taken.isdisjoint(range(block.first, block.last + 1))]
        blocks.sort(key=lambda block: block.first)
    return [_moved(block, before) for block in blocks]


def _reader(rules: Set[str]) -> MarkdownIt:
    return MarkdownIt("zero").enable(rules)


def _blocks(lines: list[str], reader: MarkdownIt, state: Callable[[Block], State]) -> list[Block]:
    blocks: list[Block] = []
    start, ends = 0, _MOST_ENDS
    while start < len(lines):
        for block in _read(lines, start, reader):
            longer = None
            if ends and state(block) == "cut":
                longer, ends = _longer(lines, block, state, ends)
            if longer is not None:
                blocks.append(longer)
                start = longer.last
                break
            pages = block.label in _PAGES or _DOUBLED.match(block.text)
            inner = _read(block.text.split("\n"), 0, reader) if pages else []
            blocks += [_moved(each, block.first) for each in inner] or [block]
        else:
            break
    return blocks


def _read(lines: list[str], start: int, reader: MarkdownIt) -> list[Block]:
    """Return the blocks from a line on, which has the number 0 if it is the first one."""
    tokens: list[Token] = []
    reader.block.parse("\n".join(lines[start:]), reader, {}, tokens)
    blocks = []
    for token in tokens:
        if token.type == "fence" and token.map is not None:
            label = "".join(_LABEL.findall(token.info)[:1]).lower()
            blocks.append(Block(label, token.content, start + token.map[0] + 1, start + token.map[1]))
    return blocks


def _longer(
    lines: list[str], block: Block, state: Callable[[Block], State], ends: int
) -> tuple[Block | None, int]:
    """Return the block with another end, or None, and how many further ends may be tried."""
    opening = lines[block.first - 1]
    indent = len(opening) - len(opening.lstrip(" "))
    fence = lines[block.last - 1].strip()
    for number in range(block.last + 1, len(lines) + 1):
        if ends and lines[number - 1].strip() == fence:
            text = "".join(f"{_outdented(line, indent)}\n" for line in lines[block.first : number - 1])
            longer = Block(block.label, text, block.first, number)
            ends -= 1
            if state(longer) == "whole":
                return longer, ends
    return None, ends


def _outdented(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" "))) :]


def _moved(block: Block, lines: int) -> Block:
    return replace(block, first=block.first + lines, last=block.last + lines)
