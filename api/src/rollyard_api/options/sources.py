"""The sources of options: the command line, then variables, then a file, and defaults where none names one.

A name that no option has is refused in each of them, with the option that was probably meant. Values of
options that may hold a password are never quoted.
"""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import ValidationError
from rollyard_crds.reading.yaml_text import YamlError, load_one

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.declared import DeclaredOptions, PlaneOptions, keys, option_of, variable_of

MAX_FILE_BYTES: Final = 1 << 20
_SHOWN: Final = 80
"""The largest number of characters of a value that a message quotes."""
_PASSWORDS: Final = frozenset({"password", "passwd", "pwd", "token", "secret", "key", "sslpassword"})
"""The parameters of a URL that are passwords."""
_MESSAGES: Final = {
    "tuple_type": "must be a list",
    "string_type": "must be a text; quote it if it is a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "path_type": "must be a path",
}
"""What is said instead of pydantic's words, by the type of its error."""

T = TypeVar("T", bound=DeclaredOptions)


def load(model: type[T], arguments: Mapping[str, Any], file: Path | None, program: str) -> T:
    """Return the options of a program from all sources.

    Args:
        model: The declaration of the program's options.
        arguments: The values of the command line, by field. Options that are not on it are absent.
        file: The file that the command line names, or None.
        program: The command, for messages.

    Raises:
        OptionInvalid: A source names no option of the program, or a value cannot be used.
    """
    from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict
    from pydantic_settings import PydanticBaseSettingsSource as Source

    _refuse_passwords(model, arguments)
    _refuse_unknown_variables(model, program)
    variables = {name: _from_variable(model, name) for name in model.model_fields}
    values = {} if file is None else _from_file(model, file, program)

    class Variables(EnvSettingsSource):
        def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
            return variables[field_name], field_name, False

        def prepare_field_value(self, field_name: str, field: Any, value: Any, value_is_complex: bool) -> Any:
            return value

    class Layered(BaseSettings, model):  # type: ignore[misc, valid-type]
        model_config = SettingsConfigDict(case_sensitive=True, extra="forbid")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: Source,
            env_settings: Source,
            dotenv_settings: Source,
            file_secret_settings: Source,
        ) -> tuple[Source, ...]:
            return init_settings, Variables(settings_cls), InitSettingsSource(settings_cls, values)

    try:
        layered = Layered(**arguments)
    except ValidationError as error:
        raise OptionInvalid(_problem(error, model, arguments, file, values)) from None
    # The sources have done their work; later copies are made from the values alone.
    values = {name: getattr(layered, name) for name in model.model_fields}
    return cast(T, model.model_construct(layered.model_fields_set, **values))


def drop_variables(model: type[DeclaredOptions], environ: MutableMapping[str, str]) -> None:
    """Remove the variables of the control plane and of a program's own options from an environment.

    No process that is started then inherits a password. A control plane gets the values of the variables in a
    file, and finds none that would have precedence.
    """
    of_plane = {variable_of(PlaneOptions, name) for name in PlaneOptions.model_fields} - {""}
    for name in [name for name in environ if name.startswith(_prefixes(model)) or name in of_plane]:
        del environ[name]


def holds_password(url: str) -> bool:
    """Return whether a URL has a password, or a parameter that is one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True  # What cannot be parsed may hold anything.
    return bool(parts.password) or any(name.lower() in _PASSWORDS for name, _ in parse_qsl(parts.query))


def _prefixes(model: type[DeclaredOptions]) -> tuple[str, ...]:
    return tuple({base.prefix for base in model.__mro__ if issubclass(base, DeclaredOptions) and base.prefix})


def _refuse_passwords(model: type[DeclaredOptions], arguments: Mapping[str, Any]) -> None:
    for key, name in keys(model).items():
        secret = option_of(model.model_fields[name]).secret
        value = arguments.get(name)
        if secret and isinstance(value, str) and holds_password(value):
            raise OptionInvalid(
                f"--{key}: has a password, and every user of this machine can read command lines; give it as "
                f"{variable_of(model, name)}, or as `{key}` in the file of --config"
            )


def _refuse_unknown_variables(model: type[DeclaredOptions], program: str) -> None:
    known = {variable_of(model, name) for name in model.model_fields}
    for name in sorted(os.environ):
        if name.startswith(_prefixes(model)) and name not in known:
            raise OptionInvalid(f"{name}: {_unknown(name, known, program)}")


def _unknown(name: str, known: set[str], program: str) -> str:
    """Return that a name is not an option, with the one that was probably meant."""
    same = [each for each in known if _letters(each) == _letters(name)]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"; did you mean {near[0]}?" if near else f"; `{program} --help` lists them"
    return f"is not an option of `{program}`{hint}"


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _from_variable(model: type[DeclaredOptions], name: str) -> Any:
    """Return the value of a field's variable, or None if it is not set or empty."""
    variable = variable_of(model, name)
    text = os.environ.get(variable) if variable else None
    if not text:
        return None
    if not str(model.model_fields[name].annotation).startswith("tuple"):
        return text
    if not text.startswith("["):
        return text.split()
    try:
        return json.loads(text)
    except ValueError:
        raise OptionInvalid(f"{variable}: must be words with spaces between them, or a JSON list") from None


