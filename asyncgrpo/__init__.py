"""Asynchronous actor-learner GRPO: generators stream completed groups, a bounded buffer holds them, a learner trains."""

__version__ = "0.1.0"
