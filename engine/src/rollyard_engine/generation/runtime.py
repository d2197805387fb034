"""onnxruntime-genai, imported with its telemetry off. The engine imports it from here only.

It and onnxruntime look at the variable when they are imported. Without it they write a device id and events
into `~/.cache/Microsoft` and a file into the folder for temporary files at once, so that their
`disable_telemetry_events()` comes too late. A value that the user has set is kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime_genai

__all__ = ["onnxruntime_genai"]
