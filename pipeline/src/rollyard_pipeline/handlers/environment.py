"""The environment of an evaluation: what the image and the author set, without what Run could write.

The module is pure: it maps the variables of the sandbox to those of its evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from rollyard_sandbox.client.results import EvalPlace

from rollyard_pipeline.handlers.tables import words

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHARED: Final = ("/tmp", "/var/tmp", "/dev/shm", "/run/user")
"""Folders to which every program can write."""

_FOLDERS: Final = words(
    "BASH_ENV CARGO_HOME CDPATH CLASSPATH ENV GEM_HOME GEM_PATH GIT_CONFIG GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM GIT_DIR GIT_EXEC_PATH GIT_TEMPLATE_DIR GOPATH INPUTRC IPYTHONDIR JUPYTER_CONFIG_DIR",
    "LD_AUDIT LD_LIBRARY_PATH LD_PRELOAD LUA_CPATH LUA_PATH NODE_PATH NPM_CONFIG_PREFIX",
    "NPM_CONFIG_USERCONFIG PATH PERL5LIB PERLLIB PIP_CONFIG_FILE PYENV_ROOT PYTHONHOME PYTHONPATH",
    "PYTHONPYCACHEPREFIX PYTHONSTARTUP PYTHONUSERBASE RUBYLIB RUSTUP_HOME TEMP TMP VIRTUAL_ENV",
    "XDG_CACHE_HOME XDG_CONFIG_DIRS XDG_CONFIG_HOME XDG_DATA_DIRS XDG_DATA_HOME XDG_RUNTIME_DIR",
    "XDG_STATE_HOME npm_config_prefix npm_config_userconfig",
)
"""Variables that name folders with code and settings, as paths separated by colons or spaces."""

_OPTIONS: Final = words(
    "EDITOR GIT_ASKPASS GIT_EDITOR GIT_EXTERNAL_DIFF GIT_PAGER GIT_SSH GIT_SSH_COMMAND JAVA_TOOL_OPTIONS",
    "JDK_JAVA_OPTIONS LESSOPEN MAKEFLAGS NODE_OPTIONS PAGER PERL5OPT PROMPT_COMMAND PYTEST_ADDOPTS",
    "PYTEST_PLUGINS RUBYOPT SHELL SSH_ASKPASS VISUAL",
)
"""Variables that hold commands or options, which may name a file of code."""

_ALWAYS: Final = {
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    # Without the user's own settings, a repository of another user id would be refused.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "PIP_CONFIG_FILE": "/dev/null",
    "TERM": "dumb",
}
_SWITCHES: Final = {"PYTHONSAFEPATH": "1", "LANG": "C.UTF-8"}
"""Variables that are set unless the job or the task sets them."""
_PROXIES: Final = frozenset(
    {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
)
"""Variables that led Init and Run to a proxy, which an evaluation does not have."""
_SEPARATORS: Final = re.compile(r"[:\s]+")


def evaluation_environment(
    variables: Mapping[str, str], place: EvalPlace, *, workdir: str, author: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of an evaluation.

    Args:
        variables: The sandbox's own environment, as set by the image, the provider and the author.
        place: The evaluation's private place.
        workdir: The work folder, which belongs to Run, as do the sandbox's HOME and TMPDIR.
        author: The variables of the job and of the task.
    """
    home, tmp = variables.get("HOME", ""), variables.get("TMPDIR", "")
    written = [folder.rstrip("/") for folder in (workdir, home, tmp, *_SHARED)]
    written = [
        folder for folder in written if folder.startswith("/")
    ]  # "/" itself is excluded, because every path is below it.
    environment: dict[str, str] = {}
    for name, value in variables.items():
        if name.startswith(("BASH_FUNC_", "GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_")) or name in _SHELLS_OWN:
            continue
        if name in _PROXIES and name not in author:
            continue
        if name in _FOLDERS:
            value = _kept(value, written)
            if not value:
                continue
        elif name in _OPTIONS and any(folder in value for folder in written):
            continue
        environment[name] = value
    environment |= _ALWAYS
    environment |= {name: value for name, value in _SWITCHES.items() if name not in author}
    environment.setdefault("PATH", SYSTEM_PATH)
    return environment | {"HOME": place.home, "TMPDIR": place.tmp}


_SHELLS_OWN: Final = frozenset({"BASHOPTS", "OLDPWD", "PWD", "SHELLOPTS", "SHLVL", "_"})


def _kept(value: str, written: Iterable[str]) -> str:
    """Return those paths of a list that are absolute and to which Run could not write."""
    outside = [
        path
        for path in _SEPARATORS.split(value)
        if path.startswith("/")
        and "/../" not in f"{path}/"
        and not any(path == folder or path.startswith(f"{folder}/") for folder in written)
    ]
    return ":".join(outside)
