"""A real cluster, releases of the chart on it, and faults between the operator and the cluster."""
