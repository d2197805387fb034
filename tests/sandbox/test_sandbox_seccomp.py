"""The filter of system calls, run by an interpreter of classic BPF for both processors."""

from __future__ import annotations

import errno
import struct

import pytest
from rollyard_sandbox.isolation import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
UNSHARE = {"x86_64": 272, "aarch64": 97}
IO_SETUP = {"x86_64": 206, "aarch64": 0}
SOCKET = {"x86_64": 41, "aarch64": 198}
NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)


def run(code: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Return what the kernel would do, according to linux/filter.h and linux/seccomp.h."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("HBBI", code))
    at = accumulator = 0
    for _ in range(len(instructions)):
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: accumulator & operand != 0,
            }[operation]  # fmt: skip
            at += if_true if holds else if_false
    raise AssertionError("the filter does not end")


def refusal(number: int) -> int:
    return 0x50000 | number


@pytest.fixture(params=sorted(AUDIT))
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_each_call_has_its_answer(machine: str) -> None:
    code = seccomp.program(machine)
    refused = set(seccomp.refused_calls(machine).values())
    assert len(refused) > 45
    assert run(code, IO_SETUP[machine], AUDIT[machine]) == refusal(errno.ENOSYS)
    special = {CLONE[machine], UNSHARE[machine], SOCKET[machine], IO_SETUP[machine], 435}
    for number in range(600):
        if number in special:
            continue
        expected = refusal(errno.EPERM) if number in refused else ALLOW
        assert run(code, number, AUDIT[machine]) == expected, number


def test_only_new_namespaces_are_refused_to_clone_and_unshare(machine: str) -> None:
    code = seccomp.program(machine)
    for flag in NAMESPACES:
        assert run(code, CLONE[machine], AUDIT[machine], flag | 17) == refusal(errno.EPERM)
        assert run(code, UNSHARE[machine], AUDIT[machine], flag) == refusal(errno.EPERM)
    assert run(code, UNSHARE[machine], AUDIT[machine], 0x80) == refusal(errno.EPERM)
    for harmless in (17, 0x3D0F00, 0x1200011, 0x7D0F00):  # These are fork, pthread_create, vfork, …
        assert run(code, CLONE[machine], AUDIT[machine], harmless) == ALLOW
    assert run(code, UNSHARE[machine], AUDIT[machine], 0x600) == ALLOW
    assert run(code, 435, AUDIT[machine]) == refusal(errno.ENOSYS)
    assert run(code, SOCKET[machine], AUDIT[machine], 40) == refusal(errno.EAFNOSUPPORT)
    assert run(code, SOCKET[machine], AUDIT[machine], 2) == ALLOW


def test_other_abis_are_refused(machine: str) -> None:
    code = seccomp.program(machine)
    for other in (0x40000003, 0x40000028, *(set(AUDIT.values()) - {AUDIT[machine]})):
        assert run(code, 1, other) == KILL
    if machine == "x86_64":
        assert run(code, 0x40000000 | 101, AUDIT[machine]) == refusal(errno.ENOSYS)
        assert run(code, 0xFFFFFFFF, AUDIT[machine]) == refusal(errno.ENOSYS)


def test_an_unknown_processor_has_no_filter() -> None:
    assert seccomp.program("riscv64") is None
