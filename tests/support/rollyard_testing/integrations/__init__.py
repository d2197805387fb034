"""What the tests of the integrations share: rollouts of all kinds, drawn by Hypothesis."""
