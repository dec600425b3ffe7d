"""Who talks to whom, over which wire. Nothing in this folder imports Lightning."""
