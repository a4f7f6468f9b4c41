"""Addresses, local routes, tracked flows, and notifications of their changes."""
