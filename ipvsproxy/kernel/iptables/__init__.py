"""Rules of iptables in both variants, and the rules that proxies have left behind there."""
