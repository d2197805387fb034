"""Task folders in the format of Harbor: the files that a task carries, and a job's options for them."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from rollyard_crds.base import Model

MAX_KEY: Final = 128
"""The largest number of characters of a key of `reward.json`."""
UNKNOWN_KEYS: Final = "harbor_unknown"
"""The key of a task's metadata that holds the unknown keys of its `task.toml`, each with the known key that
it resembles, or None."""
IGNORED_KEYS: Final = "harbor_ignored"
"""The key of a task's metadata that lists the keys of its `task.toml` which the job's options leave out."""
MAX_BYTES: Final = 4 << 20
"""The largest size of all files of a task folder together, in bytes."""
MAX_FILES: Final = 1024
_PATH_CHARACTERS: Final = 512
_MAX_BASE64: Final = 6 << 20

FilePath = Annotated[str, Field(min_length=1, max_length=_PATH_CHARACTERS)]


class HarborOptions(Model):
    """A job's settings for all of its task folders in the format of Harbor."""

    reward_key: Annotated[str, Field(min_length=1, max_length=MAX_KEY)] | None = None
    """The key of `reward.json` that holds the reward. Default: `reward`."""
    network: Literal["ignore", "allow"] | None = None
    """What becomes of a task that asks for a network. `ignore`: it has none. `allow`: where it asks for every
    host, it has those of the job's `sandbox.allowedHosts`, and its tests those of
    `stages.eval.allowedHosts`, or none where the job has no such list. Default: a task that asks for every
    host is refused."""
    user: Literal["ignore"] | None = None
    """What becomes of a task that names the user of the agent or of the tests. `ignore`: they run as the user
    of all sandboxes. Default: it is refused."""


def path_problem(path: str) -> str:
    """Return what is wrong with the path of a file of a task folder, or "" if nothing is.

    A path is relative to the folder and stays below it, however it is joined.
    """
    if len(path) > _PATH_CHARACTERS:
        return f"is longer than {_PATH_CHARACTERS} characters"
    if "\\" in path or not path.isprintable():
        return "holds a backslash or a character that cannot be printed"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "must be relative to the folder, without empty parts, '.' and '..'"
    return ""


class HarborFolder(Model):
    """The files of a task folder. A path is relative to the folder.

    Raises:
        pydantic.ValidationError: A path leads out of the folder, is given twice, or is also the folder of
            another file; a file is not base64; or the files together are too large.
    """

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    files: Annotated[
        dict[FilePath, Annotated[str, Field(max_length=MAX_BYTES)]], Field(max_length=MAX_FILES)
    ] = Field(default_factory=dict)
    """The files that are UTF-8 text."""
    binary: Annotated[
        dict[FilePath, Annotated[str, Field(max_length=_MAX_BASE64)]], Field(max_length=MAX_FILES)
    ] = Field(default_factory=dict)
    """All other files, in base64."""
    executable: Annotated[list[FilePath], Field(max_length=MAX_FILES)] = Field(default_factory=list)
    """The files that can be executed."""
    options: HarborOptions | None = None
    """The job's settings for its task folders: `tasks.harbor`, as the format read it."""

    @model_validator(mode="after")
    def _stays_below(self) -> HarborFolder:
        paths = [*self.files, *self.binary]
        for path in paths:
            if problem := path_problem(path):
                raise ValueError(f"{path[:200]!r}: {problem}")
        if len(set(paths)) < len(paths):
            raise ValueError("a file is given both as text and in base64")
        folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
        for path in paths:
            if path in folders:
                raise ValueError(f"{path[:200]!r}: is a file and a folder")
        size = sum(len(text.encode(errors="replace")) for text in self.files.values())
        for path, text in self.binary.items():
            try:
                size += len(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"{path[:200]!r}: is not base64") from error
        if size > MAX_BYTES:
            raise ValueError(f"holds {size} bytes, and a task folder may hold {MAX_BYTES}")
        return self

    @classmethod
    def of(
        cls, contents: dict[str, tuple[bytes, bool]], options: HarborOptions | None = None
    ) -> HarborFolder:
        """Return the folder with these files: by path, the content and whether it can be executed."""
        files: dict[str, str] = {}
        binary: dict[str, str] = {}
        for path, (data, _) in contents.items():
            try:
                text = data.decode()
            except UnicodeDecodeError:
                binary[path] = base64.b64encode(data).decode()
            else:
                files[path] = text
        executable = [path for path, (_, can_run) in contents.items() if can_run]
        return cls(files=files, binary=binary, executable=executable, options=options)

    def paths(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return sorted([*self.files, *self.binary])

    def has(self, path: str) -> bool:
        """Return whether the folder has a file at this path."""
        return path in self.files or path in self.binary

    def text(self, path: str) -> str | None:
        """Return the content of a text file, or None if there is no such file."""
        return self.files.get(path)

    def content(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            KeyError: There is no such file.
        """
        text = self.files.get(path)
        return base64.b64decode(self.binary[path]) if text is None else text.encode(errors="replace")

    def below(self, *tops: str) -> dict[str, tuple[bytes, int]]:
        """Return the files of some folders, as content and mode by the path below them.

        Args:
            tops: The folders. Where two have a file at the same path, that of the later one is returned.
        """
        files: dict[str, tuple[bytes, int]] = {}
        runnable = set(self.executable)
        for top in tops:
            for path in self.paths():
                if path.startswith(f"{top}/"):
                    mode = 0o755 if path in runnable else 0o644
                    files[path[len(top) + 1 :]] = (self.content(path), mode)
        return files
