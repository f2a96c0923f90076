"""How many generators and learner ranks: measured, predicted in closed form, simulated with the product's own code."""
