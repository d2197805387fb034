"""The stages that a worker performs under a lease: Init, Run or Eval of one rollout."""
