"""Rewards: how completions are scored. `build.build_reward` makes one."""
