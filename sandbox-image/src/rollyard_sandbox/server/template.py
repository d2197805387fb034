"""The template of sandboxes: a process that has loaded the exec server and forks into one for each sandbox.

Loading the interpreter and its modules takes most of the time of a cold start, and every sandbox over the
same root folder begins with the same ones. A template runs no command and learns no secret. Each request of
the worker brings the descriptors of one sandbox, among them a pipe with its secret, which only the forked
process reads. A forked process keeps no other descriptor, has namespaces of its own (`forked_sandbox`), and
is no descendant of the template in any of them: the end of a template harms no sandbox.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys

from rollyard_sandbox import proof
from rollyard_sandbox.isolation import forked_sandbox
from rollyard_sandbox.isolation.command_namespaces import ROOT_KEEPS, NamespaceOptions, first_program
from rollyard_sandbox.isolation.protections import FAILED, NOT_CONFINED
from rollyard_sandbox.isolation.system_calls import libc
from rollyard_sandbox.server.exec_server import serve
from rollyard_sandbox.server.options import ServerOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

_MAX_REQUEST: Final = 64 * 1024  # bytes
_MAX_DESCRIPTORS: Final = 32
# What every sandbox calls in the C library.
_FUNCTIONS: Final = (
    "capset",
    "clone",
    "mount",
    "pause",
    "prctl",
    "pthread_sigmask",
    "setns",
    "signalfd",
    "timerfd_create",
    "timerfd_settime",
    "umount2",
    "unshare",
)
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36


def run(control: int, ready: int, spare: str) -> int:
    """Serve the requests that come from the worker until it closes its end, and return the exit status.

    Args:
        control: A Unix socket (SOCK_SEQPACKET). Each message on it is one request: a JSON object with the
            fields that `_be_sandbox` reads, and the sandbox's descriptors.
        ready: The descriptor to which one byte is written when requests can come.
        spare: An existing folder on which nothing is mounted.
    """
    try:
        forks = forked_sandbox.Forks()
        forked_sandbox.replace_proc(spare)
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr)
        return FAILED
    libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    libc().prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _load()
    requests = socket.socket(fileno=control)
    requests.set_inheritable(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    os.write(ready, b"+")
    os.close(ready)
    gc.collect()
    gc.freeze()  # Collections in forked processes then leave the shared pages alone.
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not message:
            return 0
        _fork(forks, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _load() -> None:
    """Import and prepare what every server otherwise imports and prepares when it first needs it."""
    import codecs
    import shutil  # noqa: F401

    import ptyprocess  # noqa: F401

    import rollyard_sandbox.execution.programs  # noqa: F401
    from rollyard_sandbox.isolation import seccomp, syscalls, system_calls

    codecs.lookup("ascii")
    seccomp.program(os.uname().machine)
    system_calls.starter()
    for name in _FUNCTIONS:
        getattr(libc(), name)
    for capabilities in (frozenset[int](), ROOT_KEEPS):
        syscalls.dropped_rights(capabilities)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _fork(forks: forked_sandbox.Forks, request: dict[str, Any], descriptors: list[int]) -> None:
    """Fork a sandbox and name its process 1 to the worker, or write the reason why there is none."""
    _, _, info, log, *_ = descriptors
    try:
        first_program(tuple(request["namespaces"]["hidden"]))  # All sandboxes of a template have the same.
        child = forks.fork()
    except OSError as error:
        os.write(log, f"{NOT_CONFINED}: {error}\n".encode())
        return
    if child == 0:
        _be_sandbox(request, descriptors)
    os.write(info, json.dumps({"child-pid": child}).encode())


def _be_sandbox(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become the exec server of a new sandbox, in its process 1.

    Args:
        request: The fields `sizes` (see `forked_sandbox.confine`), `limits` (a list of resource limits: their
            numbers in `resource` and their values), `workdir`, `lease` in seconds, `namespaces`, which
            holds the arguments of NamespaceOptions, and `yielding` (see ServerOptions).
        descriptors: The listening socket; the pipe for the line that the server is ready; the pipe for the
            number of process 1; the file for standard output and error; the pipe with the secret; and for
            each control group an open file with which a process joins it.
    """
    status = FAILED
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listen, ready, _, log, secret, *groups = descriptors
        os.dup2(log, 1)
        os.dup2(log, 2)
        for group in groups:
            os.write(group, b"0")  # This stands for the writing process.
        open_descriptors = {0, 1, 2, listen, ready, secret}
        _close_all_but(open_descriptors)
        # A program that has just started may look at its children. The server's protections end this.
        libc().prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        forked_sandbox.confine(request["sizes"])
        secret_bytes = proof.read_secret(secret)
        os.chdir(request["workdir"])
        for number, limit in request["limits"]:
            resource.setrlimit(number, (limit, limit))
        status = serve(
            ServerOptions(
                listen=[f"fd:{listen}"],
                ready_fd=ready,
                workdir=request["workdir"],
                lease=request["lease"],
                own_pid_namespace=True,
                secret=secret_bytes,
                namespaces=NamespaceOptions(**request["namespaces"]),
                yielding=request["yielding"],
            )
        )
    except OSError as error:
        print(f"{NOT_CONFINED}: {error}", file=sys.stderr, flush=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close_all_but(descriptors: set[int]) -> None:
    first = 0
    for descriptor in (*sorted(descriptors), os.sysconf("SC_OPEN_MAX")):
        if descriptor > first:  # An empty range from 0 means all descriptors in some releases of Python.
            os.closerange(first, descriptor)
        first = descriptor + 1
