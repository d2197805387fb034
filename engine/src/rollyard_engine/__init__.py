"""The embedded inference backend: ONNX chat models behind the HTTP calls of vLLM that Rollyard uses.

It is run with ``python -m rollyard_engine --model DIR``. This module imports nothing, so importing the
package costs nothing.
"""
