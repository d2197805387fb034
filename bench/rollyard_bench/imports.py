"""How long a fresh interpreter takes to import the client."""

from __future__ import annotations

import subprocess
import sys

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.stats import Contestant, Sample, interleave

NOTHING = "pass"
IMPORT = "from rollyard import Client"
FIRST_USE = (
    "from rollyard import Client; from rollyard_crds import RolloutJob; Client('http://127.0.0.1:1', 'x'); "
    "RolloutJob.model_validate({'metadata': {'name': 'a'}, 'spec': {'tasks': {'stream': True}, 'handler': "
    "'math', 'agent': {'type': 'oracle'}}})"
)


def _interpreter(code: str, samples: int) -> Contestant:
    def start() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)

    # The first start may compile modules and read them from the disk.
    return Contestant(start, samples, warm_up=2)


def _how(code: str, sample: Sample, nothing: Sample) -> str:
    return f'`python -c "{code}"` {sample.text()}; `python -c pass` {nothing.text()}'


async def measure(settings: Settings) -> list[Measurement]:
    """Measure both figures beside an interpreter that does nothing."""
    samples = 5 if settings.quick else 15
    codes = {"nothing": NOTHING, "import": IMPORT, "first": FIRST_USE}
    taken = await interleave({name: _interpreter(code, samples) for name, code in codes.items()}, samples)
    nothing = taken["nothing"]
    beside = Baseline("python -c pass", nothing.p50)
    return [
        Measurement("import_client", taken["import"].p50, beside, _how(IMPORT, taken["import"], nothing)),
        Measurement("first_client", taken["first"].p50, beside, _how(FIRST_USE, taken["first"], nothing)),
    ]
