"""A program of two pages that makes a list of system calls and then waits for ever.

The first process of a pid namespace has little to do and lives as long as the namespace. As a fork of the
server it would keep a copy of all of the server's pages. The program is an ELF file in memory for x86_64: its
first page is a loop over the calls, and its second page holds them with what they point to.
"""

from __future__ import annotations

import os
import struct

from rollyard_sandbox.isolation.system_calls import NUMBERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    Call = tuple[str, tuple[int | bytes | None, ...]]
    """The name of a system call and its arguments. Bytes are passed by their address."""

_PAGE: Final = 4096
_CODE_AT, _CALLS_AT = 0x400000, 0x401000  # The addresses of the two pages.
_WORDS: Final = 8  # Each call has its number, six arguments, and the exit status if it fails.
_HEADER: Final = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_EXECUTABLE, _X86_64, _LOAD, _READ, _WRITE, _EXECUTE = 2, 62, 1, 4, 2, 1

_CODE: Final = bytes.fromhex(
    "48bb 0010400000000000"  # mov $_CALLS_AT, %rbx
    "488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328 4c8b4b30"  # next: number and arguments
    "0f05 4885c0 7910"  # syscall; test %rax, %rax; jns done
    "488b7b38 4885ff 7407"  # mov 56(%rbx), %rdi; test %rdi, %rdi; jz done
    "b8e7000000 0f05"  # exit_group with this status
    "4883c340 ebc8"  # done: add $64, %rbx; jmp next
)


def program(calls: Sequence[Call]) -> bytes:
    """Return the program.

    If a call fails, the program exits with the place of the call in the list, counted from 1.

    Raises:
        ValueError: The calls need more than a page.
    """
    table = len(calls) + 1
    data = bytearray()
    words: list[int] = []
    for number, (name, arguments) in enumerate([*calls, ("pause", ())], 1):
        row = [NUMBERS[name]]
        for argument in arguments:
            if isinstance(argument, bytes):
                row.append(_CALLS_AT + table * _WORDS * 8 + len(data))
                data += argument + b"\0"
            else:
                row.append(argument or 0)
        words += [*row, *[0] * (_WORDS - 1 - len(row)), number]
    second = struct.pack(f"<{len(words)}Q", *words) + data
    if len(second) > _PAGE:
        raise ValueError(f"the calls need {len(second)} bytes, and there is room for {_PAGE}")
    entry = _HEADER.size + 2 * _SEGMENT.size
    identity = (b"\x7fELF", 2, 1, 1, 0, 0, _EXECUTABLE, _X86_64, 1)
    segments = (_HEADER.size, _SEGMENT.size, 2)
    header = _HEADER.pack(*identity, _CODE_AT + entry, _HEADER.size, 0, 0, *segments, 0, 0, 0)
    first = header
    first += _SEGMENT.pack(_LOAD, _READ | _EXECUTE, 0, _CODE_AT, _CODE_AT, _PAGE, _PAGE, _PAGE)
    first += _SEGMENT.pack(_LOAD, _READ | _WRITE, _PAGE, _CALLS_AT, _CALLS_AT, _PAGE, _PAGE, _PAGE)
    return (first + _CODE).ljust(_PAGE, b"\0") + second.ljust(_PAGE, b"\0")


def in_memory(content: bytes) -> int:
    """Return a descriptor of the program, which no other program inherits.

    Raises:
        OSError: The kernel has no files in memory.
    """
    descriptor = os.memfd_create("init")
    try:
        os.write(descriptor, content)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
