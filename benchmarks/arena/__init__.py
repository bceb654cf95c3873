"""The arena: whole swarms with many attackers, in one process each, measured with and without the checker."""
