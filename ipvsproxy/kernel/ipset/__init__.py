"""The sets of ipset."""
