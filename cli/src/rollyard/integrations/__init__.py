"""Trajectories in the forms that trainers expect: one module for each framework.

Import the module of your framework, such as `rollyard.integrations.trl`. A module imports its framework when
one of its functions is called, so that all of them can be imported where none is installed.
"""
