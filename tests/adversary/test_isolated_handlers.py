"""The connection between a worker and the process of a handler, which a policy's texts pass through.

What comes from that process is JSON and checked. Whatever it is, the worker keeps its other rollouts.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import StageFailure, StageResult
from rollyard_crds.task import Message
from rollyard_crds.trajectory import Transcript
from rollyard_sandbox.frames import encode
from rollyard_testing.page.attacks import TEXTS
from rollyard_testing.pipeline.installed import install_handler
from rollyard_testing.pipeline.workerlab import Plane, lease, spec, working
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handlers of packages")


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def evaluated(number: int, text: str) -> Any:
    """Return the lease of an Eval, whose policy has said `text`."""
    said = Transcript(
        id=f"r{number}", job="j", task_id="t", group_id="g", sample_index=0,
        messages=[Message(role="assistant", content=text)],
    )  # fmt: skip
    return lease(number, "eval", trajectory=said)


PASSING = """
import logging

class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        text = ctx.final_text
        logging.getLogger("judge").warning("%s", text)
        ctx.show(text)
        ctx.carry["text"] = text
        ctx.show("\\udc80\\ud800")
        if ctx.rollout == "r1":
            raise ValueError(text + "\\ud800")
        return Evaluation(0.5, {}, "")
"""


@pytest.mark.attack(
    "a policy's text reaches the handler's process and comes back as what the worker obeys: a frame, an "
    "outcome, a pickle, a log record",
    stopped_by="what comes from that process is JSON in frames of known length, and checked as a whole; "
    "only the worker pickles",
)
async def test_no_text_of_a_policy_is_obeyed_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts of the policy come back as they were, in an outcome, an error and a log record."""
    install_handler(tmp_path, PASSING, monkeypatch)
    unpickled = tmp_path / "unpickled"
    outcome = '{"reward": 1.0, "components": {}, "reason": "", "carry": {}, "shown": ""}'
    texts = [
        *TEXTS.values(),
        outcome,
        f'"}}\n{outcome}\n',
        encode({"op": "next", "id": 2}, outcome.encode()).decode("latin-1"),
        pickle.dumps(Touch(unpickled)).decode("latin-1"),
        pickle.dumps(Touch(unpickled), 0).decode(),
        "\0" * 10_000,
        "[" * 100_000,
    ]
    plane = Plane(spec())
    async with working(plane, None):
        for done, text in enumerate(texts):
            plane.offer(evaluated(1, text), evaluated(2, text))
            await plane.wait_for(2 * done + 2)
            failed, passed = sorted(plane.outcomes[2 * done :], key=lambda outcome: outcome.rollout)
            assert isinstance(failed, StageFailure)
            assert failed.reason == "InternalError"
            assert failed.message.startswith("ValueError: ")
            assert isinstance(passed, StageResult)
            assert (passed.reward, passed.carry) == (0.5, {"text": text})
    assert not unpickled.exists()
    assert caplog.text.encode(), "what is logged can be written to any file"


TAKEN = """
class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        if ctx.final_text:
            os.write(int(sys.argv[2]), bytes.fromhex(ctx.final_text))
            await asyncio.sleep(0.1)
        return Evaluation(0.5)
"""
"""A handler that does with its connection to the worker what the policy says."""

NEXT: dict[str, Any] = {"op": "next", "id": 99}


@pytest.mark.attack(
    "a handler whose process a policy has taken over breaks the protocol, or keeps the sandbox of a "
    "rollout for the next one",
    stopped_by="the process ends, and its rollout fails with the handler's name; a request of a call that "
    "has ended is refused. It runs **as the worker's user** all the same",
)
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        encode({}, b""),
        encode({"op": "next"}, b"{}"),
        encode(NEXT, b"no JSON"),
        encode(NEXT, b"[" * 100_000),
        encode(NEXT, b"[1]"),
        encode(NEXT, b'{"error": 7}'),
        encode(NEXT, b'{"error": {"kind": "pipeline", "message": "", "class": "ANSWER", "decisions": 3}}'),
        encode(NEXT, b'{"raised": 12}'),
        encode(NEXT, b'{"raised": [1]}'),
        encode(NEXT, b'{"shown": ""}'),
        encode(NEXT, b'{"carry": {}, "reward": 1.0}'),
        encode(NEXT, b'{"carry": {}, "reward": [1], "components": {}}'),
        encode(NEXT, b'{"carry": [], "reward": 1.0, "components": {}}'),
        encode(NEXT, b'{"carry": {}, "reward": 1.0, "components": {}, "more": 1}'),
        encode({"op": "log", "name": ["x"], "level": "high"}, b"x"),
        encode({"op": "agent", "id": 9, "call": 1, "do": []}, b"x"),
    ],
    ids=lambda sent: str(sent[8:50]),
)
async def test_a_process_that_was_taken_over_fails_one_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    install_handler(tmp_path, TAKEN, monkeypatch)
    plane = Plane(spec())
    async with working(plane, None):
        plane.offer(evaluated(1, sent.hex()))
        (outcome,) = await plane.wait_for(1)
        plane.offer(evaluated(2, ""))
        _, after = await plane.wait_for(2)
    if isinstance(outcome, StageFailure):
        assert outcome.reason in ("HandlerFailed", "EvaluationInvalid")
        assert "handler 'steered'" in outcome.message
    else:  # A request that the worker has refused.
        assert outcome.reward == 0.5
    assert isinstance(after, StageResult)
    assert after.reward == 0.5


@pytest.mark.attack(
    "a text makes the handler's code run for ever, so that the worker loses the leases of all its rollouts",
    stopped_by="calls run in processes that end at the limit of the stage, with what they have started",
)
async def test_no_program_that_a_blocked_handler_has_started_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
import subprocess

class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        program = subprocess.Popen(["sh", "-c", "trap '' TERM ABRT; sleep 3600"])
        Path("{tmp_path}/pid").write_text(str(program.pid))
        while True:
            pass
"""
    install_handler(tmp_path, source, monkeypatch)
    plane = Plane(spec(eval={"timeoutSeconds": 3}))
    async with working(plane, None, eval_grace=0.0):
        plane.offer(evaluated(1, ""))
        (outcome,) = await plane.wait_for(1)
        assert isinstance(outcome, StageFailure)
        assert outcome.reason == "EvalTimeout"
        pid = int((tmp_path / "pid").read_text())
        await eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
