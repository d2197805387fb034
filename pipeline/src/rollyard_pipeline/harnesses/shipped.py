"""The harnesses that come with Rollyard: `command` and `mini-swe-agent`."""

from __future__ import annotations

import shlex

from rollyard_pipeline.harnesses.base import Harness, HarnessPlace, HarnessProgram


class CommandHarness(Harness):
    """Runs the job's `agent.command`, which finds the gateway and the task in variables and files."""

    def program(self, place: HarnessPlace) -> HarnessProgram:
        """Return the job's command."""
        assert place.command is not None  # AgentSpec has checked it.
        return HarnessProgram(place.command)


class MiniSweAgentHarness(Harness):
    """Runs `mini` of mini-swe-agent. Its log is the trajectory that it writes itself."""

    def program(self, place: HarnessPlace) -> HarnessProgram:
        """Return the call of `mini`, or of the job's `agent.command` in its place."""
        words = ["-y", "--exit-immediately", "-m", f"openai/{place.model}", "-t", place.prompt]
        return HarnessProgram(
            f'{place.command or "mini"} {shlex.join(words)} -o "$ROLLYARD_LOG"',
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": place.folder,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            log="trajectory.json",
        )
