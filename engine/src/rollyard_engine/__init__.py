"""The embedded inference backend: ONNX chat models behind the HTTP calls of vLLM that Rollyard uses.

Run it with ``python -m rollyard_engine --model DIR``. Nothing is imported here, so that importing the
package costs nothing.
"""
