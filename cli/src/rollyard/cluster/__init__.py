"""Access to the control plane of a Kubernetes cluster over kubectl, with the rights of a kubeconfig."""
