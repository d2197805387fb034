"""A harness for sandboxes of which nothing is known but that they have bash."""

from __future__ import annotations

from typing import Any

_ASK = r"""
export LC_ALL=C  # Lengths are bytes.
IFS=/ read -r _ _ address _ <<< "$OPENAI_BASE_URL"
body="{\"model\": \"$OPENAI_MODEL\", \"messages\": $(cat "$ROLLYARD_HARNESS/messages.json")}"
exec 3<> "/dev/tcp/${address/://}"
printf '%s\r\n' "POST /v1/chat/completions HTTP/1.1" "Host: $address" "Connection: close" \
  "Authorization: Bearer $OPENAI_API_KEY" "Content-Type: application/json" \
  "Content-Length: ${#body}" "" >&3
printf '%s' "$body" >&3
cat <&3
"""


def bash_harness() -> dict[str, Any]:
    """Return an agent whose harness asks the model once, and prints the answer with its head."""
    return {
        "type": "harness",
        "harness": "command",
        "command": 'bash "$ROLLYARD_HARNESS/ask.sh"',
        "files": {"ask.sh": _ASK},
        "maxContextTokens": 1024,
    }


def asked_once(trajectory: dict[str, Any]) -> None:
    """Check the trajectory of such a harness: one turn was sampled, and it got the answer."""
    assert trajectory["status"] == "succeeded", trajectory["message"]
    assert trajectory["harness"]["exit_code"] == 0, trajectory["harness"]
    assert "200 OK" in trajectory["harness"]["output"]
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant"]
    (segment,) = trajectory["segments"]
    (turn,) = trajectory["turns"]
    assert sum(segment["loss_mask"]) == turn["end"] - turn["start"] > 0
