"""Asynchronous training without threads, sockets or Lightning: clocks, rules, shards, and a world in virtual time."""
