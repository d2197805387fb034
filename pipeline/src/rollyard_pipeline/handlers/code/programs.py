"""The policy's program, which is taken out of what it said, and the code that a test needs before it."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass, replace
from typing import Final

from rollyard_pipeline.handlers.blocks import Block, State, fenced_blocks

_PYTHON: Final = re.compile(r"(?:py|python|pypy|ipython|sage)[0-9.-]*|[\w+#.-]+\.py")
_SESSION: Final = re.compile(r"\s*>>>")
_FUNCTION: Final = re.compile(r"^[ \t]*+(?:async[ \t]++)?def[ \t]++(\w++)", re.MULTILINE)
_INDENTED: Final = re.compile(r"(?:[ \t]*+\n)*+[ \t]")
_UNINDENTED: Final = re.compile(r"^\S", re.MULTILINE)
_MOST_PARSED: Final = 1 << 16
"""The largest number of characters that are parsed, because the parser blocks all threads of the worker."""
_LONG_NUMBER: Final = re.compile(r"[0-9_]{4000,}+")
"""More digits than Python's parser accepts, whatever they are for."""
_LABEL_SHOWN: Final = 20
"""The largest number of characters of a block's label that people are shown."""


@dataclass(frozen=True, slots=True)
class AnswerProgram:
    """The policy's program.

    Attributes:
        text: The program.
        part: The part of the answer that it is, for people.
        prefix: A program that runs before it, with the same names.
    """

    text: str
    part: str
    prefix: str = ""


def program_of(answer: str, entry_point: str | None = None) -> AnswerProgram:
    """Return the program in an answer.

    Where a function is wanted, it is the last block that defines it; one that imports it, or assigns a value
    to its name, comes after one that has its body. Otherwise it is the last block that is labelled as Python
    and does something, else the last such block without a label, else the last with another label.
    Interactive sessions are not programs. Without such a block it is the text before the first fence, if that
    is Python, else the whole answer.

    Args:
        answer: The answer, in Markdown or as a program without any fence.
        entry_point: The name of the function that is wanted, or of a method of the class `Solution`.
    """
    blocks = fenced_blocks(answer, _state)
    programs = [block for block in blocks if block.text.strip() and not _SESSION.match(block.text)]
    python = [block for block in programs if _PYTHON.fullmatch(block.label)]
    known = [block for block in programs if not block.label or _PYTHON.fullmatch(block.label)]
    others = [block for block in programs if block.label and not _PYTHON.fullmatch(block.label)]
    defining = _defining(known, others, entry_point) if entry_point is not None else []
    acting = [[block for block in those if _acts(block.text)] for those in (known, others)]
    running = [block for block in python if not _idle(block.text)]
    for candidates in (*defining, running, python, *acting):
        if candidates:
            block = candidates[-1]
            label = block.label[:_LABEL_SHOWN] or "no label"
            position = f"block {blocks.index(block) + 1} of {len(blocks)}"
            # The rest of a function that the prefix begins has its indentation.
            whole = entry_point is None or candidates in defining
            text = _flat(block.text) if whole else block.text
            return AnswerProgram(text, f"{position} ({label}, lines {block.first}-{block.last})")
    if not blocks:
        return AnswerProgram(answer, "the whole answer, which has no fenced block")
    begun = "\n".join(answer.split("\n")[: blocks[0].first - 1])
    if _acts(begun):  # The opening fence stood in the prompt.
        return AnswerProgram(begun, "what stands before the first fence")
    return AnswerProgram(answer, f"the whole answer: none of its fenced blocks ({len(blocks)}) is a program")


def whole_program(prefix: str, text: str, entry_point: str | None) -> AnswerProgram:
    """Return the program to run, and what runs before it.

    Where the prefix begins the function that the policy has to complete, its answer may be the whole function
    or the rest of it. It is the whole one if it is a program that defines the name.
    """
    program = program_of(text, entry_point)
    if not prefix:
        return program
    if entry_point is None or not _begins(prefix, entry_point) or defines(program.text, entry_point):
        # The helpers of the prefix stay there. Its last function may have no body yet.
        return replace(program, prefix=completed(prefix))
    return replace(program, text=f"{prefix}{program.text}")


def completed(prefix: str) -> str:
    """Return the prefix as a program that can be compiled: a function without a body gets one."""
    for rest in ("", "\n    pass\n", "\n        pass\n"):
        if parsed(prefix + rest) is not None:
            return prefix + rest
    return prefix


def _begins(prefix: str, name: str) -> bool:
    return name in _FUNCTION.findall(prefix)


