"""The files that Eval takes over from Run's sandbox into a fresh one."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rollyard_crds.base import Model, cel

WORKDIR: Final = "/work"
"""The work folder, as absolute paths in `files` name it."""
MAX_CARRY_BYTES: Final = 64 << 20
_ONE_OF: Final = "give exactly one of 'files' and 'diff: true'"
_PATHS: Final = (
    "a path must be relative to the work folder or begin with '/work/', without '.', '..' and empty parts, "
    "and without '*', '?', '[' (name a folder to carry all that is in it)"
)
_PATHS_RULE: Final = (
    "!has(self.files) || self.files.all(p, (!p.startsWith('/') || p.startsWith('/work/')) && "
    "!p.matches('[*?\\\\[]|//|(^|/)[.][.]?(/|$)|^/work/$'))"
)


def carried_path(path: str) -> str:
    """Return `path` relative to the work folder, without a slash at its end.

    Raises:
        ValueError: it leads out of the work folder, or is a pattern.
    """
    relative = path.removeprefix(f"{WORKDIR}/") if path.startswith("/") else path
    parts = relative.removesuffix("/").split("/")
    if (
        relative.startswith("/")
        or any(part in ("", ".", "..") for part in parts)
        or any(letter in path for letter in "*?[\0")
    ):
        raise ValueError(_PATHS)
    return "/".join(parts)


def _checked(path: str) -> str:
    carried_path(path)
    return path


class EvalCarry(Model):
    """The files that Eval's fresh sandbox gets from the one that Run used: named files, or all changes."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("(has(self.files) && size(self.files) > 0) != self.diff", _ONE_OF), (_PATHS_RULE, _PATHS)
        )
    )

    files: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_checked)]],
        Field(max_length=64),
    ] = Field(default_factory=list)
    """Files and folders, relative to the work folder or below `/work/`; a missing one is left out."""
    diff: bool = False
    """If true, everything that Run changed in the work folder, compared with a sandbox fresh from Init."""
    max_bytes: Annotated[int, Field(ge=1, le=MAX_CARRY_BYTES)] = 16 << 20
    """The limit of all carried files together, in bytes. A policy that leaves more is scored 0."""

    @model_validator(mode="after")
    def _one_kind(self) -> EvalCarry:
        if bool(self.files) == self.diff:
            raise ValueError(_ONE_OF)
        return self
