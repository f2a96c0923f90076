"""The buffer: leases, ready groups and batches, behind one socket."""
