"""``sentinel observe``: a whole swarm seen from outside, without torch, hivemind, or a place in it."""
