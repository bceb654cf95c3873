"""The daemon: command line, life of a node, training, metrics and HTTP."""
