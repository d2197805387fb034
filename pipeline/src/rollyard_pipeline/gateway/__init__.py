"""The gateway: agents that know nothing of Rollyard ask the model through it, and leave trajectories."""
