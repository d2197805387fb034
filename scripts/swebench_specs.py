#!/usr/bin/env python3
"""Write the file that `tasks.specs` needs for rows from before SWE-bench 5.

Run it once with the Python of an environment in which swebench 4 is installed, which knows how the tests of
each repository and version run:

    python3 -m venv /tmp/swebench && /tmp/swebench/bin/pip install "swebench<5"
    /tmp/swebench/bin/python scripts/swebench_specs.py specs.json
"""

import argparse
import json
import sys
from typing import Any

KEPT = ("test_cmd", "eval_commands", "install")
"""What the specs of a version say about running its tests. The rest is about building its image."""


def specs_of(versions: dict[str, Any], parsers: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the file, from swebench's two tables by repository."""
    repos = {}
    for repo, each in sorted(versions.items()):
        parser = getattr(parsers.get(repo), "__name__", "")
        known = {
            str(version): {name: _plain(name, spec[name]) for name in KEPT if spec.get(name)}
            for version, spec in each.items()
            if spec.get("test_cmd")
        }
        if parser and known:
            repos[repo] = {"log_parser": parser, "versions": known}
    return {"repos": repos}


def _plain(name: str, value: Any) -> Any:
    if name == "eval_commands":
        return [value] if isinstance(value, str) else list(value)
    return " && ".join(value) if isinstance(value, list) else str(value)


def main() -> int:
    """Write the file, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", help="where to write")
    options = parser.parse_args()
    try:
        from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS as versions
        from swebench.harness.log_parsers import MAP_REPO_TO_PARSER as parsers
    except ImportError as error:
        print(f'swebench 4 is not installed here ({error}): pip install "swebench<5"', file=sys.stderr)
        return 1
    specs = specs_of(versions, parsers)
    with open(options.file, "w", encoding="utf-8") as file:
        json.dump(specs, file, indent=1, sort_keys=True)
    print(f"{options.file}: {sum(len(each['versions']) for each in specs['repos'].values())} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
