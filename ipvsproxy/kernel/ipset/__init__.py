"""The driver for sets of ipset."""
