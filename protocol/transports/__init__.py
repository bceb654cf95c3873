"""Ways to carry frames between peers: libp2p streams, and memory for tests and simulations."""
