"""Reading the arguments that a pool gives its engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def flag_of(argument: str) -> str:
    """The flag that an argument sets, `--max-model-len` for `--max_model_len=4096`; empty for a value.

    vLLM takes both spellings.
    """
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else ""


def is_given(args: Iterable[str], *flags: str) -> bool:
    """Whether one of these flags is among the arguments."""
    return any(flag_of(argument) in flags for argument in args)


def given(args: Sequence[str], flag: str) -> str:
    """The value of a flag in `args`, as the last one says; empty if it is not there."""
    value = ""
    for place, argument in enumerate(args):
        if flag_of(argument) == flag:
            _name, equals, rest = argument.partition("=")
            value = rest if equals else args[place + 1] if place + 1 < len(args) else ""
    return value


def given_port(args: Sequence[str], default: int) -> int:
    """The port that a server with these arguments listens on: the one of `--port`, else `default`."""
    chosen = given(args, "--port")
    return int(chosen) if chosen.isdigit() else default
