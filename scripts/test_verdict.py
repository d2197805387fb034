"""How a run of tests has ended: what failed, what is flaky, what was not run, and where the time went."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

from rollyard_testing.levels import PARTS, QUICK_SECONDS, durations

FOLDER: Final = Path("build/tests")
"""It has what GitHub keeps (`flaky.txt`), a file for each part of `all` that has passed with a tree, and the
durations of this run, which may take the place of tests/durations.json.
"""
ALL_PARTS: Final = ("static", "quick", *sorted(set(PARTS) - {"static"}))
NEVER_REPEATED: Final = ("static", "demos")
MOST_FLAKY: Final = 4
INTERRUPTED: Final = 130
"""The exit status of a run that a person has ended."""
Row = dict[str, Any]


def read(path: Path, status: int) -> list[Row]:
    """Return the lines of an outcome file, and what its run's exit status says beside them."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows: list[Row] = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append(a_problem(f"{path.stem}: an outcome was cut off: {line[:100]}"))
    # The statuses 0 and 5 stand for good and for no tests, and 1 for tests that failed or were not collected.
    if status not in (0, 1, 5) or (status == 1 and all(row["outcome"] != "failed" for row in rows)):
        rows.append(a_problem(f"{path.stem}: pytest ended with status {status}"))
    return rows


def a_problem(text: str) -> Row:
    """Return the outcome of a run that went wrong as a whole."""
    return {
        "id": text,
        "part": "run",
        "outcome": "failed",
        "when": "run",
        "text": text,
        "broken": False,
        "seconds": 0.0,
        "processor": 0.0,
        "cause": text,
    }


def _tree() -> str:
    """Return a name of what the working tree holds, or nothing where git does not know it."""
    words = ("rev-parse HEAD", "diff HEAD", "ls-files --others --exclude-standard")
    done = [subprocess.run(["git", *each.split()], capture_output=True) for each in words]
    if any(each.returncode for each in done):
        return ""
    new = [path for path in done[2].stdout.decode().splitlines() if Path(path).is_file()]
    texts = [*(each.stdout for each in done), *(Path(path).read_bytes() for path in new)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def passed_before(part: str) -> bool:
    """Return whether a part of `all` has passed with this very tree."""
    path = FOLDER / f"{part}.passed"
    return path.exists() and path.read_text() == _tree() != ""


class Verdict:
    """How the tests of one run have ended."""

    def __init__(self, rows: list[Row], seconds: float) -> None:
        self._rows = rows
        self._seconds = seconds
        self._again: dict[str, Row] = {}

    def add(self, again: Verdict) -> None:
        """Add how tests ended that were run once more."""
        self._again |= {row["id"]: row for row in again._rows}
        self._seconds += again._seconds

    def to_repeat(self) -> dict[str, list[str]]:
        """Return the tests to run once more, by who runs them; none if the run has failed anyway."""
        failed = self._failed()
        if len(_causes(failed)) > MOST_FLAKY or any(_final(row) for row in failed):
            return {}
        ids = defaultdict(list)
        for row in failed:
            ids["apptainer" if row["part"] == "apptainer" else "main"].append(row["id"])
        return dict(ids)

    def report(self, part: str = "") -> int:
        """Print everything, the flaky tests last, and return the exit status; note the part if it passed."""
        failed, flaky = [], []
        for row in self._failed():
            again = self._again.get(row["id"])
            (flaky if again and again["outcome"] == "passed" and not _final(row) else failed).append(row)
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._print_not_run()
        self._print_times()
        for row in failed:
            what = "an invariant is broken" if row["broken"] else "failed"
            twice = ", twice" if row["id"] in self._again else ""
            print(f"\n{'=' * 20} {what}{twice}: {row['id']}\n{row['text']}\n{row.get('output', '')}")
        counts = Counter(row["outcome"] for row in self._rows if row["part"] != "run")
        too_many = len(_causes(flaky)) > MOST_FLAKY
        print("".join(f"\nFAILED {row['id']}" for row in failed))
        passed = counts["passed"] + len(flaky)
        print(f"\n{passed} passed, {len(failed)} failed, {counts['skipped']} skipped\n")
        self._print_flaky(flaky, too_many)
        self._write_durations()
        if part and not failed and not too_many:
            (FOLDER / f"{part}.passed").write_text(_tree())
        if any("KeyboardInterrupt" in row["text"] for row in failed if row["part"] == "run"):
            return INTERRUPTED
        return 1 if failed or too_many or not passed else 0

    def _failed(self) -> list[Row]:
        return [row for row in self._rows if row["outcome"] == "failed"]

    def _write_durations(self) -> None:
        seconds = dict(durations())
        for row in self._rows:
            if row["outcome"] == "passed":
                seconds[row["id"]] = round(row["call"], 1)
        long = {name: seconds[name] for name in sorted(seconds) if seconds[name] > QUICK_SECONDS}
        (FOLDER / "durations.json").write_text(json.dumps(long, indent=0) + "\n")

    def _print_not_run(self) -> None:
        reasons = Counter((row["part"], row["text"]) for row in self._rows if row["outcome"] == "skipped")
        print("\nNot run:" if reasons else "\nEverything was run.")
        for (part, reason), count in reasons.most_common():
            print(f"{count:6} of {part}: {reason}")

    def _print_times(self) -> None:
        print("\nTime of each part: tests, minutes one after the other, minutes of processor time")
        parts = defaultdict(list)
        for row in self._rows:
            parts[row["part"]].append(row)
        for part, rows in sorted(parts.items(), key=lambda pair: -sum(row["seconds"] for row in pair[1])):
            minutes, processor = (sum(row[name] for row in rows) / 60 for name in ("seconds", "processor"))
            print(f"{part:>12} {len(rows):6} {minutes:7.1f} {processor:7.1f}")
        print(f"{self._seconds / 60:.1f} minutes in all, on {os.cpu_count()} cores")

    def _print_flaky(self, flaky: list[Row], too_many: bool) -> None:
        lines = []
        for row in flaky:
            lines += [f"{'=' * 20} flaky: {row['id']}", row["text"], row.get("output", "")]
        lines += [f"FLAKY {row['id']}: it failed, and passed when it was run once more" for row in flaky]
        if too_many:
            lines.append(f"More than {MOST_FLAKY} tests are flaky, which fails the run.")
        (FOLDER / "flaky.txt").write_text("".join(f"{line}\n" for line in lines))
        print("\n".join(lines) or "No test was flaky.")


def _final(row: Row) -> bool:
    """Return whether no second run could excuse a failure."""
    return bool(row["broken"]) or row["part"] in (*NEVER_REPEATED, "run")


def _causes(rows: list[Row]) -> set[str]:
    """Return what failed: each test, but the errors of one fixture count once."""
    return {row["cause"] if row["when"] == "setup" else row["id"] for row in rows}
