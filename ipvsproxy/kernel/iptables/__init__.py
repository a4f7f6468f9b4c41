"""Rules of iptables, in both variants, and what proxies have left behind in them."""
