"""Models and tokenizers of the Hugging Face Hub: their names, the cache on this machine, and the download.

The name is `OWNER/NAME` or `OWNER/NAME@REVISION`, where the revision is a branch, a tag or a commit (default:
`main`). The library huggingface_hub does the work, so its variables apply: HF_HOME (the cache), HF_ENDPOINT,
HF_TOKEN (or the file `token` in HF_HOME) and HF_HUB_OFFLINE.

What is complete in the cache is used as it is, without the network, even if the branch has moved since: all
backends and workers that share a cache have the same files. No Python file of a repository is downloaded.

`python -m rollyard_process.hub NAME --for vllm` downloads a model, for a driver that starts its server later.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, get_args

from rollyard_process.errors import ProcessError
from rollyard_process.hub_names import HubName, hub_name
from rollyard_process.log_text import one_line

Use = Literal["tokenizer", "embedded", "vllm"]
"""What a repository is needed for: the tokenizer of stage workers, or the model of an engine."""

TOKENIZER_FILE: Final = "tokenizer.json"
_TOKENIZER: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "config.json",
)
_DESCRIPTION: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_SMALL: Final[dict[Use, tuple[str, ...]]] = {
    "tokenizer": _TOKENIZER,
    "embedded": _DESCRIPTION,
    "vllm": _DESCRIPTION,
}
"""The files beside the weights. They are small."""
_NEEDED: Final[dict[Use, tuple[str, ...]]] = {
    "tokenizer": (TOKENIZER_FILE,),
    "embedded": ("genai_config.json", TOKENIZER_FILE),
    "vllm": ("config.json",),
}
"""Those of the small files without which a repository is of no use."""
_WEIGHTS: Final[dict[Use, tuple[tuple[str, ...], ...]]] = {
    "tokenizer": (),
    "embedded": (("*.onnx", "*.onnx.data", "*.onnx_data"),),
    "vllm": (("*.safetensors",), ("*.bin", "*.pt")),
}
"""The forms of weights. The first one that a repository has is downloaded."""
_IGNORED: Final = ("*/*.safetensors", "*/*.bin", "*/*.pt", "*/*.onnx*", "consolidated*")
"""Further copies of the weights in other layouts."""
_INDEX: Final = "model.safetensors.index.json"
"""The file that names the parts of weights that are in several files."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_PERMANENT: Final = (
    *("ModelGated", "ModelNotFound", "RevisionNotFound", "ModelUnsuitable"),
    *("CacheUnwritable", "HubLibraryMissing"),
)
_NO_FOLDER: Final = "Did you mean a folder? There is none of that name here; give its absolute path"
"""The end of lines about a name that the hub does not confirm. One such as `models/foo` may mean a folder."""
_LINE_SECONDS: Final = 5.0
"""The time between two lines about the progress of a download, where nobody sees a progress bar."""


class HubError(ProcessError):
    """A repository of the hub cannot be used. The message says why and what to do.

    The reason is ModelGated, ModelNotFound, RevisionNotFound, ModelUnsuitable (it lacks a file),
    HubUnreachable (no network, or HF_HUB_OFFLINE), HubRefused, DiskFull, CacheUnwritable or
    HubLibraryMissing.
    """

    reason = "HubRefused"

    @property
    def is_permanent(self) -> bool:
        """Whether a person has to change something before another try can succeed."""
        return self.reason in _PERMANENT


