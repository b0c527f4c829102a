"""The whole job, simulated: the real cores on a virtual clock, a network that misbehaves, workers made of numbers."""
