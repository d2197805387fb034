"""The Slurm driver: stage workers and backends as Slurm jobs, and the daemon that keeps them."""
