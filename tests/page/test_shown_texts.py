"""No view shows a character that hides or turns text, whoever chose it: policy, task, worker or server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Page, Route, expect
from rollyard_testing.browser.plane import ENDED, Plane
from rollyard_testing.browser.witness import HIDDEN, attacks_seen
from rollyard_testing.invariants import invariant

pytestmark = pytest.mark.page

SHOWN = re.compile("⟦U\\+202E⟧(\\w+)⟦U\\+200B⟧")
ID = "r-0-0"


def text(name: str) -> str:
    """Return a text that hides its name between characters that are not drawn, and ends with markup."""
    return f"\u202e{name}\u200b\x07\ufeff\u00ad\x9b<b data-attack>\"'</b>"


ATTEMPT = {
    "stage": "eval", "attempt": 1, "reason": text("attempt_reason"), "message": text("attempt_message"),
    "worker": text("attempt_worker"), "node": text("attempt_node"), "started": 1.0, "seconds": 1.0,
    "counted": True,
}  # fmt: skip
ROW = {
    "id": ID, "task_id": text("task_id"), "sample": 0, "status": "failed", "stage": None,
    "reason": text("reason"), "reward": None, "since": None, "ended_at": 2.0, "seconds": 1.0, "tokens": 2,
    "attempts": 1, "worker": text("worker"), "node": text("node"), "policy_version": text("version"),
}  # fmt: skip
JOB = {
    "namespace": "default", "name": ENDED, "uid": "u", "phase": "Run", "created_at": 1.0, "started_at": 1.0,
    "finished_at": None, "deadline_at": None, "pool": text("pool"), "suspended": False, "total": 2,
    "succeeded": 1, "failed": 1, "cancelled": 0, "stages": {}, "reward_mean": None, "late": 1.0,
    "waits_for": {"reason": text("waits_reason"), "message": text("waits_message")},
}  # fmt: skip
BACKEND = {
    "url": text("url"), "ready": True, "circuit": "closed", "weights": text("backend_weights"),
    "policy_version": text("backend_version"), "active": 0, "max_active": 1, "speed": None, "kv_hits": None,
    "message": text("backend_message"),
}  # fmt: skip
CALL = {"name": text("call"), "arguments": text("arguments")}
TURN = {"segment": 0, "start": 0, "end": 1, "model_seconds": 1.0, "tool_seconds": 1.0}
MESSAGES: list[dict[str, Any]] = [
    {"role": text("role"), "content": text("content"), "reasoning_content": text("thought"), "turn": None},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "turn": 0},
    {"role": "assistant", "content": "an example", "turn": None},
    {"role": "tool", "content": "x", "tool_call_id": text("call_id"), "turn": None},
]
ANSWERS: dict[str, Any] = {
    "/overview": {
        "time": 9.0, "phases": {}, "queues": {},
        "rates": {"bucket_seconds": 60, "start": 0.0, "rollouts": [1], "tokens": [1]},
        "pools": [
            {
                "namespace": text("pool_namespace"), "name": text("pool_name"), "model": text("model"),
                "phase": text("pool_phase"), "policy_version": text("pool_version"), "paused": True,
                "backends": [BACKEND, {**BACKEND, "url": text("second_url")}],
            }
        ],
        "nodes": [{"name": text("node_name"), "heard_at": 1.0, "workers": 2, "active": 1}],
        "workers": [
            {
                "name": text("worker_name"), "node": text("node_name"), "namespace": job and "default",
                "job": job,
                "stages": ["run", text("worker_stage")], "active": 1, "heard_at": 1.0,
                "last_error": {
                    "time": 1.0, "reason": text(f"error_{n}"), "message": text(f"lost_{n}"),
                    "rollout": ID,
                },
            }
            for n, job in enumerate((None, text("worker_job")))
        ],
    },
    "/jobs": {"items": [JOB, {**JOB, "uid": "v", "namespace": text("job_namespace")}], "metadata": {}},
    "/job": {
        "metadata": {"name": ENDED, "namespace": "default"},
        "spec": {
            "handler": text("handler"), "samplesPerTask": 2, "backendRef": {"name": text("pool_of_spec")},
        },
        "status": {
            "phase": text("phase"), "message": text("status_message"), "counts": {},
            "skippedRows": {"count": 12, "read": 99, "reasons": [text(f"skipped_{n}") for n in range(2)]},
            "advice": [{"reason": f"Reason{n}", "message": text(f"advice_{n}")} for n in range(2)],
            "conditions": [
                {"type": text(f"type_{n}"), "status": text("condition_status"), "reason": text(f"why_{n}"),
                 "message": text(f"condition_{n}")}
                for n in range(2)
            ],
        },
    },
    "/job/statistics": {
        "upto": 2,
        "rewards": {"bins": [], "min": None, "max": None, "n": 0, "mean": None, "zeros": 0, "ones": 0},
        "by_version": [{"version": text("curve"), "index": n, "n": 1, "mean": 1.0} for n in range(2)],
        "by_time": [],
        "failures": [
            {"reason": text(f"failure_{n}"), "n": 1, "stage": "run", "example": ID} for n in range(2)
        ],
        "truncated": [{"reason": text(f"cut_{n}"), "n": 1} for n in range(2)],
        "stages": {}, "model_seconds": 1.0, "tool_seconds": 1.0, "own_seconds": 1.0, "tokens": 1,
    },
    "/job/grid": {
        "items": [
            {"no": n, "task_id": text(f"group_{n}"), "state": "ended", "informative": True, "delivered": None,
             "reason": text(f"group_reason_{n}"), "mean": None, "samples": [["0", "f", None]]}
            for n in range(2)
        ],
        "metadata": {}, "prefix": "r-",
    },
    "/job/rollouts": {
        "items": [ROW, {**ROW, "id": "r-0-1", "sample": 1, "reason": text("second_reason")}], "metadata": {},
    },
    "/job/gantt": {
        "items": [
            {"id": ID, "task_id": text("drawn_task"), "sample": 0, "status": "failed", "reward": None,
             "spans": [["run", 1.0, 2.0]]}
        ],
        "metadata": {},
    },
    "/rollout/difference": {
        "segment": 0, "position": 1,
        **{
            side: {"start": 0, "ids": [1, 2, 3], "texts": [text(f"{side}_{n}") for n in range(3)]}
            for side in ("left", "right")
        },
    },
    "/rollout/messages": {"start": 0, "total": 4, "items": [
        {"characters": 9, "cut": False, **one} for one in MESSAGES
    ]},
    "/rollout/brief": {
        "id": ID, "job": ENDED, "task_id": text("task_id"), "sample_index": 0, "status": "failed",
        "reason": text("reason"), "message": text("message"), "reward": 1.0,
        "reward_components": {text("component"): 1.0, text("second_component"): -1.0},
        "reward_reason": text("reward_reason"), "reward_output": text("reward_output"),
        "sampling": {text("sampling_name"): text("sampling_value")},
        "attempts": [ATTEMPT, {**ATTEMPT, "stage": "run", "reason": text("second_attempt")}],
        "turns": [
            {**TURN, "finish_reason": text("finish_reason"),
             "tool_calls": [{"name": text("turn_call"), "error": text("call_error"), "seconds": 1.0}]}
        ],
        "backend": text("backend"), "truncated": True, "truncated_reason": text("truncated_reason"),
        "metadata": {"policy_version": text("metadata_version"), text("metadata_name"): text("metadata_text"),
                     "list": [text("metadata_list")]},
        "spans": [["run", 1.0, 2.0]], "segments": [{"prompt": 1, "response": 1}] * 2, "messages": 3,
        "trace_id": text("trace"),
    },
    "/rollout/tokens": {
        "segment": 1, "start": 0, "total": 2, "prompt": 1, "ids": [1, 2],
        "texts": [text("prompt_token"), text("token")], "texts_reason": None, "mask": [[0, 1], [1, 1]],
        "versions": [["", 1], [text("token_version"), 1]], "logprobs": [0.0, -1.0],
    },
    "/rollout/tokens of no text": {
        "segment": 0, "start": 0, "total": 2, "prompt": 1, "ids": [1, 2], "texts": None,
        "texts_reason": text("texts_reason"), "mask": [[0, 1], [1, 1]], "versions": [["", 2]],
        "logprobs": [0.0, -1.0],
    },
    "/rollout": {"id": ID, "message": text("raw"), text("raw_name"): 1},
    "/rollout/live": {
        "id": "r-1-0", "status": "leased", "stage": "run", "since": 1.0, "worker": text("live_worker"),
        "turns": [
            {"no": 0, "role": text("live_role"), "text": text("live_text"), "tokens": 1, "seconds": 1.0,
             "tool_calls": [{"name": text("live_call"), "arguments": text("live_arguments")}]}
        ],
        "dropped": 0, "watched_until": 9.0,
    },
    "/worker/rollouts": {
        "items": [{**ROW, "task_id": text("held_task"), "stage": text("held_stage"), "job": ENDED}],
        "metadata": {},
    },
}  # fmt: skip
"""What the control plane answers, with a text that hides something in each place that others fill."""

UNSEEN = {
    "curve",  # drawn on a canvas
    "pool_of_spec",  # the row of the job names its pool
    "node",  # of a rollout in a list
}
"""Names of texts that no view writes into its document."""
_DOCUMENT = """() => {
  const found = [document.title];
  for (const each of document.querySelectorAll("*")) {
    for (const one of each.attributes) found.push(`${each.tagName} ${one.name}=${one.value}`);
    for (const node of each.childNodes) if (node.nodeType === Node.TEXT_NODE) found.push(node.data);
  }
  return found;
}"""
_NO_EVENTS = "window.EventSource = class { addEventListener() {} close() {} };"


def _answer(route: Route) -> None:
    url = urlsplit(route.request.url)
    path = url.path.removeprefix("/v1")
    parts = path.split("/")
    name = path
    if path.startswith("/rolloutjobs/"):
        one = ["rollout", *parts[5:6]] if len(parts) > 4 else ["job", *parts[3:]]
        name = "/" + "/".join(one)
    elif path.startswith("/workers/"):
        name = "/worker/rollouts"
    if name == "/rollout/tokens" and "segment=0" in url.query:
        name = "/rollout/tokens of no text"
    if parts[4:5] == ["r-1-0"] and name == "/rollout/brief":
        route.fulfill(status=409, json={"reason": "NotEnded", "detail": "It has not ended."})
    elif parts[4:5] == ["r-2-0"]:
        route.fulfill(status=500, json={"reason": text("problem_reason"), "detail": text("problem")})
    elif name in ANSWERS:
        route.fulfill(body=json.dumps(ANSWERS[name]), content_type="application/json")
    else:
        route.continue_()


def _planted(value: Any) -> set[str]:
    return set(re.findall("\u202e(\\w+)\u200b", json.dumps(value, ensure_ascii=False)))


def _shown(page: Page) -> set[str]:
    """Return the names of the texts in a document, in which no character may hide or turn others."""
    lines: list[str] = page.evaluate(_DOCUMENT)
    for line in lines:
        found = HIDDEN.search(line)
        with invariant():
            assert found is None, f"{found[0]!r} in {line[:200]!r}"
    with invariant():
        assert attacks_seen(page) == []
    return set(SHOWN.findall("\n".join(lines)))


@pytest.mark.attack(
    "a row moves the cursor of a terminal, forges a line, or is markup in the page",
    boundary="control plane",
    surface="`status.skippedRows`",
    stopped_by="every reason is one line of visible characters",
)
def test_no_text_of_others_hides_what_a_view_says(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    window = look(served)
    page: Page = window.page
    page.add_init_script(_NO_EVENTS)
    page.route("**/v1/**", _answer)
    task = text("group_task")
    job, rollout = served.job(ENDED), served.rollout(ENDED, ID)
    chips = f"reason={quote(text('chip_reason'))}&task={quote(text('chip_task'))}"
    views = {
        f"{served.url}/?worker={quote(text('worker_name'))}": "held_task",
        job: "group_1",
        f"{job}?tab=rollouts&{chips}": "second_reason",
        f"{job}?tab=gantt": "drawn_task",
        served.group(ENDED, task): "right_2",
        rollout: "call_id",
        f"{rollout}?tab=tokens&segment=1&token=1": "token_version",
        f"{rollout}?tab=timeline": "second_attempt",
        f"{rollout}?tab=eval": "metadata_list",
        f"{rollout}?tab=raw": "raw_name",
        served.rollout(ENDED, "r-1-0"): "live_arguments",
        served.rollout(ENDED, "r-2-0"): "problem",
    }
    seen: set[str] = set()
    for url, last in views.items():
        window.at(url)
        page.wait_for_function("name => document.body.textContent.includes(`U+202E⟧${name}⟦`)", arg=last)
        expect(page.locator(".waiting:not(:empty)")).to_have_count(0)
        seen |= _shown(page)
    assert _planted(ANSWERS) - seen == UNSEEN
    assert {"chip_reason", "chip_task", "group_task", "problem"} <= seen
    # A reader can distinguish what the task holds from what the policy sampled.
    window.at(rollout)
    expect(page.get_by_role("article").filter(has_text="given by the task")).to_contain_text(["an example"])
    page.unroute_all(behavior="wait")
