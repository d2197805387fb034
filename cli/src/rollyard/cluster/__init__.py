"""The control plane of a Kubernetes cluster, reached with the rights of a kubeconfig, over kubectl."""
