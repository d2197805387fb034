"""A client of ProRL Agent's protocol, which knows nothing of Rollyard, through kills of the control plane.

The client does what clients of the protocol do: it clears the servers, adds its engines, and then for each
batch starts, processes, retries and stops. Its rows are math, code and a repository with a planted bug.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_testing.faults.yard import Yard, a_yard
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("bubblewrap_works", "even_scheduling")]

SAMPLES = 6
END = patience(150.0)
PARAMS = {
    "model": "hosted_vllm/policy",
    "api_key": "unused",
    "temperature": 1.0,
    "top_p": 1.0,
    "max_output_tokens": 48,
    "max_model_len": 2048,
    "max_iterations": 3,
    "token_level_generation": True,
    "native_tool_calling": True,
    "custom_tokenizer": None,
}


class ProrlClient:
    """A client that was written from the description of the protocol alone."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stopping = threading.Event()

    def post(self, path: str, body: Any = None, seconds: float = patience(30.0)) -> httpx.Response:
        return httpx.post(self.address + path, json=body, timeout=seconds, trust_env=False)

    def insist(self, path: str, body: Any = None) -> httpx.Response:
        """Send a request until there is an answer, whatever it is."""
        deadline = time.monotonic() + patience(60)
        while True:
            try:
                return self.post(path, body)
            except httpx.HTTPError:
                assert time.monotonic() < deadline, f"{path} has no answer"
                time.sleep(0.2)

    def process(self, instance: dict[str, Any], job_id: str) -> tuple[dict[str, Any] | None, int]:
        """Return the last result and the number of requests.

        Any answer but 200, and empty messages, are retried at most three times. Without an answer there is no
        server, and the client asks again once it is back.
        """
        body = {"instance": instance, "sampling_params": PARAMS, "job_id": job_id}
        answers = requests = 0
        deadline = time.monotonic() + END
        result = None
        while answers < 4 and time.monotonic() < deadline:
            requests += 1
            try:
                answer = self.post("/process", body, END)
            except httpx.HTTPError:
                time.sleep(0.2)
                continue
            answers += 1
            result = answer.json() if answer.status_code == 200 else None
            if result is not None and result["messages"]:
                break
        return result, requests


