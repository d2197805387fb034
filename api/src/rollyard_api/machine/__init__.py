"""The life of rollouts, groups and jobs as pure decisions: no I/O, no clock and no database.

An event and what is known about a rollout go in, and a transition comes out. `rollouts.transitions` applies
it.
"""
