"""IPVS: virtual servers and their real servers, their connections and counters, and schedulers."""
