"""The product's own rollout plane on a virtual clock, under seeded faults. docs/simulation.md says what and why."""
