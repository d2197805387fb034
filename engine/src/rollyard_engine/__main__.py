"""The command line ``python -m rollyard_engine --model DIR``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rollyard_process.log_text import log_to
from rollyard_process.telemetry.options import add_log_option
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_engine.errors import EngineError
from rollyard_engine.settings import EngineSettings

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130


def parse_arguments(argv: Sequence[str] | None) -> EngineSettings:
    """Return the settings that ``argv`` specifies. The default is the process's arguments.

    The process exits with status 2 if an argument is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="rollyard_engine",
        description="Serve an ONNX chat model through the HTTP calls of vLLM that Rollyard uses.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model folder (genai_config.json)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=_count(65535), default=8000, help="0 picks a free one (default %(default)s)"
    )
    parser.add_argument("--port-file", type=Path, metavar="F", help="write the port here once serving")
    parser.add_argument(
        "--served-model-name",
        dest="served_names",
        nargs="+",
        metavar="NAME",
        help="names to answer to (default: the folder's name)",
    )
    parser.add_argument(
        "--policy-version", default="0", metavar="V", help="label of the weights (default %(default)s)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_count(4096, least=1),
        default=64,
        help="requests at once (default %(default)s)",
    )
    parser.add_argument(
        "--max-waiting",
        type=_count(1_000_000),
        default=2048,
        help="requests that may wait (default %(default)s)",
    )
    parser.add_argument("--max-model-len", type=_count(2**31 - 1, least=2), help="longest sequence in tokens")
    parser.add_argument(
        "--max-kept-seqs",
        type=_count(65536),
        default=256,
        help="finished caches kept for reuse (default %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-mib",
        type=_count(2**20, least=1),
        default=1024,
        help="memory for all caches (default %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=_count(1024),
        default=0,
        help="threads of one matrix product; 0 chooses by model size",
    )
    parser.add_argument(
        "--script",
        type=_path,
        metavar="F",
        help="JSON lines with answers to give instead of the model's, for tests",
    )
    parser.add_argument(
        "--log-samples",
        type=_path,
        metavar="F",
        help="append each ended request here as a JSON line with the ids of its prompt and the sampled ids",
    )
    add_log_option(parser)
    args = parser.parse_args(argv)
    args.model = args.model.absolute()
    args.served_names = tuple(args.served_names or (args.model.name,))
    return EngineSettings(**vars(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, and return the exit status.

    The status is 0 after a signal. If the server cannot start, the status is 2 and one line is written to
    standard error. If a signal arrives before the server handles signals, the status is 130.
    """
    settings = parse_arguments(argv)
    # This is imported late, which lets --help and invalid arguments answer immediately.
    from rollyard_engine.server import run

    try:
        log_to(level=logging.WARNING, form=settings.log_format)
    except TraceOptionError as error:
        sys.stderr.write(f"rollyard_engine: {error.reason}: {error}\n")
        return USAGE_ERROR
    try:
        run(settings)
    except EngineError as error:
        sys.stderr.write(f"rollyard_engine: {error.reason}: {error.message}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:  # The signal came before the server handles signals itself.
        return INTERRUPTED
    return 0


def _path(text: str) -> Path:
    """Return the absolute path that ``text`` names."""
    return Path(text).absolute()


def _count(most: int, *, least: int = 0) -> Callable[[str], int]:
    """Return a parser of integers between ``least`` and ``most``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")
        return number

    return parse


if __name__ == "__main__":
    sys.exit(main())