def defines(program: str, name: str) -> bool:
    """Return whether a program defines a function of this name, or a class `Solution`, which may have it.

    A program that is not Python defines what it has a `def` for.
    """
    return _strength(program, name) > 0


def _defining(known: list[Block], others: list[Block], name: str) -> list[list[Block]]:
    """Return the blocks that define a name, those that do it most clearly first."""
    claims = [[(block, _claim(block, name)) for block in those] for those in (known, others)]
    return [
        [block for block, claim in those if claim == strength] for strength in (3, 2, 1) for those in claims
    ]


def _claim(block: Block, name: str) -> int:
    """Return how clearly a block defines a name, from 0 to 3."""
    if _tree(block.text) is not None:
        return _strength(block.text, name)
    if any(parsed(block.text[:_MOST_PARSED].rstrip() + body) is not None for body in (": ...", " ...")):
        return 0  # It is a signature, which shows how the function is called.
    return (3 if _PYTHON.fullmatch(block.label) else 1) if _begins(block.text, name) else 0


def _strength(program: str, name: str) -> int:
    """Return how clearly a program defines a name, from 0 to 3.

    A function with a body, and a class `Solution` that has it, are 3. Another value that is assigned to the
    name, and a class `Solution` that may inherit it, are 2. Everything else that binds the name is 1.
    """
    tree = _tree(program)
    if tree is None or (len(program) > _MOST_PARSED and _begins(program, name)):
        return 3 if _begins(program, name) else 0
    return max((_bound(node, name) for node in _statements(tree)), default=0)


def _statements(tree: ast.Module | ast.ClassDef) -> list[ast.AST]:
    """Return the nodes of a program or class, without those within its functions and classes."""
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return nodes


def _bound(node: ast.AST, name: str) -> int:
    """Return how clearly a node defines a name: see `_strength`."""
    if isinstance(node, ast.ClassDef) and node.name == "Solution" != name:
        if any(_bound(each, name) for each in _statements(node)):
            return 3
        return 2 if node.bases else 1
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
        empty = all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)
        return 1 if empty else 3
    if isinstance(node, ast.ClassDef) and node.name == name:
        return 3
    if isinstance(node, ast.Assign) and name in [getattr(each, "id", "") for each in node.targets]:
        return 3 if isinstance(node.value, ast.Lambda) else 2
    if isinstance(node, ast.alias) and (node.asname or node.name) == name:
        return 1
    return int(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)


def _acts(program: str) -> bool:
    """Return whether a text is Python that does more than give values, as a sample of an output does."""
    tree = _tree(program)
    return tree is not None and any(
        not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign)
        or any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in tree.body
    )


def _idle(program: str) -> bool:
    """Return whether a text is Python that only gives values."""
    return _tree(program) is not None and not _acts(program)


def _flat(program: str) -> str:
    """Return a program without the indentation that all of its lines have."""
    return textwrap.dedent(program) if _INDENTED.match(program) else program


def _state(block: Block) -> State:
    """Return whether a block was cut within a triple-quoted string."""
    if len(block.text) > _MOST_PARSED or (block.label and not _PYTHON.fullmatch(block.label)):
        return "whole"
    try:
        ast.parse(_LONG_NUMBER.sub("0", block.text))
    except SyntaxError as error:
        return "cut" if "triple-quoted" in error.msg else "broken"
    except (ValueError, RecursionError, MemoryError):
        return "broken"
    return "whole"


def _tree(program: str) -> ast.Module | None:
    """Return a syntax tree that shows the names of a program, but not its long numbers.

    The tree of a program that is too long shows only the statements at its beginning.
    """
    if len(program) > _MOST_PARSED:
        program = program[:_MOST_PARSED]
        program = program[: max((line.start() for line in _UNINDENTED.finditer(program)), default=0)]
    return parsed(_LONG_NUMBER.sub("0", _flat(program)))


def parsed(program: str) -> ast.Module | None:
    """Return the syntax tree of a program, or None if it has none."""
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_DEFINING: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
)
"""The statements that do nothing but define names, apart from what an imported module does."""


def needed(helpers: str, program: str, name: str) -> str:
    """Return the helpers of a test, or "" if they only define names that the test does not mention.

    Args:
        helpers: The code that stands before the test.
        program: The test.
        name: The name of the tested function, which is not a helper.
    """
    tree = parsed(helpers)
    if tree is None or not all(isinstance(statement, _DEFINING) for statement in tree.body):
        return helpers
    words = set(re.findall(r"\w+", program))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = node.name
        elif isinstance(node, ast.alias):
            defined = (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined = node.id
        else:
            continue
        if defined == "*" or (defined in words and defined != name):
            return helpers
    return ""
