"""Environments: what answers the turns of a completion, such as a tool, a game or a simulated user.

`build.build_environment` makes one. It runs in guests (`hosted.py`), which can be killed, or in a server (`openenv.py`).
"""
