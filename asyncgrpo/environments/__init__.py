"""Environments: what answers the turns of a completion, such as a tool, a game or a simulated user.

`build.build_environment` makes one. Code of users runs in guests (`hosted.py`, `worker.py`), which can be killed; built-in
environments (`tools.py`) are quick and run in the generator.
"""
