"""What the tests of the control plane share."""
