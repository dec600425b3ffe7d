"""WHO talks to whom, over which wire: topology, counted collectives, the communication thread."""
