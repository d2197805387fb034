"""The installer's lists: which URLs the control plane reads for jobs, and which hosts sandboxes may reach.

Nothing here reads or connects. `source_readers` does, and asks this module about every file that it has
opened, every address to which it is about to connect, and every redirect.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal, Self
from urllib.parse import unquote, urlsplit

from rollyard_crds.fields.allowed_hosts import HostRule, installers_rule
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid

FIELD: Final = "spec.tasks.url"
NAMESPACE: Final = "{namespace}"
"""The placeholder for the job's namespace in a prefix of the list."""
_BUCKETS: Final = ("abfs", "abfss", "adl", "az", "gcs", "gs", "obs", "oci", "oss", "s3", "s3a", "tos")
"""The schemes of object stores that may be listed. fsspec reads them with the server's credentials."""
_PORTS: Final = {"http": 80, "https": 443}
_NEVER: Final = ("/proc", "/sys", "/dev")
"""The folders of the kernel, in which no file is a task list."""
_BLOB: Final = re.compile(r"blob:sha256:([0-9a-f]{64})")
_HOST: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.(?!-)[a-z0-9-]{1,63})*")
_SHOWN: Final = 300
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Kind = Literal["file", "web", "bucket"]


@dataclass(frozen=True, slots=True)
class Location:
    """The parts of a URL. Two URLs that name the same place in different ways need not be equal."""

    scheme: str
    authority: str
    """The host and port, or the bucket. It is empty for files."""
    path: str
    """The path, which begins with a slash. The path of a file is decoded."""
    query: str = ""

    @property
    def kind(self) -> Kind:
        """The kind of the source: a file, a web server or a bucket."""
        return "file" if self.scheme == "file" else "web" if self.scheme in _PORTS else "bucket"

    @property
    def host(self) -> str:
        """The host of a web server: its name or its address, without brackets."""
        return self.authority.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of a web server."""
        return int(self.authority.rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Source:
    """A URL that the list contains."""

    url: str
    location: Location
    prefix: Location
    """The entry of the list that contains the URL, with the namespace filled in."""


def shown(url: str) -> str:
    """Return a URL for a message, with a bounded length and without characters that could begin a line."""
    text = url if url.isprintable() else repr(url)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def blob_of(url: str) -> str | None:
    """Return the SHA-256 that `blob:sha256:HEX` names, or None for every other URL.

    Raises:
        Invalid: The URL begins with `blob:` and is not of that form.
    """
    if not url.startswith("blob:"):
        return None
    match = _BLOB.fullmatch(url)
    if match is None:
        raise Invalid.of(
            f"{FIELD}: {shown(url)}: must be blob:sha256: and 64 lower-case hexadecimal digits",
            reason="InvalidTasks",
        )
    return match.group(1)


def parse(url: str) -> Location:
    """Split a URL into its parts; a path that begins with a slash names a file.

    Raises:
        ValueError: The parts could be read in more than one way, or the URL contains credentials.
    """
    if not url.isprintable() or "\\" in url or url != url.strip():
        raise ValueError("control characters, backslashes and spaces at an end are not allowed")
    if "::" in url:
        raise ValueError("chained URLs are not allowed")
    scheme, separator, rest = url.partition("://")
    if not separator:
        if url.startswith("/"):
            return Location("file", "", _steps(url))
        raise ValueError("it is not a URL with '://'")
    scheme = scheme.lower()
    if scheme == "file":
        if not rest.startswith(("/", "localhost/")):
            raise ValueError("a file has an absolute path and no host: file:///path")
        return Location(scheme, "", _steps(unquote(rest.removeprefix("localhost"))))
    if scheme in _PORTS:
        return _web(scheme, url)
    bucket, _, key = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9._@-]+", bucket) or any(letter in key for letter in "?#*[]"):
        raise ValueError("a bucket's URL is scheme://bucket/key, without any of ?#*[]")
    return Location(scheme, bucket, _steps(f"/{key}"))


def _steps(path: str) -> str:
    """Return the path, which must not have `.`, `..` or empty steps: programs resolve these differently.

    Raises:
        ValueError: The path has such a step, or a null character.
    """
    if "\0" in path or any(step in (".", "..") for step in path.split("/")) or "//" in path:
        raise ValueError("a path must not hold '.', '..' or empty steps")
    return path


def _web(scheme: str, url: str) -> Location:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[scheme]
    except ValueError as error:
        raise ValueError("its host or port is malformed") from error
    if "@" in parts.netloc:
        raise ValueError("credentials in a URL are not allowed")
    if parts.fragment or "#" in url:
        raise ValueError("fragments are not allowed")
    if ":" in host:
        try:
            host = f"[{ipaddress.IPv6Address(host).compressed}]"
        except ValueError as error:
            raise ValueError("its host is not an IPv6 address") from error
        if "%" in host:
            raise ValueError("zones of IPv6 addresses are not allowed")
    elif _HOST.fullmatch(host.removesuffix(".")) is None:
        raise ValueError("its host must be a DNS name in ASCII or an address")
    path = parts.path or "/"
    if not url.isascii():
        raise ValueError("letters beyond ASCII must be percent-encoded")
    # Different servers read percent-encoded slashes and dots as different steps.
    if any(code in path.lower() for code in ("%2e", "%2f", "%5c", "%00", ";")):
        raise ValueError("encoded dots, slashes and backslashes, and ';', are not allowed in a path")
    return Location(scheme, f"{host.removesuffix('.')}:{port}", _steps(path), parts.query)


def _prefix(text: str, schemes: Sequence[str]) -> Location:
    """Return an entry of the list, as it is written in `text`, which must have one of these schemes.

    Raises:
        OptionInvalid: The entry cannot be used.
    """
    try:
        location = parse(text)
    except ValueError as error:
        raise OptionInvalid(f"{text!r}: {error}") from error
    if location.scheme not in schemes:
        raise OptionInvalid(f"{text!r}: the scheme must be one of {', '.join(schemes)}")
    if location.query:
        raise OptionInvalid(f"{text!r}: a prefix has no query")
    if NAMESPACE in location.authority or re.search(r"[{}]", location.path.replace(NAMESPACE, "")):
        raise OptionInvalid(f"{text!r}: {NAMESPACE} may stand in the path, and no other braces")
    return location


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise OptionInvalid(f"{text!r}: must be a network such as 10.0.0.0/8 ({error})") from error


@dataclass(frozen=True, slots=True)
class AllowList:
    """The sources that the installer allows jobs to name. An empty list allows uploads only."""

    prefixes: tuple[Location, ...] = ()
    networks: tuple[Network, ...] = ()
    """The networks in which hosts of the list may be, in addition to public addresses."""
    kept: tuple[Path, ...] = ()
    """The control plane's own files and folders, to which no entry gives access."""
    schemes: ClassVar[Sequence[str]] = ("file", *_PORTS, *_BUCKETS)
    """The schemes of URLs that may be listed."""
    server: ClassVar[str] = "the server"
    """What messages call the other side of a connection."""
    field: ClassVar[str] = FIELD
    """The field of a job that names a source."""
    refused: ClassVar[str] = "TasksNotAllowed"
    """The reason of the error for a source that the list does not contain."""
    always: ClassVar[Sequence[str]] = ("uploads (`rollyard submit` makes one of a local file)",)
    """What a job may name although no entry contains it, for messages."""

    @classmethod
    def of(cls, prefixes: Sequence[str], networks: Sequence[str] = (), kept: Sequence[Path] = ()) -> Self:
        """Return the list as it is written on a command line.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        listed = tuple(_prefix(text, cls.schemes) for text in prefixes)
        return cls(listed, tuple(map(_network, networks)), tuple(kept))

    def source(self, url: str, namespace: str) -> Source:
        """Return the source for a URL that a job of this namespace names, if the list contains it.

        Raises:
            Invalid: The list does not contain it. Whether the source exists makes no difference.
        """
        try:
            location = parse(url)
        except ValueError as error:
            raise self.refusal(url, str(error)) from error
        for entry in self.prefixes:
            prefix = Location(entry.scheme, entry.authority, entry.path.replace(NAMESPACE, namespace))
            same = prefix.scheme == location.scheme and prefix.authority == location.authority
            if same and _beneath(location.path, prefix.path):
                return Source(url, location, prefix)
        raise self.refusal(url)

    def refusal(self, url: str, why: str = "") -> Invalid:
        """Return the error for a URL that the list does not contain."""
        entries = (
            f"{prefix.scheme}://{prefix.authority.removesuffix(f':{_PORTS.get(prefix.scheme)}')}{prefix.path}"
            for prefix in self.prefixes
        )
        allowed = ", ".join((*self.always, *entries)) or "no URLs at all"
        return Invalid.of(
            f"{self.field}: {shown(url)} cannot be used: {why or 'the installer does not allow it'}; "
            f"allowed are {allowed}",
            reason=self.refused,
        )

    def permits_file(self, source: Source, real: str) -> bool:
        """Return whether the file that was opened for a source may be read.

        Args:
            source: The source as the method `source` returned it.
            real: The path of the opened file without symbolic links, as the kernel reports it.
        """
        own = [os.path.realpath(path) for path in self.kept]
        if any(_beneath(real, folder) for folder in (*own, *_NEVER)):
            return False
        return _beneath(real, os.path.realpath(source.prefix.path))

    def permits_address(self, source: Source, address: Address) -> bool:
        """Return whether the control plane may connect to an address of a source's host.

        Public addresses are permitted, as are addresses in `networks` and an address that the list itself
        gives instead of a name. An IPv4 address inside an IPv6 address counts as itself.
        """
        address = _plain(address)
        if any(address in network for network in self.networks if network.version == address.version):
            return True
        if source.prefix.host == address.compressed:
            return True
        return address.is_global and not (address.is_multicast or address.is_reserved)


def _plain(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder if folder.endswith("/") else f"{folder}/")


@dataclass(frozen=True, slots=True)
class _List:
    """One list of the installer. An empty one allows no host."""

    option: str
    field: str
    """The field of a job to which it applies."""
    patterns: tuple[str, ...]
    rules: tuple[HostRule, ...]

    @classmethod
    def of(cls, option: str, field: str, patterns: Sequence[str]) -> _List:
        try:
            return cls(option, field, tuple(patterns), tuple(installers_rule(text) for text in patterns))
        except ValueError as error:
            raise OptionInvalid(str(error)) from error

    def problems(self, hosts: Sequence[str]) -> list[str]:
        """Return a problem for each host of a job that no entry contains."""
        # The author need not know where a host is.
        shown = ", ".join(dict.fromkeys(text.partition("=")[0] for text in self.patterns))
        allowed = shown or f"none; `{self.option}` of the control plane names some"
        return [
            f"{self.field}[{index}]: {text} is not allowed by the installer; allowed hosts: {allowed}"
            for index, text in enumerate(hosts)
            if not any(rule.contains(HostRule.parse(text)) for rule in self.rules)
        ]


@dataclass(frozen=True, slots=True)
class SandboxHosts:
    """The hosts that the installer allows jobs to open to their sandboxes: in Init and Run, and in Eval."""

    sandbox: _List
    evaluation: _List

    @classmethod
    def of(cls, sandbox: Sequence[str], evaluation: Sequence[str]) -> SandboxHosts:
        """Return the lists as they are written on a command line.

        Raises:
            OptionInvalid: An entry cannot be used.
        """
        return cls(
            _List.of("--allow-sandbox-host", "spec.sandbox.allowedHosts", sandbox),
            _List.of("--allow-eval-host", "spec.stages.eval.allowedHosts", evaluation),
        )

    @property
    def pinned(self) -> list[str]:
        """The entries that let a host have an address that is not public."""
        patterns = dict.fromkeys((*self.sandbox.patterns, *self.evaluation.patterns))
        return [text for text in patterns if "=" in text]

    def check(self, spec: RolloutJobSpec) -> None:
        """Check that one entry of the right list contains each host of a job.

        Raises:
            Invalid: Some hosts are in no entry; `errors` names each, and the reason is HostsNotAllowed.
        """
        problems = self.sandbox.problems(spec.sandbox.allowed_hosts or ())
        problems += self.evaluation.problems(spec.stages.eval.allowed_hosts or ())
        if problems:
            raise Invalid.of(*problems, reason="HostsNotAllowed")
