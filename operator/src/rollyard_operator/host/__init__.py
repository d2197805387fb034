"""What drivers outside of a cluster share: subprocesses, the home folder, and keeping a control plane."""
