"""Rules of iptables in both of its variants, including rules that proxies have left behind."""
