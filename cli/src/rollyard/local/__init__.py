"""The local driver: control plane, stage workers and backends as subprocesses of `rollyard up`."""
