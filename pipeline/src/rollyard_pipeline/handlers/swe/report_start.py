"""What Python runs before anything else where a repository's tests are run: `encodings` and `sitecustomize`.

Eval writes this file under both names into a folder that comes first in PYTHONPATH. `encodings` is the first
module that Python imports, before any code of the repository can have run. This one takes all other folders
of PYTHONPATH out of the search, so that no module in them hides one of the standard library, and makes way
for the real module. `sitecustomize` comes next. Where the process is about to run pytest, it begins the
report, and then the folders come back. It is for Python 3.5 and later.
"""

import sys

_NAMES = (b"pytest", b"py.test", b"pytest-3", b"py.test-3")


def _as_encodings(own: str) -> None:
    import posix

    count = posix.environ.get(b"PYTHONPATH", b"").count(b":") + 1
    sys.rollyard_path = [path for path in sys.path[:count] if path != own]  # type: ignore[attr-defined]
    del sys.path[:count]
    del sys.modules["encodings"]
    import encodings  # noqa: F401

    sys.path.insert(0, own)


def program_of(words: "list[bytes]") -> "list[bytes]":
    """Return the module or script that an interpreter runs, and its arguments, all without their folders."""
    words = list(words[1:])
    while words and words[0].startswith(b"-"):
        option = words.pop(0)
        if option.startswith(b"-c"):
            return []
        if option.endswith(b"m") and not option.startswith(b"--"):
            break
        if option.startswith(b"-m"):
            words.insert(0, option[2:])
            break
        if option in (b"-W", b"-X", b"--check-hash-based-pycs"):
            del words[:1]
    return [word.rpartition(b"/")[2] for word in words]


def _runs_pytest() -> bool:
    with open("/proc/self/cmdline", "rb") as file:
        words = program_of(file.read().split(b"\0")[:-1])
    if b"--version" in words or b"--help" in words:
        return False
    return bool(words) and (words[0] in _NAMES or (words[0] == b"coverage" and b"pytest" in words))


def _as_sitecustomize(own: str) -> None:
    others = sys.__dict__.pop("rollyard_path", [])
    while own in sys.path:
        sys.path.remove(own)
    try:
        if _runs_pytest():
            import builtins

            path = own + "/rollyard_report.py"
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            # What the repository does to `builtins` has no effect there.
            names = {"__builtins__": dict(vars(builtins)), "__name__": "rollyard_report"}
            exec(code, names)
            names["begin"](own, others)  # type: ignore[operator]
    except Exception as error:
        sys.stderr.write("the report of the tests cannot be made: " + repr(error) + "\n")
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        sys.modules["sitecustomize"] = this
    sys.path[0:0] = others


if __name__ == "encodings":
    _as_encodings(__file__[: -len("/encodings/__init__.py")])
elif __name__ == "sitecustomize":
    _as_sitecustomize(__file__[: -len("/sitecustomize.py")])
