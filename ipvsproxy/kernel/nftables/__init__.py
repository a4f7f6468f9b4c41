"""Rules and sets of nftables in our own table, and the tables of other programs."""
