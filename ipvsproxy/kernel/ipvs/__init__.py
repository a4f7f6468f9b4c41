"""IPVS: virtual servers and their real servers, their connections, their counters, and schedulers."""
