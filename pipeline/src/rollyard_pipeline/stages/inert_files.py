"""Which of Run's files get into a sandbox of Eval that has a network, and which stay behind.

Hidden tests fetch their tools there. Nothing from Run may decide where from, or what runs before and while
they do so. A file therefore comes over as data: without permission to be executed, and not where one of its
names begins with a dot or is that of a file or folder that package managers, their build tools and
interpreters read without being asked. What the test itself names and runs is the test's own decision. This
module is pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from rollyard_pipeline.handlers.tables import words

_NAMES: Final = frozenset(
    name.encode()
    for name in words(
        # Folders of modules, in which interpreters and package managers look for code.
        "buildsrc dist-packages node_modules site-packages vendor __pycache__ __pypackages__",
        # Code that Python and pytest load without being asked.
        "conftest.py sitecustomize.py usercustomize.py pyvenv.cfg",
        # Settings and manifests of package managers and of the tools that they start. A manifest names what
        # else is fetched, from where, and which scripts then run.
        "binding.gyp bun.lock bun.lockb bunfig.toml buildout.cfg build.gradle build.gradle.kts",
        "cargo.lock cargo.toml composer.json composer.lock condarc deno.json deno.jsonc deno.lock",
        "directory.build.props directory.build.targets directory.packages.props environment.yaml",
        "environment.yml gemfile gemfile.lock gems.locked gems.rb global.json go.mod go.sum go.work",
        "gradle.properties gradle-wrapper.jar gradle-wrapper.properties hatch.toml lerna.json",
        "libs.versions.toml mise.toml noxfile.py npm-shrinkwrap.json nuget.config package-lock.json",
        "package.json package.json5 package.yaml packages.lock.json pdm.lock pdm.toml pip.conf pip.ini",
        "pipfile pipfile.lock pixi.lock pixi.toml pnpm-lock.yaml pnpm-workspace.yaml pnpmfile.js",
        "poetry.lock poetry.toml pom.xml pylock.toml pyproject.toml pytest.ini pytest.toml",
        "rust-toolchain rust-toolchain.toml settings.gradle settings.gradle.kts setup.cfg tox.ini",
        "tox.toml uv.lock uv.toml yarn.lock",
        # The same under the names that they have in a home folder or in /etc, without a dot.
        "_curlrc _netrc curlrc gitconfig netrc npmrc wgetrc",
    )
)
_PATTERNS: Final = re.compile(rb".*\.(pth|egg-link|gem)|(apt\.conf|sources\.list).*", re.DOTALL)
_SYSTEM: Final = re.compile(
    r"/(bin|boot|dev|etc|lib(32|64|exec|x32)?|proc|run|sbin|sys|usr(?!/src(/|$)))(/.*)?"
)
_SHOWN: Final = 8
_SHOWN_LENGTH: Final = 60


def read_by_itself(path: bytes) -> bool:
    """Return whether a path stays behind, which is relative to the folder that comes over.

    The empty path, of a file that the task or the job itself names, does not.
    """
    return any(
        name.startswith(b".") or name in _NAMES or _PATTERNS.fullmatch(name) is not None
        for name in path.lower().split(b"/")
    )


def of_the_system(path: str) -> bool:
    """Return whether an absolute path is in a folder that is searched for programs or their settings."""
    return _SYSTEM.fullmatch(path) is not None


@dataclass(slots=True)
class LeftBehind:
    """The files of Run that a carry has left behind."""

    count: int = 0
    """The number of files and folders that did not come over."""
    names: list[str] = field(default_factory=list)
    """The first of them."""
    executable: int = 0
    """The number of files that came over without the permission to be executed."""

    def add(self, path: bytes) -> None:
        """Count a file or folder that does not come over."""
        self.count += 1
        if len(self.names) < _SHOWN:
            self.names.append(ascii(path[-_SHOWN_LENGTH:].decode("utf-8", "backslashreplace"))[1:-1])

    def __str__(self) -> str:
        """Return what people read about it, or "" if nothing was left behind."""
        sentences = []
        if self.count:
            named = ", ".join(self.names) + (", …" if self.count > len(self.names) else "")
            sentences.append(f"{self.count} files and folders of the policy stayed behind ({named})")
        if self.executable:
            sentences.append(f"{self.executable} files lost the permission to be executed")
        words = f"Because Eval has a network: {'; '.join(sentences)}." if sentences else ""
        return words and f"{words} See docs/sandbox-network.md."
