"""The Slurm driver, which runs stage workers and backends as Slurm jobs, and its daemon, the bridge."""
