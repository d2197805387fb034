"""The stage workers: Init, Run, Eval, agents, token trajectories, handlers, sandbox providers."""
