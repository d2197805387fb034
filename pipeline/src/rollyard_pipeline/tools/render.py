"""The text of a command's result for the model. Policies are trained on this text, so it is fixed."""

from __future__ import annotations

from rollyard_sandbox.client import ExecResult


def render_result(result: ExecResult, timeout: float) -> str:
    """Return the output without trailing newlines, followed by a note about the exit.

    The note is `(no output)` for silent success, `[exit code N]` for failure, `[timed out after N s]` at the
    limit, and `[shell restarted]` if the session's shell had to be replaced.
    """
    # An interrupted terminal adds a carriage return.
    output = result.text().rstrip("\r\n")
    notes: list[str] = []
    if result.timed_out:
        notes.append(f"[timed out after {timeout:g} s]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.shell_restarted:
        notes.append("[shell restarted]")
    return "\n".join(part for part in (output, *notes) if part) or "(no output)"
