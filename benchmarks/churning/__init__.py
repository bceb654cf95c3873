"""Faults on purpose in a swarm of real processes: the schedule, what carries it out, and what is watched meanwhile."""
