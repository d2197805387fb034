"""What the tests of this repository share: systems to test against, fakes, and readers of what they leave.

Tests import it like any other package: a development installation has it on its path, and no wheel holds it.
Fixtures stay in the `conftest.py` of the folder that uses them.
"""
