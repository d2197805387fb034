"""The Slurm driver: stage workers and backends as sbatch jobs, and the daemon that keeps them."""