def find(name: str) -> Path | None:
    """Return the tokenizer.json of a folder, or else of a model in Hugging Face's cache on this machine.

    The result is None if this machine has neither. Nothing is downloaded.
    """
    folder = Path(name).expanduser()
    if (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    repository = None if folder.exists() else hub_name(name)
    if repository is None:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    path = try_to_load_from_cache(repository.repository, TOKENIZER_FILE, revision=repository.revision)
    return Path(path) if isinstance(path, str) else None


def cached(repository: HubName, use: Use) -> Path | None:
    """Return the folder of a repository in the cache of this machine, or None if it is not complete there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        return None
    for weights in _WEIGHTS[use] or ((),):
        try:
            folder = Path(
                snapshot_download(
                    repository.repository,
                    revision=repository.revision,
                    allow_patterns=[*_SMALL[use], *weights],
                    ignore_patterns=list(_IGNORED),
                    local_files_only=True,
                )
            )
        except LocalEntryNotFoundError:
            continue
        if _is_complete(folder, use, weights):
            return folder
    return None


def download(repository: HubName, use: Use, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a repository, after downloading what the cache of this machine lacks of it.

    The hub is asked first which files there are, so that what is missing is known before the weights come.
    If it does not answer, nothing else is tried. During the download, the library repeats a request a few
    times and continues a file that was cut off. Each wait for the server is bounded
    (HF_HUB_DOWNLOAD_TIMEOUT), and files that are complete are not downloaded again.

    Args:
        repository: The repository.
        use: What it is needed for, which says which files are downloaded.
        say: Called now and then with a line about the progress. Without it, a terminal shows progress bars.

    Raises:
        HubError: It cannot be downloaded, or lacks what it is needed for.
    """
    folder = cached(repository, use)
    if folder is not None:
        return folder
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
    except ImportError as error:
        raise HubError(
            f"{repository} is a model of the hub, and huggingface_hub is not installed here: "
            "pip install 'rollyard[local]', or give a folder",
            reason="HubLibraryMissing",
        ) from error

    try:
        # Without an answer of the hub, snapshot_download would return whatever the cache has of a snapshot.
        info = HfApi().model_info(
            repository.repository,
            revision=repository.revision,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        files = {str(file.rfilename) for file in info.siblings or ()}
        weights = _weights(repository, use, files)
        folder = Path(
            snapshot_download(
                repository.repository,
                revision=repository.revision,
                allow_patterns=[*_SMALL[use], *weights],
                ignore_patterns=list(_IGNORED),
                tqdm_class=None if say is None else _progress_lines(repository, say),
            )
        )
    except HubError:
        raise
    except Exception as error:  # The library lets the errors of its HTTP client through.
        raise _problem(repository, error) from error
    if _is_complete(folder, use, weights):
        return folder
    if not _shards(folder) <= files:
        raise HubError(
            f"{repository} lacks weights that its {_INDEX} names: name another repository, or a folder",
            reason="ModelUnsuitable",
        )
    raise HubError(
        f"{constants.ENDPOINT} did not give all files of {repository}, and {constants.HF_HUB_CACHE} has no "
        "complete copy of it: try again later, or set HF_ENDPOINT to another mirror",
        reason="HubUnreachable",
    )


def _weights(repository: HubName, use: Use, files: Collection[str]) -> tuple[str, ...]:
    """Return the patterns of the weights to download, after checking that the repository has what is needed.

    Raises:
        HubError: It lacks a file.
    """
    for name in _NEEDED[use]:
        if name not in files:
            raise _unsuitable(repository, files, use, name)
    if not _WEIGHTS[use]:
        return ()
    for weights in _WEIGHTS[use]:
        if any(_matches(file, weights) and not _matches(file, _IGNORED) for file in files):
            return weights
    names = " or ".join(pattern for weights in _WEIGHTS[use] for pattern in weights)
    raise HubError(f"{repository} has no weights ({names})", reason="ModelUnsuitable")


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def _is_complete(folder: Path, use: Use, weights: tuple[str, ...]) -> bool:
    """Return whether a folder has what a use needs, with the weights that these patterns describe.

    The library knows this itself, unless an older version of it has downloaded the files, or the download
    was cut off before it had the list of them.
    """
    if not all((folder / name).is_file() for name in _NEEDED[use]):
        return False
    if not weights:
        return True
    has_any = any(True for pattern in weights for _ in folder.glob(pattern))
    return has_any and all(os.path.isfile(folder / name) for name in _shards(folder))


def _shards(folder: Path) -> set[str]:
    """Return the names of the files of weights that are in several files, as far as the folder knows them."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _unsuitable(repository: HubName, files: Collection[str], use: Use, missing: str) -> HubError:
    if use == "embedded" and "config.json" in files:
        remedy = "the embedded engine serves ONNX models of onnxruntime-genai; serve this one with vLLM"
    elif use == "tokenizer":
        remedy = "name a repository or a folder that has one as spec.tokenizer"
    else:
        remedy = "name another repository, or a folder"
    return HubError(f"{repository} has no {missing}: {remedy}", reason="ModelUnsuitable")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, as far as that is known."""
    for _ in range(16):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _problem(repository: HubName, error: Exception) -> HubError:
    """Return the error that says in one line what kept a repository from being downloaded.

    No text of the library or of the server becomes part of it, except for the name of the error's class.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as library

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    page = f"{hub}/{repository.repository}"
    with_token = get_token() is not None
    chain = list(_chain(error))
    numbers = {one.errno for one in chain if isinstance(one, OSError)}
    if numbers.intersection(_FULL):
        return HubError(
            f"the disk of {cache} is full, so {repository} cannot be downloaded: free some space, or set "
            "HF_HOME to a folder with more",
            reason="DiskFull",
        )
    if numbers.intersection(_UNWRITABLE):
        return HubError(
            f"{cache} cannot be written, so {repository} cannot be downloaded: set HF_HOME to a folder "
            "that can",
            reason="CacheUnwritable",
        )
    for one in chain:
        if isinstance(one, library.GatedRepoError):
            remedy = (
                f"the account of the token has no access: accept its licence at {page} with that account"
                if with_token
                else f"accept its licence at {page}, and set HF_TOKEN to a token of the account that did"
            )
            return HubError(f"{repository} is gated: {remedy}", reason="ModelGated")
        if isinstance(one, library.RevisionNotFoundError):
            return HubError(
                f"{repository.repository} has no revision {repository.revision!r}: name a branch, a tag or a "
                f"commit of {page}",
                reason="RevisionNotFound",
            )
        if isinstance(one, library.RepositoryNotFoundError):
            private = (
                "a private one needs a token that may read it"
                if with_token
                else "a private one needs HF_TOKEN"
            )
            return HubError(
                f"{hub} has no model {repository.repository!r}: check the name; {private}. {_NO_FOLDER}",
                reason="ModelNotFound",
            )
        if isinstance(one, library.OfflineModeIsEnabled):
            return HubError(
                f"{cache} has no complete copy of {repository}, and HF_HUB_OFFLINE forbids the download: "
                f"unset it, or copy what `hf download {repository.repository}` makes elsewhere into HF_HOME. "
                f"{_NO_FOLDER}",
                reason="HubUnreachable",
            )
        if isinstance(one, library.HfHubHTTPError):
            status = one.response.status_code
            what = {
                401: "the token (HF_TOKEN) is not valid",
                403: "the token (HF_TOKEN) may not read it",
                429: "there were too many requests; it is tried again later",
            }.get(status, "try again later, or set HF_ENDPOINT to another mirror")
            return HubError(f"{hub} answered the request for {repository} with {status}: {what}")
    if isinstance(chain[-1], ValueError):
        # The library refuses paths of files that lead out of the folder.
        return HubError(
            f"{hub} describes files of {repository} that cannot be used", reason="ModelUnsuitable"
        )
    return HubError(
        f"{hub} cannot be reached ({type(chain[-1]).__name__}), and {cache} has no complete copy of "
        f"{repository}: check the network, the proxy and HF_ENDPOINT, or set HF_HOME to a cache that has it. "
        f"{_NO_FOLDER}",
        reason="HubUnreachable",
    )


def _progress_lines(repository: HubName, say: Callable[[str], None]) -> type[Any]:
    """Return a class of progress bars that says how many bytes have come, line by line."""
    bar: Any = importlib.import_module("huggingface_hub.utils").tqdm
    said = time.monotonic()

    class ProgressLines(bar):  # type: ignore[misc]
        """A progress bar for a log file."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            nonlocal said
            # There is also a bar that counts files.
            if self.unit != "B" or not self.total or time.monotonic() < said + _LINE_SECONDS:
                return
            said = time.monotonic()
            came, all_bytes = (self.format_sizeof(number) for number in (self.n, self.total))
            say(f"downloading {repository}: {came}B of {all_bytes}B")

        def close(self) -> None:
            """Write nothing at the end."""
            self.disable = True

    return ProgressLines


def main(argv: list[str] | None = None) -> int:
    """Download a repository, and make a link to its folder if one is asked for.

    Returns:
        The exit status: 1 if the repository cannot be used. The reason is on standard error.
    """
    parser = argparse.ArgumentParser(prog="python -m rollyard_process.hub", allow_abbrev=False)
    parser.add_argument("name", help="OWNER/NAME or OWNER/NAME@REVISION")
    parser.add_argument("--for", dest="use", choices=get_args(Use), required=True)
    parser.add_argument("--link", type=Path, help="link to make, which leads to the folder")
    options = parser.parse_args(argv)
    repository = hub_name(options.name)
    if repository is None:
        parser.error(f"{options.name!r} is not OWNER/NAME or OWNER/NAME@REVISION")
    say = None if sys.stderr.isatty() else lambda line: print(line, flush=True)
    try:
        folder = download(repository, options.use, say)
        if options.link is not None:
            options.link.unlink(missing_ok=True)
            options.link.symlink_to(folder)
    except HubError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(f"error: {options.link} cannot be made: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    print(f"{repository} is in {os.fspath(folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