def _from_file(model: type[DeclaredOptions], path: Path, program: str) -> dict[str, Any]:
    """Return the values of a file, by field. Those that a variable of another reader overrides are absent.

    Raises:
        OptionInvalid: The file cannot be read or used, or has a key that no option has.
    """
    text, status = _read(path)
    try:
        document = load_one(text)
    except YamlError as error:
        raise OptionInvalid(f"{path}: is not YAML that is accepted: {_without_content(error)}") from None
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise OptionInvalid(f"{path}: must be a mapping of options to values")
    known = keys(model)
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in known:
            shown = str(key)[:_SHOWN]
            raise OptionInvalid(f"{path}: {shown}: {_unknown(shown, set(known), program)}")
        field = model.model_fields[known[key]]
        option = option_of(field)
        if isinstance(value, bool) and field.annotation is not bool:
            raise OptionInvalid(f"{path}: {key}: must not be true or false; quote it if it is a text")
        if option.secret and isinstance(value, str) and holds_password(value):
            _check_secrecy(path, key, status)
        if value is not None and not any(os.environ.get(name) for name in option.elsewhere):
            values[known[key]] = value
    return values


def _without_content(error: YamlError) -> str:
    """Return why a text is not YAML, without the line of the text, which may hold a password."""
    cause = error.__cause__
    if not isinstance(cause, yaml.MarkedYAMLError) or cause.problem_mark is None:
        return str(error) if cause is None else "a value cannot be read"
    mark = cause.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {cause.problem}"


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return the content of a file that no other user can have written, and its status.

    Raises:
        OptionInvalid: The file cannot be read, is too large, or another user can change it.
    """
    try:
        # With O_NONBLOCK, a pipe is refused below instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise OptionInvalid(f"--config {path}: cannot be read: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OptionInvalid(f"--config {path}: is not a file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid not in (0, os.geteuid()):
            raise OptionInvalid(
                f"--config {path}: belongs to user {status.st_uid}, who could choose what runs here; it must "
                "be your own, or root's"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OptionInvalid(
                f"--config {path}: other users can write it (mode {stat.S_IMODE(status.st_mode):04o}), and "
                f"choose what runs here: chmod go-w {path}"
            )
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise OptionInvalid(f"--config {path}: has more than {MAX_FILE_BYTES} bytes")
    return text, status


def _check_secrecy(path: Path, key: str, status: os.stat_result) -> None:
    """Refuse a file with a password that others can read.

    A file of root may be readable by its group, as in a mounted Kubernetes Secret.
    """
    readers = stat.S_IROTH | (stat.S_IRGRP if status.st_uid else 0)
    if status.st_mode & readers:
        raise OptionInvalid(
            f"{path}: {key}: has a password, and other users can read the file (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}"
        )


def _problem(
    error: ValidationError,
    model: type[DeclaredOptions],
    arguments: Mapping[str, Any],
    file: Path | None,
    values: Mapping[str, Any],
) -> str:
    """Return a line about the first fault, which names the source of the value."""
    item = error.errors(include_url=False)[0]
    name = str(item["loc"][0])
    key = next(key for key, field in keys(model).items() if field == name)
    variable = variable_of(model, name)
    if item["type"] == "missing":
        return f"--{key} is required (or {variable}, or `{key}` in the file of --config)"
    if name in arguments:
        source = f"--{key}"
    elif variable and os.environ.get(variable):
        source = variable
    else:
        source = f"{file}: {key}" if name in values else f"--{key}"
    message = _MESSAGES.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    value = item.get("input")
    if not option_of(model.model_fields[name]).secret and item["type"] != "value_error":
        shown = repr(value)
        message += f" (got {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + '...'})"
    return f"{source}: {message}"
