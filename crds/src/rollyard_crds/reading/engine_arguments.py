"""Functions that read the arguments that a pool gives its engine. They are pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def flag_of(argument: str) -> str:
    """Return the flag that an argument sets, or an empty string if the argument is a value.

    The flag of `--max_model_len=4096` is `--max-model-len`, since vLLM accepts both spellings.
    """
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else ""


def is_given(args: Iterable[str], *flags: str) -> bool:
    """Return whether one of these flags is among the arguments."""
    return any(flag_of(argument) in flags for argument in args)


def given(args: Sequence[str], flag: str) -> str:
    """Return the value that the arguments give to a flag.

    If the flag is given several times, the last value counts. If it is not given, the result is empty.
    """
    value = ""
    for index, argument in enumerate(args):
        if flag_of(argument) == flag:
            _name, equals, text = argument.partition("=")
            value = text if equals else args[index + 1] if index + 1 < len(args) else ""
    return value


def given_port(args: Sequence[str], default: int) -> int:
    """Return the port that a server with these arguments listens on.

    This is the value of `--port` if it is a number, and `default` otherwise.
    """
    port = given(args, "--port")
    return int(port) if port.isdigit() else default
