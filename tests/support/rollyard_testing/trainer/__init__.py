"""The trainer of examples/grpo under kill -9, and its ledger beside what the control plane delivered."""
