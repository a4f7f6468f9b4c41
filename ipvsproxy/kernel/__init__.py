"""Drivers of kernel objects."""
