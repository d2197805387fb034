"""Which log-probabilities of a sampled token are taken from a server, in each of the calls."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from rollyard_inference.errors import BackendMismatch
from rollyard_inference.replies import sampled
from rollyard_inference.sampling.call import parsed
from rollyard_inference.sampling.prorl import ProrlGenerate
from rollyard_inference.sampling.request import Answer, Sampling
from rollyard_inference.sampling.sglang import SglangGenerate
from rollyard_inference.sampling.vllm import VllmCompletions, VllmGenerate
from rollyard_inference.transports.interface import Reply

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)
PROMPT = [1, 2]
HERE = "the number"
_CHOICE = {"token_ids": [5, 6], "finish_reason": "stop", "prompt_token_ids": PROMPT}
# Each answer has two tokens, 5 and 6. The log-probability of the second is the one to be tried.
ANSWERS: dict[str, tuple[Any, Any]] = {
    "generate": (
        VllmGenerate(),
        {
            "choices": [
                _CHOICE
                | {
                    "logprobs": {
                        "content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": HERE}]
                    }
                }
            ]
        },
    ),
    "completions": (
        VllmCompletions(),
        {"choices": [_CHOICE | {"logprobs": {"token_logprobs": [-1.0, HERE]}}]},
    ),
    "sglang": (
        SglangGenerate(),
        {
            "output_ids": [5, 6],
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": 6},
                "prompt_tokens": 2,
                "completion_tokens": 2,
                "output_token_logprobs": [[-1.0, 5, None], [HERE, 6, None]],
            },
        },
    ),
    "prorl": (ProrlGenerate(), {"response_ids": [5, 6], "logprobs": [-1.0, HERE]}),
}


def read(call: str, number: str) -> Answer:
    """Return what is read from a call's answer, with `number` as the text of the log-probability."""
    reader, answer = ANSWERS[call]
    text = orjson.dumps(answer).replace(orjson.dumps(HERE), number.encode())
    answer_read: Answer = parsed(reader, sampled("POST /x", Reply(200, {}, text)), PROMPT, SAMPLING)
    return answer_read


@pytest.mark.parametrize("call", ANSWERS)
@pytest.mark.parametrize(
    ("number", "taken"),
    [
        ("0.0", 0.0),
        ("0", 0.0),
        ("-0.0", 0.0),
        ("-3", -3.0),
        ("-1e-300", -1e-300),
        ("-745.1", -745.1),
        ("-1000.0", -1000.0),
        # This much above 0 is rounding in reduced precision.
        ("1e-7", 0.0),
        ("1e-3", 0.0),
    ],
)
def test_possible_numbers_are_taken(call: str, number: str, taken: float) -> None:
    assert read(call, number).logprobs == (-1.0, taken)


@pytest.mark.attack(
    "log-probabilities that no sampler gives (-9999, NaN), on which a trainer would train",
    boundary="control plane",
    surface="answers of backends, records of workers",
    stopped_by="refused unless they are numbers from -1,000 to 0; the message names the token and the value",
)
@pytest.mark.parametrize("call", ANSWERS)
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("-9999.0", "is -9999.0, expected a number from -1000 to 0: servers write minus infinity"),
        ("-9999", "is -9999, expected a number from -1000 to 0"),
        ("-1000.001", "expected a number from -1000 to 0"),
        ("-1e30", "is -1e\\+30, expected a number from -1000 to 0"),
        ("-3.4028235e+38", "expected a number from -1000 to 0"),
        ("-1e999", "is -inf, expected a number from -1000 to 0"),
        ("-Infinity", "is -inf, expected a number from -1000 to 0"),
        ("NaN", "is nan, expected a number from -1000 to 0"),
        ("Infinity", "is inf, above 0"),
        ("0.002", "is 0.002, above 0"),
        ("1" + 18 * "0", "above 0"),
        ("-1" + 400 * "0" + ".0", "expected a number from -1000 to 0"),
        ("null", "is None, expected a number"),
        ("true", "is True, expected a number"),
        ('"-0.5"', "is '-0.5', expected a number"),
        ('"-Infinity"', "is '-Infinity', expected a number"),
        ("[]", "is \\[\\], expected a number"),
    ],
)
def test_impossible_numbers_are_refused_with_their_place(call: str, number: str, problem: str) -> None:
    with pytest.raises(BackendMismatch, match=f"^logprob 1, of the sampled token 6, .*{problem}"):
        read(call, number)


@pytest.mark.parametrize("number", ["NaN,", "nan", "-", "", "[" * 100_000, 'NaN, "\\ud800"', "1" + 400 * "0"])
def test_what_json_does_not_have_otherwise_is_refused(number: str) -> None:
    with pytest.raises(BackendMismatch, match="the answer is not JSON"):
        read("prorl", number)
