"""Rules and sets of nftables in a table of our own, and the tables of other programs."""
