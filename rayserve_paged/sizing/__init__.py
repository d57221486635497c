"""How large a deployment has to be: memory from the model's shape, rates from the simulator."""
