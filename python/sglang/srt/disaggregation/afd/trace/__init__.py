"""One trace of both roles: what each rank keeps, and the file that Perfetto opens."""
