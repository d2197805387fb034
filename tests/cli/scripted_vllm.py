"""A stand-in for vLLM's API server with the same arguments and calls, and one subprocess as its engine core.

Run it as `python scripted_vllm.py --model … --port … [--script FILE]`. The script, JSON, is read at the
start: `fail` (last words, then exit 1), `no_logprobs`, `slow` (seconds before it listens).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--logprobs-mode", required=True)
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--script", default="")
    parser.add_argument("--label", default="default")
    asked = parser.parse_args()
    script = json.loads(Path(asked.script).read_text()) if asked.script else {}
    # Like vLLM's engine core, it ignores everything but SIGKILL, and does not notice its parent's end.
    core = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", core, "engine-core"])
    if script.get("fail"):
        print(script["fail"], flush=True)
        os._exit(1)
    time.sleep(script.get("slow", 0.0))

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, document: object) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            environment = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "BIND")}
            known = {
                "/health": {},
                "/weight_info": {"weight_version": asked.label},
                "/environment": environment | {"dev": os.environ.get("VLLM_SERVER_DEV_MODE")},
            }
            self._answer(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions" or not body:  # The request only asks whether the call exists.
                self._answer(400 if self.path == "/v1/completions" else 404, {})
                return
            if body["model"] != asked.served_model_name:
                self._answer(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
                return
            logprobs = None if script.get("no_logprobs") else {"token_logprobs": [-1.5]}
            choice = {"token_ids": [7], "logprobs": logprobs, "finish_reason": "length"}
            self._answer(200, {"choices": [choice | {"prompt_token_ids": body["prompt"]}]})

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    ThreadingHTTPServer((asked.host, asked.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
