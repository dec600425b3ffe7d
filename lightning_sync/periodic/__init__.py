"""Replicas that meet now and then: when, which parameters, and what the agreed difference does to them."""
