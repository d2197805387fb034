"""What a worker does with one lease: Init, Run or Eval of one rollout."""
