"""The learner: groups in, the next policy version out."""
