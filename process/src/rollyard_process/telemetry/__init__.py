"""What processes report about their work: spans of traces, and the context of log lines.

Nothing here imports OpenTelemetry before spans are exported: see `export`.
"""