def rows() -> list[dict[str, Any]]:
    """Return rows as the data sets of the protocol have them."""
    math = [
        {
            "data_source": "deepscaler",
            "instance_id": f"math-{number}",
            "prompt": [{"role": "user", "content": f"What is {number} + {number + 1}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(3)
    ]
    tests = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin", "metadata": {"func_name": None}}]
    code = {
        "data_source": "deepcoder",
        "instance_id": "code-0",
        "prompt": [{"role": "user", "content": "Read two numbers and print their sum."}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"split": "train", "index": 0},
    }
    return [*math, code, swe_row()]


def swe_row() -> dict[str, Any]:
    packed = io.BytesIO()
    files = {
        "repository/total.py": "def total(numbers):\n    return sum(numbers) + 1\n",
        "repository/test_total.py": (
            "import unittest\nfrom total import total\n\n\n"
            "class TotalTest(unittest.TestCase):\n    def test_total(self):\n"
            "        self.assertEqual(total([1, 2]), 3)\n"
        ),
    }
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return {
        "data_source": "swebench",
        "instance_id": "demo__total-1",
        "repo": "demo/total",
        "base_commit": "0",
        "problem_statement": "total() of total.py returns one too many.",
        "eval_script": "python3 -m unittest -v test_total 2>&1\n",
        "log_parser": "unittest",
        "FAIL_TO_PASS": ["test_total (test_total.TotalTest.test_total)"],
        "PASS_TO_PASS": [],
        "repository": {
            "path": "repository",
            "archive": base64.b64encode(packed.getvalue()).decode(),
            "unpack": ".",
        },
        "patch": "",
        "test_patch": "",
    }


@contextmanager
def generate_server(engine: str, model: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server with ProRL's `/generate` alone, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            asked.append(self.path)
            if self.path != "/generate":
                self._answer(404, {"detail": "Not Found"})
            elif "prompt_ids" not in body:
                self._answer(422, {"detail": "prompt_ids: field required"})
            else:
                self._answer(200, self._sampled(body))

        def _sampled(self, body: dict[str, Any]) -> dict[str, Any]:
            names = ("max_tokens", "temperature", "top_p", "seed")
            sent = {name: body[name] for name in names} | {"prompt": body["prompt_ids"], "model": model}
            found = httpx.post(
                engine + "/v1/completions",
                json=sent | {"logprobs": 0, "return_token_ids": True},
                timeout=patience(60),
                trust_env=False,
            )
            choice = found.raise_for_status().json()["choices"][0]
            return {"response_ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}

        def _answer(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", asked
        finally:
            http.shutdown()
            thread.join(patience(10))


def engine_of(yard: Yard) -> tuple[str, str]:
    """Return the address and the model of the engine that stands for one of the trainer's."""
    deadline = time.monotonic() + patience(90)
    while time.monotonic() < deadline:
        with yard.http() as http:
            pool = http.get("/v1/backendpools/default").raise_for_status().json()
        ready = [one["url"] for one in pool["status"]["backends"] if one["ready"]]
        if ready:
            return ready[0], pool["spec"]["model"]
        time.sleep(0.2)
    raise AssertionError(f"the engine is not ready\n{yard.words()}")


def records(yard: Yard) -> dict[str, dict[str, Any]]:
    """Return every trajectory of the jobs that the calls made, by its id."""
    found: dict[str, dict[str, Any]] = {}
    with yard.http() as http:
        jobs = http.get("/v1/rolloutjobs").raise_for_status().json()["items"]
        for job in jobs:
            cursor, name = "", job["metadata"]["name"]
            while True:
                page = http.get(
                    f"/v1/rolloutjobs/{name}/trajectories", params={"cursor": cursor, "limit": 500}
                )
                lines = [json.loads(line) for line in page.raise_for_status().text.splitlines()]
                assert not {line["id"] for line in lines} & set(found)
                found |= {line["id"]: line for line in lines}
                cursor = page.headers["Rollyard-Cursor"]
                if not lines:
                    break
    return found


def check_ids(result: dict[str, Any], record: dict[str, Any]) -> None:
    """Check that what a trainer makes of a result is what was sampled, id for id."""
    messages = result["messages"]
    ids = [one for message in messages for one in message["token_ids"]]
    mask = [int(message["role"] == "assistant") for message in messages for _ in message["token_ids"]]
    logprobs = [one for message in messages for one in message["logprobs"]]
    segment = record["segments"][-1]
    prompt = len(segment["prompt_ids"])
    assert ids == segment["prompt_ids"] + segment["response_ids"]
    assert mask == [0] * prompt + segment["loss_mask"]
    assert logprobs == [0.0] * prompt + segment["logprobs"]
    before: list[int] = []
    for message in messages:
        if message["role"] == "assistant" and message["token_ids"]:
            assert message["input_ids"] == before
        before = before + message["token_ids"]


def test_a_client_of_the_protocol_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rng = random.Random("prorl")
    config = tmp_path / "prorl.yaml"
    config.write_text(
        "spec:\n"
        "  agent: {tools: [bash, submit]}\n"
        "  sandbox: {resources: {memory: 256Mi, disk: 64Mi, processes: 64}, warm: 4}\n"
        "  stages: {init: {concurrency: 4}, run: {concurrency: 3}, eval: {concurrency: 3}}\n"
    )
    with a_yard("--prorl", "--prorl-port", "0", "--prorl-config", str(config)) as yard:
        yard.start()
        port = int((yard.home / "pids" / "control-plane.prorl-port").read_text())
        client = ProrlClient(f"http://127.0.0.1:{port}")
        engine, model = engine_of(yard)
        with generate_server(engine, model) as (generate, asked):
            assert client.post("/clear_llm_server").status_code == 200
            for address in (engine, generate):
                assert client.post("/add_llm_server", {"address": address}).status_code == 200
            assert client.post("/start").json() == {"status": "Server started successfully"}
            work = [
                (row | {"trajectory_id": sample}, f"{row['instance_id']}/{sample}")
                for row in rows()
                for sample in range(SAMPLES)
            ]
            cancelled = {work[-1][1], work[len(work) // 2][1]}
            with ThreadPoolExecutor(len(work) + len(cancelled)) as pool:
                calls = {job_id: pool.submit(client.process, row, job_id) for row, job_id in work}
                cancels = []
                for kill in range(2):
                    # Between the kills something must end, so that what is killed has been at work again.
                    reach(calls, sum(call.done() for call in calls.values()) + 3, yard)
                    assert yard.kill("control-plane", rng) is not None
                    unfinished = sum(not call.done() for call in calls.values())
                    print(f"kill -9 of the control plane, {unfinished} calls are open")
                    assert unfinished >= 4
                    if kill == 0:
                        cancels = [
                            pool.submit(client.insist, "/cancel", {"job_id": each}) for each in cancelled
                        ]
                assert [cancel.result().status_code for cancel in cancels] == [200] * len(cancelled)
                results = {job_id: call.result() for job_id, call in calls.items()}
            assert client.post("/stop").json() == {"status": "Server stopped successfully"}
            found = records(yard)
            judge(results, cancelled, found)
            assert sum(requests for _, requests in results.values()) > len(work), "no call was ever repeated"
            assert asked.count("/generate") > len(work) // 4, "the server with /generate was not used"

            # The next batch: the same job_ids are other samples, of the same job with its warm workers.
            with yard.http() as http:
                jobs = [one["metadata"]["name"] for one in http.get("/v1/rolloutjobs").json()["items"]]
            assert len(jobs) == 1
            assert client.post("/start").status_code == 200
            row, job_id = work[0]
            again, _ = client.process(row, job_id)
            assert again is not None
            assert again["messages"]
            assert again["rollout"] not in found
            assert client.post("/stop").status_code == 200
        assert yard.stop() == 0, yard.words()
        assert yard.settled_listing() == []


def reach(calls: dict[str, Future[Any]], count: int, yard: Yard) -> None:
    deadline = time.monotonic() + END
    while sum(call.done() for call in calls.values()) < count:
        assert time.monotonic() < deadline, f"only {sum(c.done() for c in calls.values())}\n{yard.words()}"
        time.sleep(0.02)


def judge(
    results: dict[str, tuple[dict[str, Any] | None, int]],
    cancelled: set[str],
    found: dict[str, dict[str, Any]],
) -> None:
    """Check that every call has one rollout of its own with everything that was sampled for it."""
    rollouts: dict[str, str] = {}
    failed = []
    for job_id, (result, _) in results.items():
        assert result is not None, job_id
        rollouts[job_id] = result["rollout"]
        instance, sample = job_id.rsplit("/", 1)
        assert (result["instance_id"], result["trajectory_id"]) == (instance, int(sample))
        record = found[result["rollout"]]
        if job_id in cancelled and not result["messages"]:
            assert (result["success"], result["critical_error"] is not None) == (False, True)
            continue
        assert record["metadata"]["instance_id"] == instance
        if not result["success"]:
            assert (result["critical_error"] is None, result["reward"]) == (False, None)
            # A rollout that is cancelled in Eval has the messages of its Run.
            if job_id in cancelled and record["status"] == "cancelled":
                continue
            # Kills and a busy machine may fail a rollout for good. Then it says so, and has no reward.
            assert record["status"] == "failed", (job_id, result["error"])
            failed.append(f"{job_id}: {result['error']}")
            continue
        assert result["critical_error"] is None
        assert result["reward"] == record["reward"]
        with invariant():
            check_ids(result, record)
    assert len(failed) <= len(results) // 5, failed
    with invariant():
        assert len(set(rollouts.values())) == len(results), "two calls share a rollout"
        assert set(found) == set(rollouts.values()), "a rollout was started that nobody got"
