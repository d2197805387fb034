"""`1+1` in a sandbox's IPython, beside the same behind jupyter_kernel_gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import COMMAND_SECONDS, WrongOutput, bubblewrap, claimed
from rollyard_bench.stats import Contestant, Sample, interleave

if TYPE_CHECKING:
    from rollyard_bench.baselines.gateway import KernelGateway

CODE = "1+1"
ROUNDS = 10


async def _measure(settings: Settings, gateway: KernelGateway | None) -> dict[str, Sample]:
    samples = 100 if settings.quick else 300

    async with bubblewrap() as provider, claimed(provider) as sandbox:

        async def ours() -> None:
            result = await sandbox.client.ipython(CODE, timeout=COMMAND_SECONDS)
            if result.exit_code != 0 or result.result.strip() != "2":
                raise WrongOutput(f"{CODE}: exit code {result.exit_code}, {result!r}"[:400])

        def theirs(quick_ack: bool) -> None:
            if gateway is None:
                raise RuntimeError("no gateway")
            gateway.quick_ack = quick_ack
            if gateway.execute(CODE) != "2":
                raise WrongOutput(f"{CODE} behind the gateway was not 2")

        contestants = {"ours": Contestant(ours, samples, warm_up=10)}
        if gateway is not None:
            contestants["gateway"] = Contestant(lambda: theirs(True), samples, warm_up=10)
            contestants["usual client"] = Contestant(lambda: theirs(False), samples // 5, warm_up=2)
        return await interleave(contestants, ROUNDS)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the p50 of a cell. The gateway's client acknowledges at once, which favours the gateway."""
    try:
        # This import is late, because without the gateway our own figure still stands.
        from rollyard_bench.baselines.gateway import kernel_gateway

        async with kernel_gateway() as gateway:
            times = await _measure(settings, gateway)
    except (OSError, ImportError, httpx.HTTPError) as error:
        times = await _measure(settings, None)
        how = f"ours {times['ours'].text()}; no gateway baseline: {error}"
        return [Measurement("ipython_p50", times["ours"].p50, None, how)]
    how = (
        f"`{CODE}` in a bubblewrap sandbox {times['ours'].text()}; jupyter_kernel_gateway "
        f"outside of any sandbox, websocket client that acknowledges every segment at once "
        f"{times['gateway'].text()}; with a usual client {times['usual client'].text()}"
    )
    name = "jupyter_kernel_gateway, websocket"
    return [Measurement("ipython_p50", times["ours"].p50, Baseline(name, times["gateway"].p50), how)]
