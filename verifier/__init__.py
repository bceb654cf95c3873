"""Pure decisions about peers: statistics, fences, strikes and quorum. No I/O, no clock, no sockets."""
