"""The exec server: its connections, its requests, and the files that it reads and writes for its clients.

`python -I -m rollyard_sandbox.server --help` lists the options of its command line.
"""
