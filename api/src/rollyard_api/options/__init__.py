"""The options of the control plane: declared once, and read from the command line, variables and a file.

The programs that start a control plane (`rollyard up`, the Slurm bridge) add options of their own. This
folder needs no library beyond those of the client, so that every `--help` works without extras; only `load`
needs pydantic-settings.
"""
